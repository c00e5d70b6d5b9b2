"""What goes wrong in one request or one step stays there: the engine serves the next request as if nothing was."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import ProgramError
from jaxpaged.models.decoder import norm_of_heads
from tests.models.checkpoints import write_checkpoint

EPS = 3e-5  # of a norm: no other model of the tests has it
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def runner(llm):
    return llm.llm_engine._core.executor.worker.runner


def texts(llm, prompts, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].finish_reason, output.error) for output in outputs]


def test_a_step_that_raises_fails_its_requests_and_the_next_ones_are_served(llm, runner, monkeypatch):
    def explode(*_):
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_pack", explode)
        ((reason, error),) = texts(llm, ["Hello"])
    assert reason == "error"
    assert "the device is on fire" in error
    assert texts(llm, ["Hello"]) == [("length", None)]


def test_a_model_whose_programs_cannot_be_traced_ends_the_start_in_one_sentence(tmp_path, monkeypatch, caplog):
    """As float16 was that a kernel did not take."""

    def refuse(x_TNH, p, config):
        if config.norm.eps == EPS:  # another engine of this process may be compiling meanwhile
            raise ValueError("x_TD is float16[16, 256]; accepted are others.\nAnd much more.")
        return norm_of_heads(x_TNH, p, config)

    monkeypatch.setattr("jaxpaged.models.decoder.norm_of_heads", refuse)
    options = {"max_num_seqs": 1, "max_model_len": 48, "token_buckets": (16,), "max_num_batched_tokens": 16}
    file = write_checkpoint("qwen3", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": EPS}))
    with pytest.raises(ProgramError) as caught:
        LLM(str(tmp_path), skip_tokenizer_init=True, compilation_cache_dir="off", **options)
    assert "program forward of size 16 cannot be compiled: x_TD is float16[16, 256]; accepted are others." in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert not said


def live_bytes():
    """Bytes of all arrays that live in this process."""
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_the_old_kv_cache_is_gone_before_a_new_one_is_made(llm, monkeypatch):
    worker = llm.llm_engine._core.executor.worker
    size = sum(array.nbytes for array in jax.tree.leaves(worker.device.state.kv))
    before, seen, make = live_bytes(), [], worker.new_state

    def new_state():
        seen.append(live_bytes())
        return make()

    def explode(*_):
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "new_state", new_state)
        for stage in ("_pack", "dispatch"):  # the first leaves the state as it was, the second has donated it
            with monkeypatch.context() as once:
                once.setattr(worker.runner if stage == "_pack" else worker.runner.output_stage, stage, explode)
                assert texts(llm, ["Hello"])[0][0] == "error"
    assert len(seen) == 2
    assert max(seen) <= before - size, "two KV caches at a time are more memory than a device has"
    assert texts(llm, ["Hello"]) == [("length", None)]


def test_a_recovery_that_is_cut_short_can_be_made_again(llm, monkeypatch):
    worker = llm.llm_engine._core.executor.worker
    with monkeypatch.context() as patch:
        patch.setattr(worker, "new_state", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.recover()
    worker.recover()
    llm.reset_prefix_cache()
    assert texts(llm, ["Hello"]) == [("length", None)]


def test_logits_that_are_not_numbers_fail_the_request_and_are_counted(llm, runner, monkeypatch, caplog):
    device = llm.llm_engine._core.executor.worker.device
    with monkeypatch.context() as patch:
        patch.setattr(device, "head", jnp.full_like(device.head, jnp.nan))
        failed = texts(llm, ["Hello", "Hi"])
    assert [reason for reason, _ in failed] == ["error", "error"]
    assert all("logits for this request are not finite numbers" in error for _, error in failed)
    assert texts(llm, ["Hello"]) == [("length", None)]
    counted = {metric.name: metric for metric in llm.get_metrics()}
    assert counted["vllm:corrupted_requests"].value == 2
    assert [record.levelname for record in caplog.records if "no finite numbers" in record.message] == ["WARNING"]


def test_what_nobody_has_written_may_hold_anything(llm):
    """Blocks, and hidden states of no token, are not numbers at first: no answer changes."""
    state = llm.llm_engine._core.executor.worker.device.state
    prompts = ["Hello", "What is the capital of Kenya? " * 20]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert llm.reset_prefix_cache()
    state.kv, state.hidden = jax.tree.map(poisoned, (state.kv, state.hidden))
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected


def poisoned(array):
    return jax.device_put(jnp.full_like(array, jnp.nan), array.sharding)


def test_a_request_that_a_logits_processor_refuses_fails_alone(llm):
    refused = SamplingParams(temperature=0.0, max_tokens=4, extra_args={"ban_below": "much"})
    outputs = llm.generate(["Hello", "Hello"], [refused, GREEDY], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "ban_below" in outputs[0].error


def test_a_custom_logits_processor_changes_the_requests_that_it_concerns_and_no_others(llm):
    banned = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, extra_args={"ban_below": 1200})
    outputs = llm.generate(["Hello", "Hello"], [banned, GREEDY], use_tqdm=False)
    assert min(outputs[0].outputs[0].token_ids) >= 1200
    assert min(outputs[1].outputs[0].token_ids) < 1200

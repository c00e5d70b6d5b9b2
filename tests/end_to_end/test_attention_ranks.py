"""Attention ranks that have experts together, through whole engines: the tokens of one device, and a KV cache each."""

import json
import re
import time

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams, StructuredOutputsParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import compile_bundle
from jaxpaged.errors import ConfigError
from jaxpaged.tools.planning.plan_engine import plan_engine
from pallas_kernels.llvm.machine import why_not
from tests.engine.observability.test_kv_event_publisher import Follower
from tests.engine.small_tokenizer import make_backend
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.paged import golden_of

OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "compilation_cache_dir": "off",
    "enable_expert_parallel": True,
}


def answers(llm, *prompts, **params):
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    if isinstance(params["max_tokens"], list):
        params = [SamplingParams(**{**params, "max_tokens": most}) for most in params["max_tokens"]]
    else:
        params = SamplingParams(**params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs


def lengths_of_runs(llm):
    """The lengths of the runs of decode steps, by sampler."""
    found = {}
    for record in llm.llm_engine._core.step_log.read()[0]:
        if record.num_steps > 1:
            found.setdefault("full" if record.full_sampler else "plain", set()).add(record.num_steps)
    return found


def check_events(llm):
    """A follower of a rank's events knows what that rank has cached."""
    stored = []
    for rank, publisher in zip(scheduler_of(llm).ranks, llm.llm_engine._core._publishers, strict=True):
        follower, deadline = Follower(publisher), time.monotonic() + 10
        while len(publisher._remembered) < publisher._next_number and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of its own sends them
        for _, payload in publisher._remembered:
            assert follower.take(payload).data_parallel_rank == len(stored)
        cached = {key[:-4] for pool in rank.kv_cache_manager.pools for key in pool._cached}
        assert follower.stored.keys() == cached and len(cached) > 2
        stored.append(follower.stored)
        follower.close()
    assert stored[0] != stored[1]


def scheduler_of(llm):
    return llm.llm_engine._core._scheduler


def test_two_ranks_give_the_tokens_of_one_device_and_hold_twice_as_many(tmp_path):
    """Chunks, cached beginnings, preemption, runs of decode steps, everything of the full sampler, log probabilities;
    and after sleeping."""
    golden, prompt = golden_of("mixtral")["greedy"], prompt_of("mixtral")
    folder = str(write_checkpoint("mixtral", tmp_path))
    asked = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1}
    asked |= {"logit_bias": {3: 2.0}, "min_tokens": 4}
    with LLM(**OPTIONS, model=folder, num_gpu_blocks_override=14, num_scheduler_steps=1) as alone:
        drawn, outputs = answers(alone, prompt, prompt[:9], prompt[3:20], **asked)
        blocks = alone.stats().number("num_kv_blocks")
    runs = {"num_scheduler_steps": 4, "wait_for_programs": True}
    runs["kv_events_config"] = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    with LLM(**OPTIONS, **runs, model=folder, num_gpu_blocks_override=14, data_parallel_size=2) as llm:
        assert answers(llm, prompt)[0] == [golden], "the other rank has nothing to do"
        assert answers(llm, prompt, prompt)[0] == [golden] * 2
        assert lengths_of_runs(llm) == {"plain": {3, 4}}
        twice = answers(llm, prompt, prompt[:9], max_tokens=[9, 4])[0]
        assert [len(tokens) for tokens in twice] == [9, 4] and twice[0] == golden[:9], "one ends in the middle of a run"
        assert answers(llm, *[prompt] * 6)[0] == [golden] * 6
        assert llm.stats().number("num_preemptions") > 0 and llm.stats().number("prefix_cache_hits") > 0
        both, ours = answers(llm, prompt, prompt[:9], prompt[3:20], **asked)
        assert both == drawn
        llm.collective_rpc("wait_for_programs")
        assert answers(llm, prompt, prompt[:9], prompt[3:20], **asked)[0] == drawn
        assert 4 in lengths_of_runs(llm)["full"]
        for one, other in zip(outputs, ours, strict=True):
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == len(one.prompt_token_ids)
            for a, b in zip(
                one.prompt_logprobs[1:] + one.outputs[0].logprobs, other.prompt_logprobs[1:] + other.outputs[0].logprobs
            ):
                assert a.keys() == b.keys()
                assert [value.logprob for value in a.values()] == pytest.approx(
                    [v.logprob for v in b.values()], abs=1e-4
                )
        ranks = scheduler_of(llm).ranks
        assert len(ranks) == 2 and all(each.kv_cache_manager.pools[0].last_given for each in ranks), "both had requests"
        assert llm.stats().number("num_kv_blocks") == 2 * blocks
        scheduler_of(llm).check_integrity()
        check_events(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, prompt, prompt[:9])[0][0] == golden
        assert llm.stats().number("recompiles") == 0
        (kv,) = llm.collective_rpc(lambda worker: worker.device.state.kv)
        assert {leaf.sharding.shard_shape(leaf.shape)[0] for leaf in jax.tree.leaves(kv)} == {14}
        assert {leaf.shape[0] for leaf in jax.tree.leaves(kv)} == {28}
        (memory,) = llm.collective_rpc(lambda worker: worker.memory)
    config = EngineConfig.from_options(model=folder, data_parallel_size=2, enable_expert_parallel=True)
    plan = plan_engine(config, "h100:2", compile=False)
    assert plan.weight_bytes == memory["weight_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "devices"),
    [
        ("deepseek_v3", 4, 2),
        pytest.param("gpt_oss", 2, 2, marks=pytest.mark.exhaustive),
        ("qwen2_moe", 3, 1),
        pytest.param("llama4", 2, 2, marks=pytest.mark.exhaustive),
        pytest.param("mixtral_window_top1", 2, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_go_with_any_experts_and_several_devices_each(name, ranks, devices, tmp_path):
    """Windows, shared experts, one expert a token, odd numbers of experts and of devices."""
    golden, prompt = golden_of(name)["greedy"], prompt_of(name)
    options = {"data_parallel_size": ranks, "tensor_parallel_size": devices, "num_gpu_blocks_override": 64}
    with LLM(**OPTIONS, **options, model=str(write_checkpoint(name, tmp_path))) as llm:
        (first, beside, *more), _ = answers(llm, prompt, prompt[5:17], *[prompt] * ranks)
        assert [first, *more] == [golden] * (ranks + 1)
        assert answers(llm, prompt[5:17])[0] == [beside]
        assert llm.stats().number("recompiles") == 0


@pytest.mark.slow
def test_a_grammar_binds_a_request_of_one_rank_and_no_other(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["mixtral"], "vocab_size": 300}))
    make_backend().save(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    bound = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"))
    options = {**OPTIONS, "skip_tokenizer_init": False, "load_format": "dummy", "num_gpu_blocks_override": 64}
    with LLM(str(tmp_path), **options, data_parallel_size=2) as llm:
        (alone,) = llm.generate(["the cat"], params, use_tqdm=False)
        free, kept = llm.generate(["the cat", "the dog"], [params, bound], use_tqdm=False)
        assert free.outputs[0].token_ids == alone.outputs[0].token_ids
        assert kept.error is None and re.fullmatch("[ab]{9}", kept.outputs[0].text)
        assert llm.stats().number("recompiles") == 0


@pytest.mark.slow
@pytest.mark.parametrize("pooling_type", ["MEAN", pytest.param("LAST", marks=pytest.mark.exhaustive)])
def test_ranks_pool_as_one_device_does(tmp_path, pooling_type):
    """Prompts that take several steps, preemption, more prompts than rows, and a rank that has nothing to do."""
    folder, prompt = str(write_checkpoint("mixtral", tmp_path)), prompt_of("mixtral")
    prompts = [[*prompt, *prompt[:5]], prompt[:3], prompt[2:20], prompt[:1], prompt[5:], prompt[:17], [*prompt, 7]]
    asked = [{"prompt_token_ids": each} for each in prompts]
    options = {"runner": "pooling", "convert": "embed", "pooler_config": {"pooling_type": pooling_type}}
    vectors = lambda outputs: np.array([output.outputs.embedding for output in outputs])
    with LLM(**OPTIONS, **options, model=folder, num_gpu_blocks_override=14) as alone:
        expected = vectors(alone.embed(asked, use_tqdm=False))
    with LLM(**OPTIONS, **options, model=folder, num_gpu_blocks_override=14, data_parallel_size=2) as llm:
        np.testing.assert_allclose(vectors(llm.embed(asked[:1], use_tqdm=False)), expected[:1], atol=1e-5)
        np.testing.assert_allclose(vectors(llm.embed(asked, use_tqdm=False)), expected, atol=1e-5)
        assert len({tuple(vector.round(3)) for vector in expected}) == len(prompts)
        assert llm.stats().number("recompiles") == 0
        scheduler_of(llm).check_integrity()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 4}, "ranks spread requests in place of contexts"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "drafts 2 tokens"),
        ({"kv_offload": "host=1M"}, "besides the device"),
        ({"data_parallel_size": 16}, "data_parallel_size 16 times tensor_parallel_size 1 is 16"),
        ({"data_parallel_size": 5, "tensor_parallel_size": 2}, "is 10, and no 10 of 8 cpu devices form a mesh"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_weights_load(options, reason, tmp_path):
    folder = write_checkpoint("mixtral", tmp_path)
    (folder / "model.safetensors").write_bytes(b"nothing that could be loaded")
    with pytest.raises(ConfigError, match=reason):
        LLM(**{**OPTIONS, "model": str(folder), "data_parallel_size": 2, **options})


def test_models_without_experts_have_no_ranks(tmp_path):
    with pytest.raises(ConfigError, match="the model has no experts"):
        LLM(**OPTIONS, model=str(write_checkpoint("llama", tmp_path)), data_parallel_size=2)


@pytest.mark.exhaustive
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_from_a_bundle_compile_nothing_and_give_the_same_tokens(tmp_path):
    """XLA cannot store programs that sort on a CPU, so pairs of tokens and experts are counted there."""
    golden, prompt, folder = golden_of("mixtral")["greedy"], prompt_of("mixtral"), write_checkpoint("mixtral", tmp_path)
    options = {**OPTIONS, "model": str(folder), "data_parallel_size": 2, "num_gpu_blocks_override": 14}
    options["num_scheduler_steps"] = 1
    compile_bundle(EngineConfig.from_options(**options), tmp_path / "bundle")
    with LLM(**options, bundle=str(tmp_path / "bundle")) as llm:
        assert answers(llm, prompt, prompt)[0] == [golden] * 2
        stats = llm.llm_engine.executor_stats()
        assert stats["programs_from_bundle"] == stats["programs"] > 0 and stats["recompiles"] == 0
        assert llm.collective_rpc(lambda worker: worker.programs.seconds) == [{}], "a program was compiled"

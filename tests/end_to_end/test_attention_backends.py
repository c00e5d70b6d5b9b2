"""An engine gives transformers' tokens with every attention kernel, in the simulator of the device that it is for."""

import json

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.programs.declare import SHARED_KINDS, ProgramKind
from pallas_kernels.ragged_paged_attention import gpu
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

# One forward program, and steps one by one: compiling a simulated kernel and running it once both take seconds.
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "max_model_len": 64,
    "block_size": 16,
    "num_gpu_blocks_override": 20,
    "num_scheduler_steps": 1,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}


@pytest.mark.slow
# A TPU's kernel is in an engine in `test_handover_pairs.py`, too, whose pages go to another and back.
@pytest.mark.parametrize("backend", ["gpu-interpret", pytest.param("tpu-interpret", marks=pytest.mark.exhaustive)])
def test_prompts_decodes_and_cached_beginnings_give_the_tokens_of_transformers(backend, tmp_path):
    """A prompt in two chunks beside a short one, in layers with a window and without."""
    model, golden, prompt = write_checkpoint("gemma2", tmp_path), golden_of("gemma2")["greedy"], prompt_of("gemma2")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM(str(model), attention_backend=backend, **OPTIONS) as llm:
        prompts = [{"prompt_token_ids": prompt}, {"prompt_token_ids": prompt[5:17]}]
        output, beside = llm.generate(prompts, params, use_tqdm=False)
        [again] = llm.generate(prompts[:1], params, use_tqdm=False)
    assert output.outputs[0].token_ids == again.outputs[0].token_ids == golden[:3]
    assert len(beside.outputs[0].token_ids) == 3
    assert again.num_cached_tokens == 32


@pytest.mark.slow
def test_a_step_in_which_rows_share_takes_the_program_that_reads_it_once_where_launches_for_it_cost(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(gpu, "SLOTS_OF_A_STEP", 0)
    monkeypatch.setattr(gpu, "SLOTS_OF_A_TOKEN", 0)
    options = {**OPTIONS, "max_model_len": 256, "max_num_batched_tokens": 16, "token_buckets": (16,)}
    options["num_gpu_blocks_override"] = 40
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    common = [5 + i % 200 for i in range(150)]
    prompts = [{"prompt_token_ids": [*common, *own]} for own in ([7, 8], [9])]
    called = []
    path = write_checkpoint("qwen3", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 256}))
    with LLM(str(path.parent), attention_backend="gpu-interpret", **options) as llm:
        device = llm.llm_engine._core.executor.worker.device
        call = device.call
        monkeypatch.setattr(device, "call", lambda key, *given: (called.append(key), call(key, *given))[1])
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        assert not {key.kind for key in called} & set(SHARED_KINDS.values()), "one row shares with nobody"
        llm.generate(prompts, params, use_tqdm=False)  # the program is wanted now
        device.programs[ProgramKey(ProgramKind.FORWARD_SHARED, 16)]
        called.clear()
        together = llm.generate(prompts, params, use_tqdm=False)
    assert ProgramKey(ProgramKind.FORWARD_SHARED, 16) in called
    for one, both in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == both.outputs[0].token_ids
        for mine, other in zip(one.outputs[0].logprobs, both.outputs[0].logprobs, strict=True):
            assert {token: x.logprob for token, x in mine.items()} == pytest.approx(
                {token: x.logprob for token, x in other.items()}, abs=1e-4
            )

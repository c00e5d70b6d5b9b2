"""An engine gives transformers' tokens with every attention kernel, in the simulator of the device that it is for."""

import pytest

from jaxpaged import LLM, SamplingParams
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

# One forward program, and steps one by one: compiling a simulated kernel and running it once both take seconds.
OPTIONS = {
    "max_num_seqs": 2, "max_num_batched_tokens": 32, "token_buckets": (32,), "max_model_len": 64, "block_size": 16,
    "num_gpu_blocks_override": 20, "num_scheduler_steps": 1, "dtype": "float32", "skip_tokenizer_init": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu-interpret", "tpu-interpret"])
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

"""The embedded model gives its answers with every attention kernel, in the simulator of the device that it is for."""

import pytest

from jaxpaged import LLM, SamplingParams

# One forward program, and steps one by one: compiling a simulated kernel and running it once both take seconds.
OPTIONS = {
    "max_num_seqs": 2, "max_num_batched_tokens": 32, "token_buckets": (32,), "max_model_len": 64, "block_size": 16,
    "num_gpu_blocks_override": 20, "num_scheduler_steps": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu-interpret", "tpu-interpret"])
def test_prompts_decodes_and_cached_beginnings_give_the_models_answers(backend):
    questions = [f"What is the capital of {country}?" for country in ("France", "Japan")]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with LLM("demo", attention_backend=backend, **OPTIONS) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
        again = llm.chat(conversations[0], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)[0]
    assert [output.outputs[0].text for output in outputs] == ["The capital of"] * 2
    assert again.num_cached_tokens == 16
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids[:1]

"""The engine gives the embedded model's answers with each kernel forced, simulated where its device is not here."""

import pytest

from jaxpaged import LLM, SamplingParams

# One small program for every step: what takes time is compiling the simulation.
OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 16,
           "token_buckets": (16,)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu-interpret", "tpu-interpret"])
def test_an_engine_with_a_forced_kernel_gives_the_right_answers(backend):
    questions = ["What is the capital of France?", "What is the capital of Japan?"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with LLM("demo", attention_backend=backend, **OPTIONS) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    for output, city in zip(outputs, ("Paris", "Tokyo"), strict=True):
        assert city in output.outputs[0].text

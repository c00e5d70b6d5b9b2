"""What vLLM's basic examples show, in our own words, on the embedded model."""

import dataclasses

import pytest

from jaxpaged import LLM, EngineArgs, SamplingParams

PROMPTS = ["Once upon a time", "The little fox"]


@pytest.fixture(scope="module")
def llm():
    args = EngineArgs(model="demo", enforce_eager=True, trust_remote_code=False, max_model_len=128, max_num_seqs=4)
    with LLM(**dataclasses.asdict(args)) as llm:
        yield llm


def test_a_batch_of_prompts(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.outputs[0].text and vars(output)["finished"] for output in outputs)


def test_chats_with_the_models_own_parameters(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 30, 0.0
    conversation = [{"role": "user", "content": "What is the capital of Kenya?"}]
    outputs = llm.chat([conversation] * 3, params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} == {"The capital of Kenya is Nairobi."}
    streamed = llm.stream(conversation, params)
    assert "".join(chunk.text for chunk in streamed) == "The capital of Kenya is Nairobi."

"""What vLLM's basic examples show, in our own words, on the embedded model."""

import dataclasses

import pytest

from jaxpaged import LLM, EngineArgs, FlexibleArgumentParser, LLMEngine, SamplingParams

PROMPTS = ["Once upon a time", "The little fox"]


@pytest.fixture(scope="module")
def llm():
    small = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    args = EngineArgs(model="demo", enforce_eager=True, trust_remote_code=False, **small)
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


@pytest.mark.slow
def test_an_engine_that_a_script_steps_itself_while_another_lives(llm):
    """Nothing but steps is asked for, and programs for log probabilities and penalties are compiled meanwhile."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="steps an engine"))
    args = parser.parse_args(["--max_model_len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"])
    waiting = [
        ("Once", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("The", SamplingParams(n=2, temperature=0.8, frequency_penalty=0.1)),
    ]
    with LLMEngine.from_engine_args(EngineArgs.from_cli_args(args)) as engine:
        assert engine.model_config.max_model_len == 128
        finished = {}
        while waiting or engine.has_unfinished_requests():
            if waiting:
                engine.add_request(waiting[0][0], *waiting.pop(0))
            finished |= {output.prompt: output for output in engine.step() if output.finished}
    once, the = finished["Once"], finished["The"]
    assert len(once.outputs) == 1 and len(the.outputs) == 2
    assert [line is None for line in once.prompt_logprobs] == [True] + [False] * (len(once.prompt_token_ids) - 1)
    assert len(once.outputs[0].logprobs) == len(once.outputs[0].token_ids) and the.outputs[0].logprobs is None
    assert llm.generate("Once", SamplingParams(temperature=0.0))[0].outputs[0].text == once.outputs[0].text

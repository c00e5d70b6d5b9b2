"""What vLLM's basic examples show, in our own words, on the embedded model."""

import argparse
import dataclasses

import pytest

from jaxpaged import LLM, EngineArgs, FlexibleArgumentParser, LLMEngine, SamplingParams
from jaxpaged.errors import ConflictError, UsageError

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


def test_an_engine_that_a_script_steps_itself(llm):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="steps an engine"))
    args: argparse.Namespace = parser.parse_args(["--max_model_len", "128", "--max-num-seqs", "4"])
    with LLMEngine.from_engine_args(EngineArgs.from_cli_args(args)) as engine:
        waiting = [("Once", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
                   ("The", SamplingParams(n=2, temperature=0.8, frequency_penalty=0.1))]  # fmt: skip
        finished = []
        while waiting or engine.has_unfinished_requests():
            if waiting:
                engine.add_request(str(len(waiting)), *waiting.pop(0))
            finished += [output for output in engine.step() if output.finished]
        assert sorted(len(output.outputs) for output in finished) == [1, 2]
        assert engine.model_config.max_model_len == 128


def test_functions_reach_worker_and_parameters(llm):
    assert llm.collective_rpc("stats")[0]["recompiles"] == 0
    assert llm.collective_rpc(lambda worker, times, more: (worker.stats()["steps"] > 0, times, more), None, (2,),
                              {"more": 3}) == [(True, 2, 3)]  # fmt: skip
    [names] = llm.apply_model(lambda params: [field.name for field in dataclasses.fields(params)])
    assert names
    with pytest.raises(UsageError, match="no method 'nonsense'"):
        llm.collective_rpc("nonsense")
    with pytest.raises(UsageError, match="timeout is 3"):
        llm.collective_rpc("stats", 3)


def test_parameters_that_sleep_are_refused(llm):
    llm.sleep(level=1)
    with pytest.raises(ConflictError, match="weights sleep"):
        llm.apply_model(id)
    llm.wake_up()
    assert llm.apply_model(lambda params: True) == [True]

"""An engine that was shut down leaves no thread and no process behind, whatever it has done."""

import asyncio

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.grammar_checks import GrammarChecks
from jaxpaged.serving.requests import RequestContext
from tests.engine import fake_core
from tests.engine.fake_engine import make_engine, run_to_end
from tests.engine.small_tokenizer import make_tokenizer
from tests.entrypoints.http.saying_model import SayingExecutor
from tests.processes_and_threads import left_of, running

pytest.importorskip("llguidance")
SHAPED = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[ab]{1,3}"))


def test_of_an_engine_whose_grammars_were_compiled():
    """Before, the threads that compile outlived it."""
    before, tokenizer = running(), make_tokenizer()
    grammars = Grammars(tokenizer.backend.to_str(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    engine, _ = make_engine(SayingExecutor("ab"), grammars=grammars)
    engine.add_request("r", "hello", SHAPED)
    run_to_end(engine)
    assert any("jaxpaged-grammar" in each for each in running() - before), "the test is too easy"
    engine.shutdown()
    assert left_of(before) == set()
    engine.shutdown()


def test_of_an_engine_with_a_core_of_its_own_process():
    async def scenario():
        engine = AsyncLLM.from_config(EngineConfig(), factory=fake_core.FACTORY)
        outputs = [each async for each in engine.generate("hello", SamplingParams(max_tokens=3), "r")]
        assert outputs[-1].finished
        engine.input_processor.grammar_checker.check(SHAPED.structured_outputs)
        engine.shutdown()

    before = running()
    asyncio.run(scenario())
    assert left_of(before) == set()


def test_of_a_desk_where_shapes_are_checked():
    async def scenario():
        engine, _ = make_engine()
        desk = GrammarChecks(engine.input_processor.grammar_checker)
        await desk.check(SHAPED.structured_outputs, RequestContext("a"))
        desk.close()
        engine.shutdown()

    before = running()
    asyncio.run(scenario())
    assert left_of(before) == set()

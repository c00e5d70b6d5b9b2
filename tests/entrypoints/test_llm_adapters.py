"""`lora_request` of `LLM`: one for all prompts or one for each, in every method that takes it."""

import msgspec
import pytest

from jaxpaged.engine.adapters import Adapters
from jaxpaged.entrypoints.llm import LLM
from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.messages import LoRARequest
from jaxpaged.pooling import PoolingParams
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.fake_adapters import FakeBook
from tests.engine.fake_engine import make_engine
from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor

A, B = LoRARequest("a", 1, "/adapters/a"), LoRARequest("b", 2, "/adapters/b")
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
CHAT = [{"role": "user", "content": "the cat"}]


class Served:
    """An LLM whose adapters are read by `book`; `names` are those of the requests that the core got."""

    def __init__(self, **options):
        engine, _ = make_engine(**options)
        self.book, self.names = FakeBook(), []
        engine.adapters = Adapters(True, self.book.call)
        add, call = engine._core.add_requests, engine.call
        engine.call = lambda asked: call(asked) if (told := self.book.call(asked)) is None else told

        def noted(requests):
            self.names += [request.lora and request.lora.lora_name for request in requests]
            add([msgspec.structs.replace(request, lora=None) for request in requests])  # it computes without

        engine._core.add_requests = noted
        self.llm = LLM.from_engine(engine)


@pytest.fixture
def served():
    return Served()


@pytest.mark.parametrize(
    ("given", "names"), [(None, [None, None]), (A, ["a", "a"]), ([A, None], ["a", None]), ((B, A), ["b", "a"])]
)
def test_one_for_all_or_one_for_each(served, given, names):
    outputs = served.llm.generate(["the cat", "sat"], GREEDY, lora_request=given)
    assert [output.lora_request and output.lora_request.lora_name for output in outputs] == names
    served.llm.chat([CHAT, CHAT], GREEDY, lora_request=given)
    served.llm.enqueue(["the cat", "sat"], GREEDY, given)
    served.llm.wait_for_completion()
    assert served.names == names * 3 and len(served.book.read) == len(set(names) - {None})


def test_a_stream_and_the_beams_of_a_prompt_have_its_adapter(served):
    list(served.llm.stream("the cat", GREEDY, lora_request=A))
    list(served.llm.stream(CHAT, GREEDY, lora_request=A))
    assert served.names == ["a", "a"]
    served.names.clear()
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    served.llm.beam_search(["the cat", "sat"], beams, lora_request=[A, B])
    assert served.names == ["a", "b", "a", "a", "b", "b"]


def test_what_pools_has_one_too():
    served = Served(executor=FakePoolingExecutor(EMBEDS.width), pooler=EMBEDS, runner="pooling")
    served.llm.embed(["the cat", "sat"], lora_request=[A, B])
    served.llm.encode("the cat", PoolingParams(task="embed"), lora_request=A)
    served.llm.score("the cat", ["sat", "a"], lora_request=B)
    assert served.names == ["a", "b", "a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([A], "lora_request has 1 entries for 2 prompts"),
        ([A, LoRARequest("b", 1, "/b")], "prompt 1: lora_request has lora_int_id 1, but that is adapter 'a'"),
        ("a", "lora_request"),
        ([A, LoRARequest("b", -1, "/b")], "prompt 1: lora_request has lora_int_id -1"),
    ],
)
def test_a_bad_one_is_named_and_nothing_is_left(served, given, problem):
    with pytest.raises(RequestError, match=problem):
        served.llm.generate(["the cat", "sat"], GREEDY, lora_request=given)
    assert not served.llm.llm_engine.has_unfinished_requests()
    assert served.llm.generate("the cat", GREEDY)[0].finished


def test_an_adapter_that_cannot_be_read_leaves_nothing_either(served):
    served.book.bad.add("/adapters/b")
    with pytest.raises(CheckpointError):
        served.llm.generate(["the cat", "sat"], GREEDY, lora_request=[A, B])
    assert not served.llm.llm_engine.has_unfinished_requests()


def test_adapters_are_added_listed_pinned_and_removed(served):
    llm = served.llm
    assert llm.add_lora(A).digest and llm.add_lora(B).lora_int_id == 2
    assert llm.list_loras() == {1, 2} and llm.pin_lora(1) and not llm.pin_lora(3)
    assert llm.remove_lora(2) and not llm.remove_lora(2) and llm.list_loras() == {1}
    llm.generate("the cat", GREEDY, lora_request=A)
    assert served.book.read == [A, B] and served.book.pinned == [1, 3]
    llm.generate("the cat", GREEDY, lora_request=B)
    assert served.book.read == [A, B, B]


def test_an_engine_without_adapters_refuses_them():
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="takes no adapters. Start it with enable_lora"):
        LLM.from_engine(engine).generate("the cat", GREEDY, lora_request=A)

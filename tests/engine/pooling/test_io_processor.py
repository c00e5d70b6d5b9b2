"""I/O processors of plugins: what they make, how they are found; one that raises or hangs costs one request."""

import importlib.metadata
import threading

import numpy as np
import pytest

from jaxpaged import LLM, PoolingParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.pooling.io_processor import MOST_HUNG, IOProcessing, io_processor_of, prompts_of
from jaxpaged.errors import ConfigError, EngineError, RequestError
from jaxpaged.plugins import sources
from tests.engine.fake_pooling import make_pooling_engine, vector_of

PARAMS = PoolingParams(use_activation=False)


class Lines:
    """Pools every line of a text, and answers with the sum of all numbers."""

    def parse_data(self, data):
        if not isinstance(data, str):
            raise ValueError(f"it is {data!r}, not a text")
        return data.split("|")

    def pre_process(self, prompt, request_id=None):
        return [[len(line)] * len(line) for line in prompt]

    def post_process(self, model_output, request_id=None):
        return {"sum": sum(float(output.outputs.data.sum()) for output in model_output), "of": request_id}


class Named(Lines):
    def merge_pooling_params(self, params):
        return PoolingParams(task="plugin", dimensions=params.dimensions)


def llm_with(processor, **options):
    engine, _ = make_pooling_engine(io_processor=processor and IOProcessing("lines", processor, **options))
    return LLM.from_engine(engine)


def test_data_becomes_prompts_and_their_numbers_an_answer():
    llm = llm_with(Lines())
    [output] = llm.encode({"data": "abc|abcde"}, PARAMS, use_tqdm=False)
    assert output.outputs == {"sum": 8.0, "of": output.request_id} and output.finished and output.error is None
    [output] = llm.encode({"data": "abc"}, PARAMS, pooling_task="plugin", use_tqdm=False)
    assert output.outputs["sum"] == 3.0
    [output] = llm.encode([[5, 6]], PARAMS, use_tqdm=False)
    np.testing.assert_array_equal(output.outputs.data, vector_of([5, 6]))


def test_what_cannot_be_is_refused_before_anything_is_computed():
    llm = llm_with(Lines())
    for prompts, options, words in (
        ({"data": 3}, {}, "data: it is 3, not a text"),
        ({"data": None}, {}, "data, which is None"),
        ({"data": "a", "prompt": "b"}, {}, "Give data alone"),
        ("a text", {"pooling_task": "plugin"}, "prompts has no data"),
        ({"data": "a"}, {"pooling_params": [PARAMS]}, "pooling_params is a list"),
        ({"data": "a"}, {"pooling_task": "classify"}, "task is 'classify'"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.encode(prompts, use_tqdm=False, **options)
    with pytest.raises(RequestError, match="started without one. Start it with io_processor_plugin"):
        llm_with(None).encode({"data": "a"}, use_tqdm=False)


def test_a_processor_says_how_prompts_are_pooled():
    prepare = lambda params: IOProcessing("named", Named()).prepared("ab", params, "id")
    assert prepare(PoolingParams(dimensions=4)) == ([[2, 2]], PoolingParams(dimensions=4))
    bad = Named()
    bad.merge_pooling_params = lambda params: 3
    with pytest.raises(EngineError, match="I/O processor bad failed on this request"):
        IOProcessing("bad", bad).prepared("ab", PARAMS, "id")


def test_prompts_are_texts_or_token_ids():
    assert prompts_of("a") == prompts_of({"prompt": "a"}) == prompts_of(["a"]) == ["a"]
    assert prompts_of([1, 2]) == prompts_of({"prompt_token_ids": [1, 2]}) == prompts_of([[1, 2]]) == [[1, 2]]
    for made in ([], None, [None], [[]], [[1.0]], {"prompt": "a", "multi_modal_data": {}}, [True]):
        with pytest.raises(TypeError):
            prompts_of(made)


@pytest.mark.parametrize("method", ["parse_data", "pre_process", "post_process"])
def test_one_that_raises_costs_its_request(method, caplog):
    processor, fails = Lines(), [True]
    own = getattr(processor, method)

    def sometimes(*arguments):
        if fails:
            raise KeyError("a bug")
        return own(*arguments)

    setattr(processor, method, sometimes)
    llm = llm_with(processor)
    with pytest.raises(EngineError, match="I/O processor lines failed on this request"):
        llm.encode({"data": "abc"}, PARAMS, use_tqdm=False)
    assert any(record.exc_info for record in caplog.records)
    fails.clear()
    assert llm.encode({"data": "abc"}, PARAMS, use_tqdm=False)[0].outputs["sum"] == 3.0


def test_ones_that_hang_cost_their_requests_and_are_few():
    processor, goes_on = Lines(), threading.Event()
    processor.pre_process = lambda prompt, request_id=None: goes_on.wait(60) and prompt
    processing = IOProcessing("slow", processor, seconds=0.02)
    for _ in range(MOST_HUNG):
        with pytest.raises(EngineError, match=r"slow took more than 0.02 s"):
            processing.prepared("a", PARAMS, "id")
    with pytest.raises(EngineError, match="8 calls of the I/O processor slow hang"):
        processing.prepared("a", PARAMS, "id")
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "I/O processor slow":
            thread.join()
    processing._seconds = 60.0
    assert processing.prepared("a", PARAMS, "id")[0] == ["a"]


# ---- how it is found -----------------------------------------------------------------------------

MODULE = """
from jaxpaged import Plugin

class Old:
    def __init__(self, config):
        self.model = config.model.model
    def parse_request(self, request):
        return request
    def pre_process(self, prompt, request_id=None):
        return prompt
    def post_process(self, model_output, request_id=None):
        return self.model

def broken(config):
    raise OSError("no licence")

PLUGIN = Plugin(io_processors={"old": Old, "broken": broken, "none": lambda config: 3})
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    (tmp_path / "processors.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [
        importlib.metadata.EntryPoint(name, value, "jaxpaged.io_processor_plugins")
        for name, value in (("installed", "processors:Old"), ("gone", "no.such.module:Old"))
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: found)
    monkeypatch.setattr(sources, "may_be_installed", lambda: True)
    return str(tmp_path / "processors.py")


def found(name, *plugin, runner="pooling"):
    return io_processor_of(EngineConfig.from_options(io_processor_plugin=name, plugin=plugin, runner=runner))


def test_the_option_names_a_plugins_or_an_installed_one(path):
    assert io_processor_of(EngineConfig()) is None
    processing = found("old", path)
    assert processing.prepared("a", PARAMS, "id") == (["a"], PARAMS)
    assert processing.answer([], "id") == "demo"
    assert found("installed").answer([], "id") == "demo"


def test_one_that_cannot_be_stops_the_start(path):
    for name, words in (
        ("olt", "which no plugin has. Did you mean 'old'.*gone, installed, none, old"),
        ("broken", "the I/O processor broken cannot be made: OSError: no licence"),
        ("none", "the I/O processor none has no method pre_process"),
        ("gone", "the plugin gone .* cannot be loaded: ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=words):
            found(name, path)
    with pytest.raises(ConfigError, match="the engine generates"):
        found("old", path, runner="generate")

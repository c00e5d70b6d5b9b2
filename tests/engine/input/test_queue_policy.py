"""Queue policies give requests their priority; one that fails costs its request."""

import dataclasses

import pytest

from jaxpaged.config.plugin_options import PluginConfig
from jaxpaged.engine.input.queue_policy import QueuePolicy, queue_policy_of
from jaxpaged.errors import ConfigError, EngineError
from jaxpaged.sampling_params import SamplingParams
from tests.engine.fake_engine import make_config, make_engine

PLUGIN = """
from jaxpaged import Plugin
def shortest_first(request):
    return len(request.prompt_token_ids) + 1000 * request.priority
PLUGIN = Plugin(queue_policies={"shortest_first": shortest_first})
"""


@pytest.fixture
def named(tmp_path):
    """A configuration whose plugin's file is there."""
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN, encoding="utf-8")

    def config(policy, **options):
        plugins = PluginConfig((str(path),), (), queue_policy=policy)
        return dataclasses.replace(make_config(**options), plugins=plugins)

    return config


def test_the_least_goes_first(named):
    engine, _ = make_engine(scheduling_policy="priority", max_num_seqs=1)
    engine.input_processor._queue_policy = queue_policy_of(named("shortest_first", scheduling_policy="priority"))
    lengths = {"long": 9, "short": 2, "middle": 5, "urgent": 8}
    for name, length in lengths.items():
        params = SamplingParams(temperature=0, max_tokens=2)
        priority = -1 if name == "urgent" else 0
        engine.add_request(name, {"prompt_token_ids": [1] * length}, params, priority=priority)
    ended = []
    while engine.has_unfinished_requests():
        ended += [each.request_id for each in engine.step() if each.finished]
    assert ended == ["urgent", "short", "middle", "long"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [(lambda request: {}[request.priority], "failed on this request"), (lambda request: 0.5, "gave 0.5; it must give")],
)
def test_one_that_fails_costs_its_request(policy, words):
    engine, _ = make_engine(scheduling_policy="priority")
    engine.input_processor._queue_policy = QueuePolicy("bad", policy)
    with pytest.raises(EngineError, match=f"queue policy bad {words}"):
        engine.add_request("r", {"prompt_token_ids": [1]}, SamplingParams(max_tokens=2))
    assert not engine.has_unfinished_requests()


def test_names_that_cannot_be(named):
    with pytest.raises(ConfigError, match="'shortest', which no plugin has. Did you mean 'shortest_first'"):
        queue_policy_of(named("shortest", scheduling_policy="priority"))
    with pytest.raises(ConfigError, match="Give scheduling_policy 'priority' too"):
        queue_policy_of(named("shortest_first"))
    assert queue_policy_of(make_config()) is None

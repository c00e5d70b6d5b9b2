"""Which options make an engine pool, and how they are settled."""

import pytest

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.errors import ConfigError


def resolve(task="generate", pooler=None, **options):
    facts = ModelFacts(512, "float32", 4, 100, task, pooler or {})
    return EngineConfig.from_options(**options).resolve(facts, "cpu")


def test_what_the_checkpoint_is_made_for_decides():
    assert (resolve().model.runner, resolve().model.convert) == ("generate", "none")
    assert (resolve("embed").model.runner, resolve("embed").model.convert) == ("pooling", "embed")
    assert resolve("classify").model.convert == "classify"
    assert resolve("classify", convert="embed").model.convert == "embed"
    assert resolve(convert="embed").model.runner == "pooling"
    assert resolve(runner="pooling").model.pooler_config == {"pooling_type": "LAST"}


def test_options_win_over_what_comes_with_the_checkpoint():
    files = {"pooling_type": "MEAN", "use_activation": False}
    assert resolve("embed", files).model.pooler_config == files
    given = resolve("embed", files, pooler_config={"pooling_type": "LAST", "normalize": True})
    assert given.model.pooler_config == {"pooling_type": "LAST", "use_activation": True}


def test_the_last_token_may_come_after_a_cached_beginning_and_nothing_else_may():
    assert resolve("embed").cache.enable_prefix_caching
    assert not resolve("embed", pooler_config={"pooling_type": "MEAN"}).cache.enable_prefix_caching
    assert not resolve("embed", enable_prefix_caching=False).cache.enable_prefix_caching
    assert resolve("embed").scheduler.num_scheduler_steps == 1


def test_a_settled_configuration_survives_the_way_to_another_process():
    config = resolve("classify", pooler_config={"pooling_type": "LAST"})
    assert EngineConfig.from_options(**config.options()) == config


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("generate", {"convert": "classify"}, "has no classifier"),
        ("embed", {"runner": "generate"}, "no table of logits"),
        ("generate", {"pooler_config": {"pooling_type": "MEAN"}}, "the runner is 'generate'"),
        ("generate", {"runner": "generate", "convert": "embed"}, "the runner is 'generate'"),
        ("embed", {"pooler_config": {"pooling_typ": "LAST"}}, "Did you mean 'pooling_type'"),
        ("embed", {"pooler_config": {"pooling_type": "MAX"}}, "must be one of LAST, MEAN, CLS"),
        ("embed", {"pooler_config": {"normalize": 1}}, "must be true or false"),
        ("embed", {"pooler_config": {"normalize": True, "use_activation": False}}, "mean the same"),
        ("embed", {"num_scheduler_steps": 4}, "num_scheduler_steps is given"),
        ("embed", {"logits_processors": ("a:B",)}, "logits_processors is given"),
        ("embed", {"runner": "embed"}, "runner is 'embed'"),
        ("classify", {"deterministic": True}, "deterministic was asked for"),
        ("embed", {"deterministic": True, "pooler_config": {"pooling_type": "MEAN"}}, "sums over chunks"),
    ],
)
def test_options_that_cannot_be_are_refused(task, options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(task, **options)

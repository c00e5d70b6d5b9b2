"""What `speculative_config` may say, and how it is refused."""

import re

import pytest

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.config.speculation import (
    LATER_METHODS,
    METHODS,
    NUM_ANSWER_TOKENS,
    Speculation,
    checked_speculation,
    speculation_of,
)
from jaxpaged.errors import ConfigError

FACTS = ModelFacts(max_position_embeddings=4096, dtype="float32", num_heads=1, vocab_size=300)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
MODEL = {"method": "draft_model", "num_speculative_tokens": 4, "model": "small"}


def test_without_it_nothing_is_drafted():
    config = EngineConfig.from_options().resolve(FACTS, "cpu")
    assert (config.speculative.speculative_config, config.speculative.num_drafts) == ({}, 0)


def test_what_is_left_open_is_settled_once():
    config = EngineConfig.from_options(speculative_config=NGRAM).resolve(FACTS, "cpu")
    assert config.speculative.speculative_config == {**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert config.speculative.num_drafts == 4
    assert checked_speculation({**NGRAM, "prompt_lookup_max": 1})["prompt_lookup_min"] == 1
    assert checked_speculation({**NGRAM, "prompt_lookup_min": 7})["prompt_lookup_max"] == 7
    assert checked_speculation(SUFFIX) == {**SUFFIX, "suffix_decoding_max_tree_depth": 24}
    assert checked_speculation({"method": "mimo_mtp", "num_speculative_tokens": 1})["method"] == "mtp"
    assert checked_speculation(MODEL) == {**MODEL, "revision": None, "quantization": None}


def test_what_is_settled_is_what_is_looked_for():
    assert speculation_of(checked_speculation(NGRAM)) == Speculation("ngram", 4, (2, 5))
    suffix = speculation_of(checked_speculation({**SUFFIX, "suffix_decoding_max_tree_depth": 7}))
    assert suffix == Speculation("suffix", 4, (2, 7), NUM_ANSWER_TOKENS)
    assert speculation_of(checked_speculation(MODEL)) == Speculation("draft_model", 4, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**NGRAM, "prompt_lookup_mx": 3}, "unknown key 'prompt_lookup_mx'. Did you mean 'prompt_lookup_max'?"),
        ({"method": "ngram"}, "no num_speculative_tokens"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be a whole number from 1 to"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "num_speculative_tokens": 99}, "num_speculative_tokens is 99"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "(4) is more than prompt_lookup_max (3)"),
        ({**NGRAM, "method": "ngrm"}, "method is 'ngrm'; it must be one of"),
        ({"num_speculative_tokens": 3}, "method is None"),
        ({**SUFFIX, "prompt_lookup_max": 3}, "unknown key 'prompt_lookup_max'"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 1}, "max_tree_depth is 1; it must be at least 2"),
        ({**SUFFIX, "model": "small"}, "unknown key 'model'"),
        ({**MODEL, "max_model_len": 64}, "unknown key 'max_model_len'"),
        ({**MODEL, "model": None}, "speculative_config.model is None; it must be a text"),
        ({**MODEL, "quantization": "awq"}, "quantization is 'awq'; it must be 'int8', 'int4' or null"),
        ({**MODEL, "revision": 7}, "revision is 7; it must be a text"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_read(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig.from_options(speculative_config=given)


@pytest.mark.parametrize("method", LATER_METHODS)
def test_methods_that_are_not_there_yet_are_refused_by_name(method):
    assert method not in METHODS
    with pytest.raises(ConfigError, match=f"'{method}' is not there yet"):
        EngineConfig.from_options(speculative_config={**NGRAM, "method": method})


def test_an_engine_that_pools_drafts_nothing():
    with pytest.raises(ConfigError, match="a pooling engine draws no tokens"):
        EngineConfig.from_options(speculative_config=NGRAM, runner="pooling").resolve(FACTS, "cpu")


@pytest.mark.parametrize(("method", "own"), [("draft_model", "demo-draft"), ("eagle3", "demo-eagle3")])
def test_only_the_embedded_model_has_a_draft_model_of_its_own(method, own):
    given = {"method": method, "num_speculative_tokens": 2}
    config = EngineConfig.from_options(speculative_config=given)
    assert config.resolve(FACTS, "cpu").speculative.speculative_config["model"] == own
    with pytest.raises(ConfigError, match="speculative_config has no model. Name the folder"):
        EngineConfig.from_options(model="other", speculative_config=given).resolve(FACTS, "cpu")


def test_a_draft_model_is_split_like_the_other():
    config = EngineConfig.from_options(speculative_config={**MODEL, "draft_tensor_parallel_size": 2})
    with pytest.raises(
        ConfigError, match="draft_tensor_parallel_size is 2, but the draft model is split like the other"
    ):
        config.resolve(FACTS, "cpu")
    assert EngineConfig.from_options(speculative_config={**MODEL, "draft_tensor_parallel_size": 1}).resolve(
        FACTS, "cpu"
    )

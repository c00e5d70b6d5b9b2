"""Layers dealt to stages, and which parameters each has."""

import dataclasses

import jax
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import model_for
from jaxpaged.models.stages import deal_layers, decoder_of, params_of
from tests.models.checkpoints import CONFIGS


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "dealt"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (7, 3, [2, 3, 2]),
        (8, 3, [3, 3, 2]),
        (3, 3, [1, 1, 1]),
        (61, 4, [15, 15, 16, 15]),
    ],
)
def test_layers_are_dealt_evenly_and_the_last_stage_has_no_more_than_others(num_layers, num_stages, dealt):
    stages = deal_layers(num_layers, num_stages)
    assert [len(stage.layers) for stage in stages] == dealt
    assert [i for stage in stages for i in stage.layers] == list(range(num_layers))
    assert [stage.is_first for stage in stages] == [i == 0 for i in range(num_stages)]
    assert [stage.is_last for stage in stages] == [i == num_stages - 1 for i in range(num_stages)]


def test_each_stage_needs_a_layer():
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 3, but the model has 2 layers"):
        deal_layers(2, 3)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_on_one_stage_and_a_table_that_is_read_twice_on_two(tied):
    model = model_for(CONFIGS["llama"])
    config = dataclasses.replace(model.config_from_hf(CONFIGS["llama"]), tie_embeddings=tied)
    specs, stages = model.param_specs(config, 1), deal_layers(config.num_layers, 2)
    first, last = (params_of(stage, specs) for stage in stages)
    assert sorted(jax.tree.leaves((first, last)), key=str) == sorted(
        jax.tree.leaves(specs) + [specs.embed_tokens] * tied, key=str
    )
    assert (first.embed_tokens, first.norm, first.lm_head) == (specs.embed_tokens, None, None)
    assert (last.embed_tokens is not None) == tied and last.norm is specs.norm and last.lm_head is specs.lm_head
    assert decoder_of(stages[1], config).layers == config.layers[1:]


def test_a_stage_numbers_those_of_its_layers_that_have_experts():
    config = model_for(CONFIGS["deepseek_v3"]).config_from_hf(CONFIGS["deepseek_v3"])
    assert config.sparse_layers == (1, 2)
    first, last = (decoder_of(stage, config) for stage in deal_layers(3, 2))
    assert (first.num_layers, first.sparse_layers) == (2, (1,))
    assert (last.num_layers, last.sparse_layers) == (1, (0,))


def test_a_model_that_pools_has_its_classifier_on_the_last_stage():
    model = pooling_model(model_for(CONFIGS["llama"]), "classify")
    config = model.config_from_hf(CONFIGS["llama"])
    specs = model.param_specs(config, 1)
    first, last = (params_of(stage, specs) for stage in deal_layers(config.num_layers, 2))
    assert first.score is None and last.score is specs.score and last.decoder.embed_tokens is None

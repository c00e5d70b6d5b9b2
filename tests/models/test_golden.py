"""Every architecture against what transformers computed, through paged attention, in chunks of the prompt."""

import collections
import re

import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from tests.models.checkpoints import NUM_GREEDY, make_tensors, prompt_of, write_checkpoint, write_packed_checkpoint
from tests.models.draft_heads import write_mimo
from tests.models.paged import NAMES, PagedModel, golden_of, max_model_len_of

# transformers grows the base of "dynamic" with every token; a cache needs one base, so only the prompt agrees.
GREEDY_NAMES = [name for name in NAMES if name != "llama_dynamic"]

# One, two or eight key heads, vocabularies that eight does not divide, experts, joined matrices, latents, sinks.
# Nothing of the others is split in another way, but for what `end_to_end/test_architectures.py` splits in four.
OTHERS = (
    "qwen2_window",
    "qwen3_bias",
    "mixtral_window_top1",
    "qwen3_moe",
    "deepseek_v2_groups_top1",
    "gemma2",
    "apertus",
    "arcee",
    "ernie4_5_moe",
    "cohere2",
    "hy_v3",
    "ministral3",
    "mistral4",
    "gemma4_moe",
    "mimo_v2",
    "muse_glimmer",
    "laguna",
    "laguna_per_number",
)
SHARDED_NAMES = [
    "llama_mqa_bias_tied",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
    "lfm2_bias",
    "minimax_m2",
    "gemma4",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("mistral_full", "phi3_partial", "qwen2_moe", "glm4_moe", "gemma3", *OTHERS)
    ),
]


def load(name, tmp_path, num_shards=1, **options):
    return PagedModel(write_checkpoint(name, tmp_path), num_shards, max_model_len_of(name), **options)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    golden, model = golden_of(name), load(name, tmp_path)
    logits = model.logits(prompt_of(name))
    for position, top in golden["top"].items():
        np.testing.assert_allclose(logits[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=1e-4)
        assert logits[int(position)].argmax() == top["ids"][0]
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=2e-3)
    if name in GREEDY_NAMES:
        assert model.continue_greedily(logits[-1], NUM_GREEDY) == golden["greedy"]


def test_a_mimo_is_a_qwen_2_with_a_layer_more(tmp_path):
    logits = PagedModel(write_mimo(tmp_path)).logits(prompt_of("qwen2"))
    np.testing.assert_allclose(logits.sum(axis=1), golden_of("qwen2")["sums"], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("spreads_experts", [False, True])
def test_experts_in_4_bits_are_the_same_weights(spreads_experts, tmp_path):
    """Over devices whose parts of a weight end in the middle of a group; where devices have whole experts, the first
    stand a second time behind the five that there are."""
    folder = write_packed_checkpoint("gpt_oss", tmp_path)
    model = PagedModel(folder, num_shards=8, spreads_experts=spreads_experts)
    order = [0, 1, 2, 3, 4, 0, 1, 2] if spreads_experts else range(5)
    for layer, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        weight = getattr(model.params.layers[layer % 2].mlp, name).weight
        dense = make_tensors("gpt_oss")
        stored = dense[f"model.layers.{layer % 2}.mlp.experts.{'down_proj' if layer == 2 else 'gate_up_proj'}"]
        expected = stored if layer == 2 else stored[:, :, layer::2]
        np.testing.assert_array_equal(np.asarray(weight), expected.swapaxes(1, 2)[order])


def test_experts_that_stay_in_4_bits_give_the_same_logits(tmp_path):
    folder = write_packed_checkpoint("gpt_oss", tmp_path)
    exact, stored = PagedModel(folder, form="16bit"), PagedModel(folder, form="stored", platform="gpu")
    assert stored.params.layers[0].mlp.down_proj.weight.values.dtype == "float4_e2m1fn"
    np.testing.assert_allclose(*(each.logits(prompt_of("gpt_oss")) for each in (exact, stored)), atol=1e-5)


@pytest.mark.parametrize(
    ("scales", "words"), [(np.ones((5, 192, 1), np.uint8), "shape"), (np.ones((5, 192, 2), np.float32), "F32.*U8")]
)
def test_damaged_experts_in_4_bits_are_an_error_naming_the_tensor(scales, words, tmp_path):
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    write_packed_checkpoint("gpt_oss", tmp_path, **{name: scales})
    with pytest.raises(CheckpointError, match=words) as error:
        PagedModel(tmp_path)
    assert name in str(error.value)


@pytest.mark.parametrize("name", SHARDED_NAMES)
def test_eight_devices_give_the_tokens_of_one(name, tmp_path):
    golden, model = golden_of(name), load(name, tmp_path, num_shards=8)
    logits = model.logits(prompt_of(name))
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=2e-3)
    assert model.continue_greedily(logits[-1], 4) == golden["greedy"][:4]
    # One sum for the embedding and one for each half of a layer is all that devices must exchange.
    # A norm of all heads together needs one more. Halves that are added at once have one sum.
    of_layer = {"minimax_m2": 3, "cohere2": 1}.get(name, 2)
    assert collectives(model) == {"all-reduce": 1 + of_layer * model.config.num_layers}


# 5, 6 and 16 experts, of which a token goes to 1, some or all; with biases, with shared ones, packed in 4 bits.
SPREAD_NAMES = ["mixtral", "qwen2_moe_all", "gpt_oss", "deepseek_v3", "llama4", "lfm2_moe"]
OTHER_SPREAD_NAMES = ("mixtral_window_top1", "qwen3_moe", "glm4_moe", "deepseek_v2")


@pytest.mark.parametrize(
    "name", [*SPREAD_NAMES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHER_SPREAD_NAMES)]
)
def test_experts_spread_over_eight_devices_give_the_tokens_of_one(name, tmp_path):
    golden, model = golden_of(name), load(name, tmp_path, num_shards=8, spreads_experts=True)
    experts = model.config.experts
    stored = model.params.layers[experts.layers[0]].mlp.up_proj.weight
    assert stored.shape == (-(-experts.num_experts // 8) * 8, experts.width, model.config.hidden_size)
    assert stored.sharding.shard_shape(stored.shape)[1:] == stored.shape[1:]  # whole experts
    logits = model.logits(prompt_of(name))
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=2e-3)
    assert model.continue_greedily(logits[-1], 4) == golden["greedy"][:4]
    # No token travels: each device computes its experts' share of all of them.
    assert collectives(model) == {"all-reduce": 1 + 2 * model.config.num_layers}


def collectives(model):
    """How often each kind of exchange between devices occurs in the program."""
    kinds = r"= (?:\(.*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return collections.Counter(re.findall(kinds, model.program.as_text()))


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma2", 2)])
def test_layers_of_one_kind_are_traced_once(name, kinds, tmp_path):
    functions = re.findall(r"func\.func private @decoder_layer\w*", load(name, tmp_path).lowered.as_text())
    assert len(functions) == kinds

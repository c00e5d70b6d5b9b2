"""Trees of Tunix, MaxText and flax nnx: to them and back, by their frameworks' names, and what does not fit."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.models.registry import model_for
from jaxpaged.params.framework_trees import Named, flat, named_tensors, tree_of
from jaxpaged.params.tree_layouts import LAYOUTS
from tests.models.checkpoints import CONFIGS, random_tensors
from tests.models.tensor_shapes import tensor_shapes

CASES = [
    (mapping, name, stacked)
    for mapping, names in {
        "tunix": ("llama", "qwen2", "qwen3", "gemma2", "gemma3"),
        "maxtext": ("llama", "llama3", "mistral_full", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3"),
        "nnx": ("llama", "qwen2", "qwen3_moe", "gemma3", "mixtral"),
    }.items()
    for name in names
    for stacked in ((False, True) if mapping == "maxtext" else (False,))
]


MAXTEXT_TREES = Path(__file__).parent.parent / "golden" / "maxtext_trees.json"
"""What `scripts/update_maxtext_goldens.py` found in MaxText itself."""


def print_of(array):
    """A number that another order of an array's numbers would change, too."""
    return float(np.dot(np.cos(np.arange(array.size)), array.reshape(-1).astype(np.float64)))


def named(name, **changes):
    return named_of({**CONFIGS[name], **changes})


def named_of(hf):
    model = model_for(hf)
    config = model.config_from_hf(hf)
    return Named.of(config, jax.tree.leaves(model.param_specs(config, 1))), hf


def tensors_for(hf):
    random = np.random.default_rng(1)
    return {name: random.standard_normal(shape, np.float32) for name, shape in tensor_shapes(hf).items()}


def is_changed(mapping, name):
    """Whether numbers are multiplied on their way, so that they come back with the error of rounding."""
    return mapping == "maxtext" and not name.startswith("qwen")


@pytest.mark.parametrize(("mapping", "name", "stacked"), CASES)
def test_what_goes_to_a_tree_comes_back(mapping, name, stacked):
    model, hf = named(name)
    tensors = tensors_for(hf)
    tree = tree_of(tensors, mapping, model, stacked)
    back = named_tensors(tree, mapping, model)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        close = np.testing.assert_allclose if is_changed(mapping, name) else np.testing.assert_array_equal
        close(back[key], tensor, **({"rtol": 1e-6, "atol": 1e-6} if is_changed(mapping, name) else {}))
    if mapping == "maxtext" and name != "gemma3":  # whose three layers fill no block
        assert ("layers" in tree["decoder"]) == stacked


@pytest.mark.parametrize("name", json.loads(MAXTEXT_TREES.read_text(encoding="utf-8")))
def test_trees_are_those_that_maxtext_computed_the_same_with(name):
    recorded = json.loads(MAXTEXT_TREES.read_text(encoding="utf-8"))[name]
    model, hf = named_of(recorded.pop("hf"))
    tensors = random_tensors(tensor_shapes(hf), hf, seed=1)
    for kept, arrays in recorded.items():
        tree = flat(tree_of(tensors, "maxtext", model, stacked=kept == "scanned"))
        assert {path: list(array.shape) for path, array in tree.items()} == {path: at[0] for path, at in arrays.items()}
        for path, (_, fingerprint) in arrays.items():
            assert print_of(tree[path]) == pytest.approx(fingerprint, rel=1e-4, abs=1e-4), path


def test_arrays_are_where_tunix_has_them():
    model, hf = named("qwen3")
    tensors = tensors_for(hf)
    tree = flat(tree_of(tensors, "tunix", model))
    heads, keys, head_dim, width = 8, 2, 16, 48
    q_proj = tree["layers.1.attn.q_proj.w"]
    assert q_proj.shape == (width, heads, head_dim) and tree["layers.0.attn.o_proj.w"].shape == (heads, head_dim, width)
    weight = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q_proj, weight.T.reshape(width, heads, head_dim))
    model, hf = named("gemma3")
    tensors = tensors_for(hf)
    tree = flat(tree_of(tensors, "tunix", model))
    kv = tree["layers.2.attn.kv_einsum.w"]
    key, value = (tensors[f"model.layers.2.self_attn.{each}_proj.weight"] for each in "kv")
    np.testing.assert_array_equal(kv[0, 1], key.reshape(keys, 12, width)[1].T)
    np.testing.assert_array_equal(kv[1, 0], value.reshape(keys, 12, width)[0].T)
    model, hf = named("gemma3", num_key_value_heads=8)
    tree = flat(tree_of(tensors_for(hf), "tunix", model))
    assert tree["layers.0.attn.qkv_einsum.w"].shape == (3, 8, width, 12)
    assert named_tensors(tree_of(tensors_for(hf), "tunix", model), "tunix", model).keys() == tensors.keys()


def test_trees_come_as_their_frameworks_have_them():
    model, hf = named("qwen3")
    tensors = tensors_for(hf)
    plain = tree_of(tensors, "tunix", model)
    layers = [plain["layers"][str(i)] for i in range(2)]
    as_params = jax.tree.map(lambda array: nnx.Param(jnp.asarray(array)), {**plain, "layers": layers})
    numbered = {**plain, "layers": dict(enumerate(layers))}
    for tree in (nnx.State(numbered), {"params": {"params": plain}}, {"base": {**plain, "layers": layers}}, as_params):
        back = named_tensors(tree, "tunix", model)
        np.testing.assert_array_equal(back["model.norm.weight"], tensors["model.norm.weight"])
        assert back.keys() == tensors.keys()
    half = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), plain)
    assert named_tensors(half, "tunix", model)["model.norm.weight"].dtype == jnp.bfloat16


class Norm(nnx.Module):
    def __init__(self, width):
        self.scale = nnx.Param(jnp.ones(width))
        self.seen = nnx.BatchStat(jnp.zeros(()))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.norm = Norm(4)
        self.down_proj = nnx.Linear(4, 6, use_bias=False, rngs=rngs)


def test_of_a_module_its_parameters_are_taken():
    assert sorted(flat(Mlp(nnx.Rngs(0)))) == ["down_proj.kernel", "norm.scale"]


def test_nnx_kernels_may_have_their_heads_apart():
    model, hf = named("llama")
    tensors = tensors_for(hf)
    tree = tree_of(tensors, "nnx", model)
    attention = tree["model"]["layers"]["0"]["self_attn"]
    assert attention["q_proj"]["kernel"].shape == (48, 96)
    attention["q_proj"]["kernel"] = attention["q_proj"]["kernel"].reshape(48, 8, 12)
    back = named_tensors(tree, "nnx", model)
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(back[name], tensors[name])


def test_a_larger_table_of_the_vocabulary_is_cut():
    model, hf = named("qwen3")
    tree = tree_of(tensors_for(hf), "maxtext", model)
    table = tree["token_embedder"]["embedding"]
    tree["token_embedder"]["embedding"] = np.concatenate([table, table[:5]])
    np.testing.assert_array_equal(named_tensors(tree, "maxtext", model)["model.embed_tokens.weight"], table)


def test_what_does_not_fit_is_named():
    model, hf = named("qwen3")
    tree = lambda: tree_of(tensors_for(hf), "tunix", model)

    def refused(change, words, error=CheckpointError, mapping="tunix"):
        changed = tree()
        change(changed)
        with pytest.raises(error, match=words):
            named_tensors(changed, mapping, model)

    attention = lambda changed: changed["layers"]["1"]["attn"]
    refused(lambda t: t.pop("final_norm"), "the tree lacks final_norm.w of Qwen3ForCausalLM as tunix keeps it")
    refused(lambda t: t["final_norm"].update(b=np.ones(3)), "the tree has final_norm.b, which")
    refused(
        lambda t: attention(t).update(q_proj={"v": np.ones(3)}), "has layers.1.attn.q_proj.v, .*mean 'layers.1.attn"
    )
    refused(lambda t: attention(t)["q_norm"].update(w=np.ones(3)), r"q_norm.w has shape \(3,\), but .* \(16,\)")
    refused(lambda t: t["final_norm"].update(w=3.0), "final_norm.w is a float, and no array")
    refused(lambda t: None, "Did you mean 'tunix'", UsageError, "tunux")
    gone = jnp.ones(48)
    gone.delete()
    refused(lambda t: t["final_norm"].update(w=gone), "final_norm.w was deleted")
    part = {"final_norm": {"w": np.ones(48, np.float32)}}
    assert list(named_tensors(part, "tunix", model, is_partial=True)) == ["model.norm.weight"]
    with pytest.raises(CheckpointError, match="embed_tokens.weight is missing, of which embedder.input_embedding"):
        tree_of({"model.norm.weight": np.ones(48)}, "tunix", named("llama")[0])


def test_models_that_a_framework_has_not_are_refused_by_name():
    with pytest.raises(UsageError, match="tunix has no table for Phi3ForCausalLM; it has those of LlamaForCausalLM"):
        named_tensors({}, "tunix", named("phi3")[0])
    with pytest.raises(CheckpointError, match="holds several parameters"):
        named_tensors({}, "nnx", named("phi3")[0])


def test_tables_use_letters_and_steps_that_there_are():
    from jaxpaged.params.framework_trees import CONDITIONS, PADDED, STEPS

    for layouts in LAYOUTS.values():
        for row in (row for layout in layouts for row in layout.rows):
            assert re.fullmatch(r"[VDNKHFEQ2()]+", row.axes), row
            assert set(row.steps) <= {*STEPS, *CONDITIONS, PADDED}, row

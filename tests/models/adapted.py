"""A model with an adapter in its weights: the oracle of what serves adapters beside each other."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.params.adapters.base import BaseWeights
from jaxpaged.params.adapters.reading import read_adapter
from jaxpaged.params.adapters.targets import targets_of
from tests.models import checkpoints, encoder_checkpoints, pooling_checkpoints, seeing_checkpoints

GOLDEN = Path(__file__).parent.parent / "golden" / "lora"
"""What scripts/update_lora_goldens.py records."""


def specs_of(folder):
    """(specs, config) of a checkpoint's folder."""
    hf = load_hf_config(folder)
    model = model_for(hf)
    config = model.config_from_hf(hf)
    return model.param_specs(config, 1), config


def write_base(name, folder):
    """The checkpoint that an adapter of the goldens was trained for."""
    if name in encoder_checkpoints.CHECKPOINTS:
        return encoder_checkpoints.write(name, folder)
    if name in seeing_checkpoints.SEEING:
        return seeing_checkpoints.write_seeing_checkpoint(name, folder)
    write = pooling_checkpoints.write if name in pooling_checkpoints.CHECKPOINTS else checkpoints.write_checkpoint
    return write(name, folder)


def write_other(folder, name):
    """The path of an adapter with the parts of a golden and other numbers."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((GOLDEN / name / "adapter_config.json").read_bytes())
    weights = "adapter_model.safetensors"
    tensors = load_file(GOLDEN / name / weights)
    factor = lambda key: 1.0 if "base_layer" in key or "magnitude" in key else -0.5
    save_file({key: (value * factor(key)).astype(value.dtype) for key, value in tensors.items()}, folder / weights)
    return str(folder)


def token_ids_of(name):
    """The prompt of a golden."""
    if name in encoder_checkpoints.CHECKPOINTS:
        return [0, *range(7, 24), 2]
    pools = pooling_checkpoints.CHECKPOINTS
    return checkpoints.prompt_of(pools[name][0] if name in pools else name)


def read(adapter_folder, base_folder, **options):
    """An adapter for the checkpoint in a folder, in float32."""
    specs, config = specs_of(base_folder)
    options = {"base_weight": BaseWeights(base_folder, specs, config), **options}
    return read_adapter(adapter_folder, specs, config, dtype=np.float32, **options)


def change_of(weights, target):
    """b @ a in float64, in the target's axes."""
    a, b = weights.a.astype(np.float64), weights.b.astype(np.float64)
    if target.is_experts:
        return np.stack([np.tensordot(one, other, 1) for one, other in zip(b, a, strict=True)])
    return np.tensordot(b, a, 1)


def changed(array, weights, target):
    """The merged weight of a target, whose own is `array`, summed up in float64."""
    whole = np.asarray(array, np.float64) + change_of(weights, target)
    if weights.magnitude is None:
        return whole
    if target.kind == "embedding":
        return whole * weights.magnitude
    inputs = whole.ndim - weights.magnitude.ndim
    return whole * weights.magnitude.reshape(weights.magnitude.shape + (1,) * inputs)


def with_adapter(params, specs, adapter):
    """Parameters on one device with an adapter in them. A head that is the table of embeddings becomes its own."""
    targets = targets_of(specs)

    def of_leaf(path, array):
        path = jax.tree_util.keystr(path)
        weights = adapter.weights.get(path.removesuffix(".weight"))
        if path in adapter.replaced:
            return jnp.asarray(adapter.replaced[path], array.dtype)
        target = targets.get(path.removesuffix(".weight"))
        return array if weights is None else jnp.asarray(changed(array, weights, target), array.dtype)

    merged = jax.tree_util.tree_map_with_path(of_leaf, params)
    tied = targets.get(".lm_head")
    if tied is not None and tied.is_tied:
        table = params.embed_tokens
        weights = adapter.weights.get(".lm_head")
        head = table if weights is None else jnp.asarray(changed(table, weights, tied), table.dtype)
        merged = merged.replace(lm_head=head)
    return merged

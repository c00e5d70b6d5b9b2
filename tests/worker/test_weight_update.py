"""Which engines take no other weights, and what less than a parameter can be replaced."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import UsageError
from jaxpaged.models.registry import model_for
from jaxpaged.params.arriving import ArrivingWeights, Model
from jaxpaged.params.patches import Single, WholeRow, changed, why_not
from jaxpaged.params.spec import Spec
from jaxpaged.worker.weight_update import WeightUpdate
from tests.models.checkpoints import CONFIGS


def test_experts_that_move_and_quantised_checkpoints_are_refused_by_name():
    moving = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(expert_balance=object())))
    with pytest.raises(UsageError, match=r"experts are moved between devices .*\(eplb\), so weights stay"):
        WeightUpdate([moving], is_partial=False)
    hf = CONFIGS["llama"] | {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    model = model_for(hf)
    config = model.config_from_hf(hf)
    specs = model.param_specs(config, 1)
    assert any(spec.scheme is not None for spec in jax.tree.leaves(specs))
    with pytest.raises(UsageError, match="checkpoint is quantised .* its weights cannot be updated. Load the 16-bit"):
        ArrivingWeights([Model(specs, config)])


def test_changes_reach_the_shards_that_have_them():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    whole = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
    before = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x", "y")))
    row = -np.ones((6, 2), np.float32)
    places = np.unravel_index(np.array([0, 17, 40]), whole.shape)
    after = changed(before, [WholeRow(2, row), Single(places, np.array([100.0, 101.0, 102.0], np.float32))])
    wanted = whole.copy()
    wanted[2] = row
    wanted.reshape(-1)[[0, 17, 40]] = [100, 101, 102]
    np.testing.assert_array_equal(after, wanted)
    assert after.sharding == before.sharding
    np.testing.assert_array_equal(before, whole)


def test_parameters_of_which_no_part_can_be_replaced_say_why():
    sizes, spec = {"K": 2, "H": 4, "D": 8, "V": 10}, Spec("KHD", "KH D", "k_proj.weight")
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, np.float32)
    assert why_not(spec, shape(2, 4, 8), sizes) is None
    assert why_not(spec, shape(4, 4, 8), sizes) == "it is repeated for several devices"
    assert why_not(Spec("VD", "V D", "embed.weight"), shape(12, 8), sizes) is None
    rounded = Spec("KHD", "KH D", "k_proj.weight", quantized="int8")
    assert why_not(rounded, shape(2, 4, 8), sizes) == "its numbers are rounded together (int8)"
    fused = Spec("KHD", "KH D", "kv_proj.weight", fused=("KH", "KH"), part=1)
    assert why_not(fused, shape(2, 4, 8), sizes) == "it lies otherwise in the checkpoint than in the engine"

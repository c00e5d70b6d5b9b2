"""Which engines take no other weights, what less than a parameter can be replaced, and quantised weights that come."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.params.arriving import ArrivingWeights, Model, sum_of
from jaxpaged.params.patches import Single, WholeRow, changed, why_not
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.rounded_folder import write_rounded
from jaxpaged.params.safetensors_reader import HeldTensor
from jaxpaged.params.schemes.gguf import Gguf
from jaxpaged.params.spec import Spec
from jaxpaged.worker.weight_update import WeightUpdate
from tests.models.adapted import specs_of
from tests.models.checkpoints import make_tensors, write_checkpoint
from tests.models.paged import PagedModel
from tests.models.quantised_checkpoints import FORMATS, read, write_quantised


def test_experts_that_move_and_gguf_files_are_refused_by_name():
    moving = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(expert_balance=object())))
    with pytest.raises(UsageError, match=r"experts are moved between devices .*\(eplb\), so weights stay"):
        WeightUpdate([moving], is_partial=False)
    spec = Spec("VD", "V D", "model.embed_tokens.weight", scheme=Gguf("Q8_0"))
    config = SimpleNamespace(dim_sizes=lambda: {"V": 64, "D": 32})
    with pytest.raises(UsageError, match="is a GGUF file, of which no weights are updated. Load it from safetensors"):
        ArrivingWeights([Model(spec, config)])


def arriving_at(model):
    return ArrivingWeights([Model(model.param_specs, model.config)])


def check_arrived(arriving, model):
    """That what came is what `model` loaded, bit by bit."""
    arriving.check_complete()
    own, rooms = Model(model.param_specs, model.config), Rooms()
    placed = lambda spec: arriving.placed(spec, own, model.mesh, jnp.float32, rooms)
    found, loaded = jax.tree.map(placed, model.param_specs), model.params
    assert jax.tree.structure(found) == jax.tree.structure(loaded)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(loaded), strict=True):
        assert one.dtype == other.dtype and one.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


WAYS = [("rows", "cpu"), ("stored", "gpu"), ("16bit", "cpu")]
FEW = [("gptq shuffled", "llama"), ("fp8 of a tensor", "phi3"), ("nvfp4", "mixtral")]
REST = [
    pytest.param(kind, model, marks=pytest.mark.exhaustive)
    for kind in FORMATS
    for model in ("llama", "phi3", "mixtral")
    if (kind, model) not in FEW
]


@pytest.mark.parametrize(("kind", "model"), [*FEW, *REST])
def test_tensors_of_a_quantised_checkpoint_arrive_one_by_one_as_they_are_loaded(kind, model, tmp_path):
    write_quantised(tmp_path, kind, model)
    tensors = read(tmp_path / "model.safetensors")
    for form, platform in WAYS:
        loaded = PagedModel(tmp_path, form=form, platform=platform)
        arriving = arriving_at(loaded)
        for name, tensor in tensors.items():
            arriving.add({name: tensor})
        check_arrived(arriving, loaded)


def test_layers_that_predict_further_tokens_may_come_with_the_others(tmp_path):
    loaded = PagedModel(write_checkpoint("llama", tmp_path))
    config = replace(loaded.config, num_mtp_layers=1)
    arriving = ArrivingWeights([Model(loaded.param_specs, config)])
    further = {f"model.layers.{config.num_layers}.eh_proj.weight": np.zeros((2, 2), np.float32)}
    arriving.add(make_tensors("llama") | further)
    check_arrived(arriving, loaded)


def test_what_came_last_has_sums_that_all_of_its_bytes_decide(tmp_path):
    model = Model(*specs_of(write_checkpoint("llama", tmp_path)))
    norm, embeds = "model.norm.weight", "model.embed_tokens.weight"
    numbers = make_tensors("llama")[norm].astype("bfloat16")
    patch = {f"{embeds}.sparse_indices": np.array([3, 5]), f"{embeds}.sparse_values": np.array([1, 2], np.float32)}

    def sums(array, half):
        arriving = ArrivingWeights([model], is_partial=True)
        arriving.add({norm: array, f"{embeds}{half}": patch[f"{embeds}{half}"]})
        first = arriving.sums_of_last()
        arriving.add({name: each for name, each in patch.items() if half not in name})
        assert arriving.sums_of_last().keys() == patch.keys() - first.keys()
        return first

    one = sums(numbers, ".sparse_values")
    assert one.keys() == {norm, f"{embeds}.sparse_values"} and one == sums(numbers, ".sparse_values")
    for place in (0, len(numbers) - 1):
        changed = numbers.copy()
        changed[place] += 1
        assert sums(changed, ".sparse_indices")[norm] != one[norm]
    tail = [HeldTensor(tmp_path, norm, "BF16", (3,), 0, 6, numbers[[0, 1, last]]) for last in (2, 3)]
    assert len({*map(sum_of, tail)}) == 2, "bytes behind the last whole word"


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_weights_in_16_bits_become_fp8_with_a_scale_for_every_output(model, tmp_path):
    write_quantised(tmp_path / "first", "float-quantized", model)
    plain = PagedModel(exact := tmp_path / "first" / "exact")
    write_rounded(plain.param_specs, plain.config, exact, tmp_path / "second", "FP8_DYNAMIC")
    arriving = arriving_at(PagedModel(tmp_path / "first", form="rows", platform="gpu"))
    arriving.add([str(exact)])
    check_arrived(arriving, PagedModel(tmp_path / "second", form="rows", platform="gpu"))


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("fp8 blocks", {"weight": np.ones((64, 64), np.float32)}, "F32, but .* FP8 in blocks of 24 x 40, to which"),
        ("gptq", {"weight": np.ones((64, 64), np.float32)}, f"GPTQ.* Send {Q}qweight, {Q}scales, {Q}qzeros; or load"),
        ("nvfp4", {"weight": np.ones((64, 64), np.float32)}, "in NVFP4, to which nothing is rounded under way"),
        ("float-quantized", {"weight": np.full((64, 64), np.nan, np.float32)}, r"q_proj.weight is nan at \(0, 0\)"),
        ("float-quantized", {"weight": np.full((64, 64), np.nan, "float8_e4m3fn")}, "infinite or no numbers"),
        ("float-quantized", {"weight": np.ones((64, 64), np.int8)}, "q_proj.weight has type I8; supported: F8_E4M3"),
        ("float-quantized", {"weight_scale": np.zeros((64, 1), np.float32)}, r"weight_scale\[0, 0\] is 0.0"),
        ("float-quantized", {"weight_scale": np.full((64, 1), 3e38, np.float32)}, "is not finite: its values times"),
        ("float-quantized", {"weight_scale": np.ones((64, 3), np.float32)}, r"weight_scale has shape \(64, 3\)"),
        ("float-quantized", {"weight_scale_inv": np.ones((64, 1), np.float32)}, "scale_inv comes for the second time"),
        ("float-quantized", {"weight.sparse_values": np.ones(1, np.float32)}, "in FP8, of which no part can be"),
        ("float-quantized", {"k_scale": np.ones((), np.float32)}, "is a scale of what attention caches"),
        ("gptq symmetric", {"g_idx": np.arange(64, dtype=np.int32) % 2}, "inputs in another order"),
    ],
)
def test_quantised_tensors_that_cannot_be_are_refused_when_they_come(kind, changes, words, tmp_path):
    write_quantised(tmp_path, kind)
    arriving = arriving_at(PagedModel(tmp_path, form="stored", platform="gpu"))
    changes = {(Q.replace("q_proj.", "") if end == "k_scale" else Q) + end: array for end, array in changes.items()}
    with pytest.raises(CheckpointError, match=words):
        arriving.add(read(tmp_path / "model.safetensors") | changes)
    assert arriving.num_bytes == 0


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

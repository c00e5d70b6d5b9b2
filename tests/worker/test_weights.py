"""Weights that leave the devices leave nothing there, and come back as they were."""

import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.params.checkpoint import checkpoint_version, content_version
from jaxpaged.params.quantized import QuantizedArray
from jaxpaged.worker.programs.compiled import CompileCounter
from jaxpaged.worker.weights import Weights, free

MESH = make_mesh(2)


def put(array, *spec):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*spec)))


def made():
    """Split, held alike by all, quantized, and of a type that numpy does not know by itself."""
    axis = MESH.axis_names[-1]
    return {
        "split": put(np.arange(24.0, dtype=np.float32).reshape(4, 6), axis),
        "alike": put(np.arange(5, dtype=jnp.bfloat16)),
        "quantized": QuantizedArray(put(np.arange(8, dtype=np.int8).reshape(4, 2), axis), put(np.ones(4)), "float32"),
        "none": None,
    }


@pytest.mark.parametrize(
    ("keeps_copies", "discards", "num_loads"),
    [(True, [False], 1), (True, [True], 2), (True, [False, True], 2), (False, [False], 2), (True, [False, False], 1)],
)
def test_they_come_back_from_the_host_or_from_where_they_were_read(keeps_copies, discards, num_loads):
    loads = []
    weights = Weights(lambda: loads.append(1) or made(), str, keeps_copies)
    params = weights.bring_back()
    before = jax.tree.map(np.asarray, params)
    expected = jax.tree.map(np.array, before)  # views of what is deleted mean nothing
    shardings = jax.tree.map(lambda array: array.sharding, params)
    for discard in discards:
        weights.put_aside(params, discard)
        params = None
    with CompileCounter() as counter:
        params = weights.bring_back()
        assert counter.count == 0
    assert len(loads) == num_loads
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.map(lambda array: array.sharding, params) == shardings


def test_every_buffer_is_deleted():
    params = made()
    Weights(made, str, keeps_copies=True).put_aside(params, discard=False)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    free(params)  # once more is harmless


def test_copies_that_came_back_are_not_kept():
    weights = Weights(made, str, keeps_copies=True)
    weights.put_aside(made(), discard=False)
    weights.bring_back()
    changed = made()
    changed["split"] = changed["split"] + 1
    weights.put_aside(changed, discard=False)
    assert weights.bring_back()["split"][0, 0] == 1


def test_a_failure_to_load_can_be_tried_again():
    failures = [OSError("the disk is gone")]

    def load():
        if failures:
            raise failures.pop()
        return made()

    weights = Weights(load, str, keeps_copies=False)
    with pytest.raises(OSError, match="disk"):
        weights.bring_back()
    assert weights.bring_back()["none"] is None


@pytest.mark.parametrize("keeps_copies", [True, False])
@pytest.mark.parametrize("discard", [True, False])
def test_what_is_read_again_is_named_again_and_copies_keep_their_name(keeps_copies, discard):
    names = iter(["first", "second"])
    weights = Weights(made, lambda: next(names), keeps_copies)
    params = weights.bring_back()
    assert weights.version == "first"
    weights.put_aside(params, discard)
    weights.bring_back()
    assert weights.version == ("first" if keeps_copies and not discard else "second")


def test_files_that_were_written_again_have_another_name(tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("a.safetensors", "more/b"):
        (tmp_path / name).write_bytes(b"1234")
    first = checkpoint_version(tmp_path)
    assert checkpoint_version(tmp_path) == first
    names = {first}
    for change in (
        lambda: (tmp_path / "more/b").write_bytes(b"1235"),
        lambda: (tmp_path / "a.safetensors").rename(tmp_path / "c.safetensors"),
        lambda: (tmp_path / "more/b").unlink(),
    ):
        change()
        names.add(checkpoint_version(tmp_path))
    assert len(names) == 4


def test_copies_of_weights_have_one_name_and_other_ones_another(tmp_path):
    def copy(folder, tensor=1.0, config="{}", file="model.safetensors"):
        folder.mkdir(parents=True)
        save_file({"norm.weight": np.full(4, tensor, np.float32)}, folder / file)
        (folder / "config.json").write_text(config, encoding="utf-8")
        return folder

    here = content_version(copy(tmp_path / "here"))
    there = copy(tmp_path / "there")
    (there / "README.md").write_text("mine", encoding="utf-8")
    os.utime(there / "model.safetensors", (1, 1))
    assert content_version(there) == here != checkpoint_version(there)
    assert content_version(copy(tmp_path / "tensor", tensor=2.0)) != here
    assert content_version(copy(tmp_path / "config", config='{"sym": true}')) != here

    blob = tmp_path / "models--org--name/blobs" / hashlib.sha256((there / "model.safetensors").read_bytes()).hexdigest()
    blob.parent.mkdir(parents=True)
    copy(tmp_path / "models--org--name/snapshots/main").joinpath("model.safetensors").rename(blob)
    (tmp_path / "models--org--name/snapshots/main/model.safetensors").symlink_to(blob)
    assert content_version(tmp_path / "models--org--name/snapshots/main") == here, "the hub's cache names its files"
    save_file({"norm.weight": np.full(4, 3.0, np.float32)}, blob)
    assert content_version(tmp_path / "models--org--name/snapshots/main") == here, "they are not read"

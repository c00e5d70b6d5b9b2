"""Models that are written in few bits, and read again by what reads other people's files."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import UsageError
from jaxpaged.params.checkpoint import every_entry
from jaxpaged.params.hub import EMBEDDED_FOLDERS, EMBEDDED_SEEING
from jaxpaged.params.rounded_folder import ROUNDINGS, write_rounded
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.params.test_orbax_format import load

WIDE = {**CONFIGS["qwen3_moe"], "hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with experts behind a dense layer, whose experts have columns that are no groups of 4 bits."""
    monkeypatch.setitem(CONFIGS, "wide", WIDE)
    return write_checkpoint("wide", tmp_path / "model")


# The most that a weight is off, of the largest of what shares its scale: half a step, which has 3 bits of 8-bit floats.
OFF = {"FP8_DYNAMIC": 2**-4, "W8A8": 0.5 / 127, "W4A16": 0.5 / 7.5}


@pytest.mark.parametrize("scheme", ROUNDINGS)
def test_weights_come_back_within_half_a_step_and_all_else_as_it_was(scheme, folder, tmp_path):
    out = tmp_path / "out"
    assert main(["convert", str(folder), "-o", str(out), "--scheme", scheme]) == 0
    before, after = (load(each)[2] for each in (folder, out))
    paths = jax.tree_util.tree_flatten_with_path(before)[0]
    changed = 0
    for (path, was), is_ in zip(paths, jax.tree.leaves(after), strict=True):
        was, is_ = np.asarray(was), np.asarray(is_)
        name = jax.tree_util.keystr(path)
        if not any(part in name for part in ("_proj", "_up")):
            np.testing.assert_array_equal(was, is_, err_msg=name)
            continue
        changed += (was != is_).any()
        rows = was.reshape(-1, was.shape[-1]) if "o_proj" not in name else was.reshape(len(was), -1)
        largest = np.abs(rows).max(axis=1, keepdims=True)
        assert (np.abs(is_.reshape(rows.shape) - rows) <= OFF[scheme] * largest * 1.01).all(), name
    assert changed >= 6


def test_what_has_no_groups_of_4_bits_is_named_and_stays(folder, tmp_path):
    specs, config, _ = load(folder)
    write_rounded(specs, config, folder, tmp_path / "out", "W4A16")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.experts.3.down_proj" in ignored  # 24 inputs
    assert "model.layers.1.mlp.experts.3.up_proj" not in ignored
    assert {"lm_head", "model.layers.1.mlp.gate"} <= {*ignored}


def test_a_quantised_model_is_not_rounded_again(folder, tmp_path):
    specs, config, _ = load(folder)
    write_rounded(specs, config, folder, tmp_path / "out", "W8A8")
    specs, config, _ = load(tmp_path / "out")
    with pytest.raises(UsageError, match="is quantised already"):
        write_rounded(specs, config, tmp_path / "out", tmp_path / "again", "W8A8")


def test_files_of_a_model_beside_it_have_names_of_their_own(tmp_path):
    folder = EMBEDDED_FOLDERS[EMBEDDED_SEEING]
    specs, config, _ = load(folder)
    write_rounded(specs, config, folder, tmp_path / "out", "W8A8")
    names = {name.removesuffix("_scale") for name in every_entry(tmp_path / "out")}
    assert names == every_entry(folder).keys()


def test_a_type_is_refused_beside_a_scheme(capsys, folder, tmp_path):
    arguments = ["convert", str(folder), "-o", str(tmp_path / "out"), "--scheme", "W8A8", "--dtype", "float16"]
    assert main(arguments) != 0
    assert "--dtype is of orbax checkpoints" in capsys.readouterr().err
    assert not Path(tmp_path / "out").exists()

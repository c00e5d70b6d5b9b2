"""`jaxpaged convert`: what it writes loads as the same weights, and what it cannot read it names."""

import numpy as np
import pytest

from jaxpaged.entrypoints.cli import main
from tests.models.checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint("qwen3", tmp_path / "model")


def weights(folder):
    """The parameters that the engine would load, by path."""
    import jax

    from jaxpaged.distributed.mesh import make_mesh
    from jaxpaged.models.config import load_hf_config
    from jaxpaged.models.registry import model_for
    from jaxpaged.params.checkpoint import load_params

    hf = load_hf_config(folder)
    model = model_for(hf)
    config = model.config_from_hf(hf)
    params = load_params(model.param_specs(config, 1), config, folder, make_mesh(1), "float32")
    return [np.asarray(array) for array in jax.tree.leaves(params)]


def test_the_written_model_has_the_same_weights(folder, tmp_path):
    out = tmp_path / "converted"
    assert main(["convert", str(folder), "-o", str(out)]) == 0
    assert not list(out.glob("*.safetensors"))
    before, after = weights(folder), weights(out)
    assert len(before) == len(after) > 0
    assert all(np.array_equal(a, b) for a, b in zip(before, after))


def test_a_folder_that_holds_something_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("mine")
    assert main(["convert", str(folder), "-o", str(tmp_path / "full")]) == 2
    assert "is not empty. Choose a new folder." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_made_is_named(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["convert", str(folder), "-o", str(out)]) == 2
        assert f"cannot write to {out}: " in capsys.readouterr().err


def test_a_model_that_is_not_there_is_a_failure_of_one_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nowhere"), "-o", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr().err
    assert "there is no folder" in captured
    assert captured.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_an_output_folder_it_is_wrong_usage(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["convert", str(folder)])
    assert end.value.code == 2
    assert "-o/--output" in capsys.readouterr().err

"""The base's own weights on the host are those that a model is loaded with, in whatever form its files are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import CheckpointError
from jaxpaged.params.adapters.base import BaseWeights
from jaxpaged.params.checkpoint import load_params
from tests.models.adapted import specs_of
from tests.models.checkpoints import write_checkpoint, write_packed_checkpoint


@pytest.mark.parametrize("form", ["phi3", "gpt_oss", "packed", "mixtral", "orbax", "W8A8"])
def test_weights_are_those_of_the_model(form, tmp_path):
    """Parts of tensors, turned ones, a tensor for each expert, in 4 and 8 bits, and arrays of our own format."""
    if form == "packed":
        folder = write_packed_checkpoint("gpt_oss", tmp_path)
    else:
        folder = write_checkpoint({"orbax": "phi3", "W8A8": "phi3"}.get(form, form), tmp_path / "base")
    if form in ("orbax", "W8A8"):
        given, folder = folder, tmp_path / "converted"
        options = ["--scheme", form] if form == "W8A8" else []
        assert main(["convert", str(given), "-o", str(folder), *options]) == 0
    specs, config = specs_of(folder)
    params = load_params(specs, config, folder, make_mesh(1), jnp.float32)
    base = BaseWeights(folder, specs, config)
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(base(spec), np.asarray(array))


def test_a_file_that_went_is_an_error(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    specs, config = specs_of(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no \\*.safetensors"):
        BaseWeights(folder, specs, config)(specs.embed_tokens)

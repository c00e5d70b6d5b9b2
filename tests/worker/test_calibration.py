"""The largest keys and values of a text: found in chunks, they are those that other code finds in one cache."""

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.entrypoints.cli import main
from jaxpaged.params.kv_scales import read_scales_file
from jaxpaged.worker import calibration
from jaxpaged.worker.calibration import Calibration
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.weights import weights_of
from jaxpaged.worker.worker import meshes_of
from tests.models import encoder_checkpoints
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import PagedModel


@pytest.mark.parametrize("devices", [1, 4])
def test_the_largest_keys_and_values_of_all_sequences_are_found_by_layer_and_head(devices, tmp_path, monkeypatch):
    """With four devices each head is there twice."""
    folder, prompt = write_checkpoint("gemma2", tmp_path), prompt_of("gemma2")
    sequences = prompt[:24], prompt[24:40]
    expected = np.zeros((2, 2, 2))
    for tokens in sequences:
        plain = PagedModel(folder)
        plain.logits(list(tokens))
        arrays = np.abs([[np.asarray(x) for x in kv.arrays] for kv in plain.kv])
        expected = np.maximum(expected, arrays.max(axis=(2, 4, 5)))
    monkeypatch.setattr(calibration, "CHUNK", 16)
    options = {"model": str(folder), "tensor_parallel_size": devices, "max_model_len": 64, "skip_tokenizer_init": True}
    _, model, decoder, config = resolve_model(EngineConfig.from_options(dtype="float32", **options))
    (mesh,) = meshes_of(config.parallel)
    spec = EngineSpec(config, model, decoder, mesh)
    params = weights_of([spec], folder, lambda *_: None).bring_back()
    found = Calibration(spec, params, 24).largest(sequences)
    np.testing.assert_allclose([found[layer] for layer in range(2)], expected, rtol=1e-4)


def test_the_command_writes_a_file_that_an_engine_reads(tmp_path, capsys):
    text, output = tmp_path / "text", tmp_path / "scales.json"
    text.write_text("Water boils at a hundred degrees. " * 4)
    given = "calibrate", "demo", "--text", str(text), "-o", str(output)
    assert main([*given, "--kv-cache-dtype", "int8", "--max-tokens", "20", "--per-layer"]) == 0
    dtype, found = read_scales_file(output, 6, dict.fromkeys(range(6), 2))
    assert (
        dtype == "int8"
        and [*found] == [*range(6)]
        and all(x.ndim == 0 and x > 0 for pair in found.values() for x in pair)
    )
    assert "scales of 6 layers for int8, from 20 tokens" in capsys.readouterr().err
    assert main([*given, "--kv-cache-dtype", "int8_per_token_head"]) == 2
    assert "which has no scales to find" in capsys.readouterr().err
    text.write_text(" ")
    assert main([*given]) == 2 and "is empty" in capsys.readouterr().err
    text.write_text("w1 w2 w3")
    encoder = str(encoder_checkpoints.write("bert_embed", tmp_path / "encoder"))
    assert main(["calibrate", encoder, *given[2:]]) == 2
    assert "caches no keys and values, so there are no scales to find" in capsys.readouterr().err

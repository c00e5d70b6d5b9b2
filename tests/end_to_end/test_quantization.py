"""`quantization` and quantised checkpoints through scheduler, runner and programs: the model's own tokens, and room for
more KV blocks."""

import math

import jax
import pytest

from jaxpaged.params.quantized import array_bytes, is_quantized
from tests.end_to_end.test_architectures import generate, start
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.paged import PagedModel
from tests.models.quantised_checkpoints import write_quantised
from tests.params.test_quantized import WIDE

PROMPT = list(range(20, 36))


@pytest.mark.parametrize(("name", "method", "bits"), [("llama", "int8", 12), ("wide", "int4", 7)])
def test_the_engine_runs_the_rounded_model_and_counts_its_smaller_weights(name, method, bits, tmp_path, monkeypatch):
    """`bits` is a bound of them for a weight: vectors have 32, and so do scales of 8-bit weights."""
    monkeypatch.setitem(CONFIGS, "wide", WIDE)
    folder = write_checkpoint(name, tmp_path)
    model = PagedModel(folder, quantization=method)
    prompt = prompt_of(name)
    expected = model.continue_greedily(model.logits(prompt)[-1], 4)
    scheduler, executor = start(folder, 1, quantization=method, dtype="float32")
    worker = executor.worker
    assert generate(scheduler, executor, [prompt, prompt], 4) == [expected, expected]
    assert executor.worker.stats()["recompiles"] == 0
    params = jax.tree.leaves(worker.device.params)
    assert worker.engine_spec.weight_bytes == sum(array.nbytes for array in params)
    weights = jax.tree.leaves(worker.device.params, is_leaf=is_quantized)
    assert worker.engine_spec.weight_bytes * 8 < bits * sum(math.prod(weight.shape) for weight in weights)
    executor.shutdown()


@pytest.mark.parametrize(
    ("kind", "form", "num_devices", "words"),
    [
        ("awq", "auto", 1, "AWQ of 4 bits in groups of 16 as rows of int8"),
        ("w4a16", "stored", 2, "W4A16 of 4 bits in groups of 16 as int4 in groups of 16"),
    ],
)
def test_an_engine_serves_a_quantised_checkpoint_in_the_form_that_it_is_asked_for(
    kind, form, num_devices, words, tmp_path, caplog
):
    """And counts its bytes: two numbers of 4 bits are one."""
    caplog.set_level("INFO", logger="jaxpaged")
    folder = write_quantised(tmp_path, kind)
    model = PagedModel(folder, num_devices, form="rows" if form == "auto" else form)
    expected = model.continue_greedily(model.logits(PROMPT)[-1], 4)
    scheduler, executor = start(folder, num_devices, quantized_form=form, dtype="float32")
    assert generate(scheduler, executor, [PROMPT, PROMPT], 4) == [expected, expected]
    assert f"weights in {words}" in caplog.text and "14 matrices in" in caplog.text
    params = jax.tree.leaves(executor.worker.device.params)
    shards = (array.addressable_shards[0].data for array in params)
    assert executor.worker.engine_spec.weight_bytes == sum(array_bytes(part.shape, part.dtype) for part in shards)
    assert {str(array.dtype) for array in params} >= {"int4" if form == "stored" else "int8"}
    executor.shutdown()

"""`quantization` through scheduler, runner and programs: the model's own tokens, and room for more KV blocks."""

import math

import jax
import pytest

from jaxpaged.params.quantized import is_quantized
from tests.end_to_end.test_architectures import generate, start
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.paged import PagedModel
from tests.params.test_quantized import WIDE


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

"""`quantization="int8"` through scheduler, runner and programs: the model's own tokens, and room for more KV blocks."""

import jax
import numpy as np

from jaxpaged.worker.worker import bytes_on_device
from tests.end_to_end.test_architectures import generate, start
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import PagedModel


def test_the_engine_runs_the_rounded_model_and_counts_its_smaller_weights(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    model = PagedModel(folder, quantization="int8")
    prompt = prompt_of("llama")
    expected = model.continue_greedily(model.logits(prompt)[-1], 4)
    scheduler, executor = start(folder, 1, quantization="int8", dtype="float32")
    worker = executor.worker
    assert generate(scheduler, executor, [prompt, prompt], 4) == [expected, expected]
    assert executor.stats()["recompiles"] == 0
    counted = sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(worker.param_shapes))
    assert counted == sum(array.nbytes for array in jax.tree.leaves(worker.runner.params))
    num_values = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(worker.param_shapes))
    assert counted < 1.5 * num_values  # a byte each, and scales and vectors of four
    executor.shutdown()

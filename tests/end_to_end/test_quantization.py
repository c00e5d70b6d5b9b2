"""`quantization="int8"` through scheduler, runner and programs: the model's own tokens, and room for more KV blocks."""

import jax

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
    assert executor.worker.stats()["recompiles"] == 0
    params = jax.tree.leaves(worker.device.params)
    assert worker.blueprint.weight_bytes == sum(array.nbytes for array in params)
    assert worker.blueprint.weight_bytes < 1.5 * sum(array.size for array in params)  # vectors and scales have four
    executor.shutdown()

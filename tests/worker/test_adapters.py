"""Requests with adapters get what a model with the adapter merged into it gives, whatever shares their steps."""

import numpy as np
import pytest

from tests.models.checkpoints import write_checkpoint
from tests.worker.adapted_engine import Adapters, Steps, adapted_executor, merged

PROMPTS = [[5, 9, 17, 4, 33, 60], [7, 7, 101], [5, 9, 17, 4, 33, 60], [150, 3, 88, 21]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    executor = adapted_executor(write_checkpoint("qwen2", tmp_path_factory.mktemp("model")))
    yield executor, Adapters(executor), Steps(executor)
    executor.shutdown()


def read(executor, number):
    from jaxpaged.messages import LoRARequest

    return executor.worker.read_lora(LoRARequest(f"a{number}", number, f"/nowhere/{number}"))


def test_each_row_is_what_its_own_merged_model_gives(engine):
    executor, adapters, steps = engine
    plain = executor.worker.device.params
    weights = {number: adapters.make(number, rank=2 * number) for number in (1, 2)} | {3: adapters.make(3, dora=True)}
    infos = [read(executor, number) for number in (1, 2, 3)]
    assert [info.rank for info in infos] == [2, 4, 4]
    slots = [2, 3, 0, 1]
    mixed = steps.answers(PROMPTS, slots, loads=[(1, 3), (2, 1), (3, 2)])
    of_slot = {1: 3, 2: 1, 3: 2}
    for prompt, slot, (tokens, lines) in zip(PROMPTS, slots, mixed):
        alone_tokens, alone_lines = steps.answers([prompt], [slot])[0]
        assert tokens == alone_tokens
        np.testing.assert_allclose(lines, alone_lines, atol=1e-4)
        executor.worker.device.params = merged(plain, weights[of_slot[slot]]) if slot else plain
        ((expected_tokens, expected),) = steps.answers([prompt], [0])
        executor.worker.device.params = plain
        assert tokens == expected_tokens
        np.testing.assert_allclose(lines, expected, atol=2e-3)

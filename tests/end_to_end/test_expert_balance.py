"""Experts that are moved while requests run: the same tokens, devices that are loaded more evenly, nothing compiled."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged import LLM
from jaxpaged.errors import ConfigError
from tests.end_to_end.test_architectures import generate, start
from tests.end_to_end.test_attention_ranks import OPTIONS as OF_RANKS
from tests.end_to_end.test_attention_ranks import answers, lengths_of_runs
from tests.models.checkpoints import make_tensors, prompt_of, write_checkpoint
from tests.models.paged import PagedModel

BALANCE = {
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"step_interval": 6, "window_size": 5, "num_redundant_experts": 3, "log_balancedness": True},
}


def write_skewed(folder):
    """Five experts with biases, of which all tokens want the first two."""
    write_checkpoint("gpt_oss", folder)
    tensors = make_tensors("gpt_oss")
    for name in tensors:
        if name.endswith("router.bias"):
            tensors[name] = tensors[name] + np.array([40, 30, 0, 0, 0], np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_experts_move_while_requests_run_and_the_tokens_stay(tmp_path, caplog):
    """Weights in 8 bits with scales and biases; after deep sleep experts are where they were at the start."""
    folder, prompt = write_skewed(tmp_path), prompt_of("gpt_oss")
    prompts = [prompt, prompt[5:17], prompt[20:23], prompt[:39], prompt[::-1]]
    alone = PagedModel(folder, quantization="int8")
    expected = alone.continue_greedily(alone.logits(prompt)[-1], 12)
    scheduler, executor = start(folder, 4, quantization="int8", **BALANCE)
    try:
        with caplog.at_level("INFO", "jaxpaged"):
            answers = generate(scheduler, executor, prompts, 12)
            assert generate(scheduler, executor, prompts[1:], 12) == answers[1:]
        found = re.findall(r"balancedness ([\d.]+) .*?, ([\d.]+) with", caplog.text)
        told = [(float(before), float(after)) for before, after in found]
        assert answers[0] == expected
        # One device has both experts at first; then one on each of four, each computing half of its tokens.
        assert told[0][0] <= 0.5 and told[0][1] == told[-1][0] == 1
        stats = executor.worker.stats()
        assert stats["expert_rebalancings"] == len(told) >= 3 and stats["recompiles"] == 0
        assert stats["expert_layers_moved"] == executor.worker.engine_spec.decoder.num_layers
        with pytest.raises(ConfigError, match="enable_eplb moves experts"):
            executor.worker.dense_model()
        executor.worker.sleep(discard=True)
        executor.worker.wake_up("weights")
        executor.worker.wake_up("kv_cache")
        scheduler.reset_prefix_cache()
        assert generate(scheduler, executor, prompts, 12) == answers
        assert executor.worker.stats()["recompiles"] == 0
    finally:
        executor.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_experts_move_between_the_devices_of_all_attention_ranks(tmp_path, caplog, steps):
    """What each rank counts is added up; with runs of decode steps, preemption, and a rank that has nothing to do."""
    folder, prompt = write_skewed(tmp_path), prompt_of("gpt_oss")
    alone = PagedModel(folder)
    expected = alone.continue_greedily(alone.logits(prompt)[-1], 12)
    options = {**OF_RANKS, **BALANCE, "data_parallel_size": 2, "tensor_parallel_size": 2, "num_scheduler_steps": steps}
    with (
        caplog.at_level("INFO", "jaxpaged"),
        LLM(model=str(folder), **options, num_gpu_blocks_override=20, wait_for_programs=True) as llm,
    ):
        (first, beside, *more), _ = answers(llm, prompt, prompt[5:17], *[prompt] * 6)
        assert [first, *more] == [expected] * 7
        assert answers(llm, prompt[5:17])[0] == [beside]
        told = re.findall(r"balancedness ([\d.]+) .*?, ([\d.]+) with", caplog.text)
        assert float(told[0][0]) <= 0.5 and float(told[0][1]) == float(told[-1][0]) == 1
        stats = llm.stats()
        assert stats.number("recompiles") == 0 and stats.number("num_preemptions") > 0
        assert (steps > 1) == bool(lengths_of_runs(llm))
        (counts,) = llm.collective_rpc(lambda worker: np.split(np.asarray(worker.device.state.kv[-1]), 2))
        assert all(of_rank.sum() > 0 for of_rank in counts) and (counts[0] != counts[1]).any(), "each its own"

"""Estimated times of steps, against sums done by hand."""

import pytest

from jaxpaged.tools.planning.plan import DeviceFacts, PlannedProgram
from jaxpaged.tools.planning.step_time import decode_seconds, floor_seconds, prefill_seconds, rates_of
from jaxpaged.tools.planning.targets import CHIPS, GPUS, tpu_facts
from jaxpaged.worker.costs import Work

DEVICE = DeviceFacts("toy", memory=10**9, bandwidth=1e9, matmul_bf16=1e12, links=1e8)
RATES = rates_of(DEVICE)
WORK = Work(
    num_shards=1,
    weight_bytes=2_000_000,
    params=1_000_000,
    head_params=100_000,
    head_bytes=200_000,
    attention_layers=((None, 2, 100), (10, 1, 100)),
    heads=64,
    reduced_bytes=500,
)
PROGRAMS = [
    PlannedProgram("forward", 8, 1.0, seconds=0.003),
    PlannedProgram("forward", 64, 1.0, seconds=0.004),
    PlannedProgram("sample", 64, 1.0, seconds=0.010),
]
CONTEXTS = (2 * 1000 + 10) * 100 / (RATES.bandwidth * RATES.context_share)


def test_a_step_adds_its_programs_and_what_is_read_of_contexts():
    head = 200_000 / RATES.bandwidth
    for num_requests, forward in ((4, 0.003), (32, 0.004)):
        drawn = head + (0.010 - head) * num_requests / 64
        expected = forward + drawn + num_requests * CONTEXTS
        assert decode_seconds(PROGRAMS, WORK, DEVICE, num_requests, 1000) == pytest.approx(expected)
    run = PlannedProgram("decode", 8, 1.0, seconds=0.001)
    assert decode_seconds([*PROGRAMS, run], WORK, DEVICE, 4, 1000) == pytest.approx(0.001 + 4 * CONTEXTS)
    assert decode_seconds(PROGRAMS[:1], WORK, DEVICE, 4, 1000) is None, "nothing was compiled that draws"
    assert decode_seconds(PROGRAMS, WORK, DEVICE, 65, 1000) is None
    quick = [PlannedProgram("decode", 64, 1.0, seconds=1e-9)]
    assert decode_seconds(quick, WORK, DEVICE, 64, 0) == pytest.approx(110e-6 + 64 * 3.2e-6), "the host's time"


def test_a_prompt_adds_its_steps_and_its_attention():
    pairs = 2 * 100 * 101 / 2 + 10 * 11 / 2 + 90 * 10
    attention = 4 * pairs * 64 / (RATES.flops * RATES.prompt_share)
    assert prefill_seconds(PROGRAMS, WORK, DEVICE, 100, 2) == pytest.approx(2 * 0.004 + attention)
    assert prefill_seconds(PROGRAMS, WORK, DEVICE, 100, 1) is None


def test_the_floor_is_what_no_program_can_avoid():
    read = 2_000_000 + 4 * 2010 * 100
    assert floor_seconds(WORK, RATES, 4, 1000) == pytest.approx(read / RATES.bandwidth)


def test_every_device_has_rates_that_are_no_more_than_its_data_sheet():
    facts = [*GPUS.values(), *(tpu_facts(chip, 1) for chip in CHIPS)]
    for device in facts:
        rates = rates_of(device)
        assert rates.bandwidth <= device.bandwidth and rates.flops <= device.matmul_bf16, device
        assert 0 < rates.context_share <= 1 and 0 < rates.prompt_share <= 1
        assert bool(rates.clock) == device.name.startswith("TPU") != bool(rates.launch)

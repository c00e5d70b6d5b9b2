"""Estimated times of steps, against sums done by hand."""

from dataclasses import replace

import pytest

from jaxpaged.tools.planning.plan import DeviceFacts, PlannedProgram
from jaxpaged.tools.planning.step_time import (
    ITEM_SLOTS,
    context_seconds,
    decode_seconds,
    floor_seconds,
    prefill_seconds,
    rates_of,
)
from jaxpaged.tools.planning.targets import CHIPS, GPUS, tpu_facts
from jaxpaged.worker.costs import Work
from pallas_kernels.ragged_paged_attention.tpu.segments import DECODE_ITEM_SLOTS

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
    narrow = replace(WORK, kv_itemsize=1)
    slower = CONTEXTS * RATES.context_share / RATES.narrow_share
    assert decode_seconds([run], narrow, DEVICE, 4, 1000) == pytest.approx(0.001 + 4 * slower), "bytes are as given"
    quick = [PlannedProgram("decode", 64, 1.0, seconds=1e-9)]
    assert decode_seconds(quick, WORK, DEVICE, 64, 0) == pytest.approx(110e-6 + 64 * 3.2e-6), "the host's time"


def test_attention_of_decodes_on_a_tpu_is_as_long_as_its_schedule_where_that_is_longer():
    work = replace(WORK, kv_heads=1, attention_layers=((None, 2, 512), (300, 1, 512)))
    rates = rates_of(tpu_facts("v6e", 1))
    items, blocks = 2 * 4 + 2, 2 * 63 + 19  # of contexts of 1,000 tokens, and of a window of 300
    cycles = items * (143 + 48) + blocks * 8
    assert ITEM_SLOTS == DECODE_ITEM_SLOTS
    assert context_seconds(work, rates, 7, 1000) == pytest.approx(7 * cycles / 1.75e9)
    wide = replace(work, kv_heads=8, attention_layers=((None, 2, 8 * 512),))
    assert context_seconds(wide, rates, 7, 1000) == pytest.approx(7 * 2 * 1000 * 8 * 512 / rates.bandwidth)


@pytest.mark.parametrize(
    ("chip", "heads", "items", "blocks", "bundles"),
    [
        ("v5e", 1, 8, 128, 2610),
        ("v5e", 1, 8, 16, 1702),
        ("v5e", 8, 4, 64, 2897),
        ("v5e", 8, 4, 8, 2413),
        ("v6e", 1, 8, 128, 2504),
        ("v6e", 1, 8, 16, 1647),
        ("v6e", 8, 4, 64, 2636),
        ("v6e", 8, 4, 8, 2169),
        ("tpu7x", 1, 8, 128, 3627),
        ("tpu7x", 1, 8, 16, 1757),
        ("tpu7x", 8, 4, 64, 3272),
    ],
)
def test_cycles_of_items_heads_and_blocks_are_those_of_the_schedules_in_the_readme(chip, heads, items, blocks, bundles):
    rates = rates_of(tpu_facts(chip, 1))
    counted = items * (rates.item_cycles + heads * rates.head_cycles) + blocks * rates.block_cycles
    assert counted == pytest.approx(bundles, rel=0.03)


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
        assert 0 < rates.narrow_share <= rates.context_share <= 1 and 0 < rates.prompt_share <= 1
        assert bool(rates.clock) == device.name.startswith("TPU") != bool(rates.launch)

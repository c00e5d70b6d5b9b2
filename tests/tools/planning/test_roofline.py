"""Bounds of speed, against sums done by hand."""

from dataclasses import replace

import pytest

from jaxpaged.tools.planning.plan import DeviceFacts
from jaxpaged.tools.planning.roofline import Work, decode_parts, decode_speed, link_seconds, prefill_speed

HOST = 110e-6 + 3.2e-6  # for one request
DEVICE = DeviceFacts("toy", memory=10**9, bandwidth=1e9, matmul_bf16=1e12, links=1e8)


def work(**changes):
    values = {
        "num_shards": 1,
        "weight_bytes": 2_000_000,
        "params": 1_000_000,
        "head_params": 100_000,
        "attention_layers": ((None, 2, 100),),
        "heads": 64,
        "reduced_bytes": 500,
    }
    return Work(**{**values, **changes})


def test_a_lone_decode_is_bound_by_reading_weights_and_cache_once():
    speed = decode_speed([work()], DEVICE, num_requests=1, context=1000)
    assert speed.limit == "memory"
    assert speed.tokens_per_second == pytest.approx(1e9 / (2_000_000 + 2 * 1000 * 100))


def test_ranks_read_their_own_caches_and_multiply_all_tokens_with_experts():
    """Eight requests on two ranks: four caches each, and the experts' share of all eight tokens."""
    ranked = work(num_ranks=2, expert_params=200_000)
    parts = decode_parts(ranked, DEVICE, 8, 1000, 0)
    assert parts["memory"] * DEVICE.bandwidth == pytest.approx(2_000_000 + 4 * 2 * 1000 * 100)
    attention = 4 * 2000 * 64
    assert parts["matmul"] * DEVICE.matmul_bf16 == pytest.approx(4 * (2 * 800_000 + attention) + 8 * 2 * 200_000)
    assert link_seconds(ranked, DEVICE, 4) * DEVICE.links == pytest.approx(4 * 500), "to the other rank and back"
    assert link_seconds(work(), DEVICE, 4) == 0


def test_requests_share_the_weights_but_not_their_caches():
    one, eight = (decode_speed([work()], DEVICE, n, 1000).tokens_per_second for n in (1, 8))
    assert eight == pytest.approx(8 * 1e9 / (2_000_000 + 8 * 200_000))
    assert one < eight < 8 * one


def test_a_step_reads_the_experts_that_its_tokens_go_to():
    sparse = work(expert_bytes=1_600_000, expert_share=0.25)
    alone, three = (1e9 / decode_speed([sparse], DEVICE, n, 0).tokens_per_second * n for n in (1, 3))
    assert alone == pytest.approx(400_000 + 1_600_000 / 4)
    assert three == pytest.approx(400_000 + 1_600_000 * (1 - 0.75**3))


def test_merging_parts_of_contexts_adds_to_what_is_exchanged():
    whole, split = (link_seconds(work(num_shards=4, merged_bytes=n), DEVICE, 10) for n in (0, 250))
    assert whole == pytest.approx(10 * 1.5 * 500 / 1e8)
    assert split - whole == pytest.approx(10 * 250 / 1e8)


def test_a_window_layer_reads_its_window_only():
    windowed = work(attention_layers=((None, 1, 100), (10, 1, 100)))
    speed = decode_speed([windowed], DEVICE, 1, 1000)
    assert speed.tokens_per_second == pytest.approx(1e9 / (2_000_000 + 1010 * 100))
    assert decode_speed([windowed], DEVICE, 1, 5).tokens_per_second == pytest.approx(1e9 / (2_000_000 + 10 * 100))


@pytest.mark.parametrize(("window", "pairs"), [(None, 1000 * 1001 // 2), (10, 55 + 990 * 10), (5000, 1000 * 1001 // 2)])
def test_prefill_counts_the_pairs_that_a_causal_mask_leaves(window, pairs):
    fast_memory = DeviceFacts("toy", 10**9, 1e15, 1e12, 1e8)
    speed = prefill_speed([work(attention_layers=((window, 3, 100),))], fast_memory, 1000)
    flops = 2 * 900_000 * 1000 + 2 * 100_000 + 3 * 4 * pairs * 64
    assert speed.limit == "matmul"
    assert speed.tokens_per_second == pytest.approx(1000 * 1e12 / flops)


def test_links_count_only_between_devices_and_can_be_the_limit():
    assert link_seconds(work(), DEVICE, 1000) == 0.0
    split = work(num_shards=4)
    assert link_seconds(split, DEVICE, 1000) == pytest.approx(1.5 * 1000 * 500 / 1e8)
    assert prefill_speed([split], DEVICE, 4000).limit == "links"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_collectives_that_are_waited_for_add_to_the_time_of_the_device(share):
    split = work(num_shards=4, waited_share=share)
    links = link_seconds(split, DEVICE, 100)
    speed = decode_speed([split], DEVICE, 100, 10)
    memory = (2_000_000 + 100 * 2 * 10 * 100) / 1e9
    assert speed.tokens_per_second == pytest.approx(100 / max(memory + share * links, links))


def test_a_small_model_is_bound_by_the_host_or_by_kernels_that_wait_for_each_other():
    tiny = work(weight_bytes=1000, params=500, head_params=100)
    fast = DeviceFacts("toy", 10**9, 1e15, 1e15, 1e15)
    lone = decode_speed([tiny], fast, 1, 10)
    assert lone.limit == "host" and lone.tokens_per_second == pytest.approx(1 / HOST)
    run = decode_speed([work(weight_bytes=1000, params=500, steps_per_program=32)], fast, 1, 10)
    assert run.limit == "kernels" and run.tokens_per_second == pytest.approx(1 / (2 * 8 * 1e-6))
    many = decode_speed([work(weight_bytes=1000, params=500, steps_per_program=32)], fast, 256, 10)
    assert many.limit == "host" and many.tokens_per_second < 256 / (256 * 3.2e-6)
    assert prefill_speed([tiny], fast, 10).tokens_per_second == pytest.approx(10 / 110e-6)
    assert prefill_speed([tiny], fast, 10, num_steps=3).tokens_per_second == pytest.approx(10 / 330e-6)


def test_what_programs_move_counts_but_never_less_than_the_weights():
    speeds = [
        decode_speed([work()], DEVICE, 1, 1000, step_bytes=[n]).tokens_per_second for n in (0, 2_000_000, 4_000_000)
    ]
    assert speeds[0] == speeds[1] == pytest.approx(1e9 / 2_200_000) and speeds[2] == pytest.approx(1e9 / 4_200_000)


def test_stages_that_take_turns_are_as_fast_as_the_slowest_and_a_lone_request_meets_all_of_them():
    """Two stages of half the layers each; the second one has the head besides."""
    first = work(weight_bytes=1_000_000, attention_layers=((None, 1, 100),), sent_bytes=0)
    last = work(weight_bytes=1_200_000, attention_layers=((None, 1, 100),))
    lone, many = (decode_speed([first, last], DEVICE, n, 1000) for n in (1, 8))
    assert lone.tokens_per_second == pytest.approx(1e9 / (1_100_000 + 1_300_000))
    assert many.tokens_per_second == pytest.approx(8 * 1e9 / (2 * (1_200_000 + 4 * 100_000)))
    assert (lone.limit, many.num_requests) == ("memory", 8)
    sent = decode_speed([replace(first, sent_bytes=1000), last], DEVICE, 1, 1000)
    assert 1 / sent.tokens_per_second - 1 / lone.tokens_per_second == pytest.approx(1000 / DEVICE.links)
    one, three = (1 / prefill_speed([first, last], DEVICE, 30, num_steps=n).tokens_per_second for n in (1, 3))
    assert one == pytest.approx((1_000_000 + 1_200_000) / 1e9 / 30), "memory bounds so short a prompt"
    assert three == pytest.approx((1_000_000 + 3 * 1_200_000) / 1e9 / 30)

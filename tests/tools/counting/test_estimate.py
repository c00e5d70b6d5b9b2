"""Counts and times of small programs, by hand."""

import pytest

from jaxpaged.tools.counting.estimate import Rates, counts_of
from jaxpaged.tools.counting.program_text import Choice, Loop, ProgramText, chosen, total

GPU = """HloModule step, is_scheduled=true

%searched (p: f32[8,1000]) -> f32[8] {
  %p = f32[8,1000]{1,0} parameter(0)
  %end = f32[8]{0} fusion(%p), kind=kInput, calls=%add
  ROOT %loop = f32[8]{0} while(%end), condition=%more, body=%again
}

%again (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %twice = f32[8]{0} fusion(%q), kind=kLoop, calls=%add
}

%more (r: f32[8]) -> pred[] {
  %r = f32[8]{0} parameter(0)
  ROOT %less = pred[] fusion(%r), kind=kLoop, calls=%add
}

%nothing (s: f32[8,1000]) -> f32[8] {
  %s = f32[8,1000]{1,0} parameter(0)
  ROOT %zero = f32[8]{0} fusion(), kind=kLoop, calls=%add
}

ENTRY %main (x: bf16[8,512], w: bf16[1000,512], kv: bf16[99,16]) -> f32[8] {
  %x = bf16[8,512]{1,0} parameter(0)
  %w = bf16[1000,512]{1,0} parameter(1)
  %kv = bf16[99,16]{1,0} parameter(2)
  %attend = bf16[8,512]{1,0} custom-call(%x, %kv), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/paged_attend/pallas_call"}
  %call = (f32[8,1000]{1,0}, s8[4194304]{0}) custom-call(%attend, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %product = f32[8,1000]{1,0} get-tuple-element(%call), index=0
  %limited = pred[] fusion(%product), kind=kInput, calls=%add
  ROOT %limits = f32[8]{0} conditional(%limited, %product, %product), true_computation=%searched, false_computation=%nothing
}
"""  # noqa: E501
ON_GPU = Rates(bandwidth=1e12, flops=1e14, launch=1e-6, fill=2e-6)
KV, PRODUCT, TOKENS = 99 * 16 * 2, 8 * 1000 * 4, 8 * 512 * 2


def test_a_product_on_a_gpu_is_told_from_a_kernel_and_its_room_to_work_in_is_not_moved():
    attend, call, *_ = ProgramText(GPU, [KV]).region
    assert (attend.kernel, attend.bytes, attend.flops) == ("paged_attend", 2 * TOKENS, 0)
    assert (call.kernel, call.bytes, call.flops) == ("", TOKENS + 1000 * 512 * 2 + PRODUCT, 2 * 8 * 1000 * 512)
    assert ON_GPU.seconds(attend) == pytest.approx(3e-6 + attend.bytes / 1e12), "contexts are awaited as weights are"
    assert ON_GPU.seconds(call) == pytest.approx(3e-6 + call.bytes / 1e12)
    others = ("grouped_matmul", "lora_matmul", "mla_paged_attention", "paged_attend_spans")
    reading = [ProgramText(GPU.replace("paged_attend", name), [KV]).region[0] for name in others]
    assert [*map(ON_GPU.seconds, reading)] == [ON_GPU.seconds(attend)] * 4
    slow = Rates(bandwidth=1e12, flops=1e9)
    assert slow.seconds(call) == pytest.approx(call.flops / 1e9), "the longer of both"


def test_the_branch_counts_that_takes_least_and_a_loop_in_one_is_read_by_the_host():
    text = ProgramText(GPU, [KV])
    found = counts_of(text, ON_GPU)
    assert found["launches"] == 5, "attention, the product, a predicate, the conditional, and what its branch does"
    assert found["small launches"] == 2, "what awaits weights or contexts takes longer than its launch"
    assert found["loops the host reads"] == 1
    inner = {each.name for each, _ in chosen(text.region, ON_GPU.seconds, max)}
    assert {"end", "twice", "less"} <= inner and "zero" not in inner
    *_, choice = text.region
    assert isinstance(choice, Choice) and isinstance(choice.branches[0][-1], Loop)


TPU = """HloModule step, is_scheduled=true

%layers (t: f32[8]) -> f32[8] {
  %t = f32[8]{0} parameter(0)
  ROOT %layer = f32[8]{0} fusion(%t), kind=kLoop, calls=%add, backend_config={"window_config":{"estimated_cycles":"500"}}
}

ENTRY %main (x: f32[8], w: bf16[4096,512]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = bf16[4096,512]{1,0} parameter(1)
  %prefetch = (bf16[4096,512]{1,0:S(1)}, bf16[4096,512]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %tower = f32[8]{0} while(%x), condition=%more, body=%layers, backend_config={"known_trip_count":{"n":"27"}}
  %weight = bf16[4096,512]{1,0:S(1)} copy-done(%prefetch)
  %odd = f32[8]{0} fusion(%tower), kind=kLoop, calls=%add, backend_config={"window_config":{"estimated_cycles":"18446744073709551615"}}
  ROOT %kernel.1 = f32[8]{0} custom-call(%odd, %weight), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/write/pallas_call"}
}
"""  # noqa: E501


def test_a_tpu_takes_the_cycles_of_its_compiler_or_as_long_as_all_bytes():
    region = ProgramText(TPU).region
    fast = Rates(bandwidth=1e15, flops=1e15, clock=1e9)
    assert fast.program_seconds(region) == pytest.approx(27 * 500 / 1e9, rel=1e-3)
    slow = Rates(bandwidth=1e9, flops=1e15, clock=1e9)
    assert slow.program_seconds(region) == pytest.approx(total(region, lambda each: each.bytes) / 1e9)
    assert slow.program_seconds(region) > 4096 * 512 * 2 / 1e9, "copies that are started ahead move too"
    found = counts_of(ProgramText(TPU), fast)
    assert found["cycles"] == 27 * 500 and "launches" not in found


RING = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0:S(1)} parameter(0)
  %waited = f32[1000]{0:S(1)} all-reduce(%x), replica_groups={{0,1,2,3,4}}, to_apply=%add
  %begun = (f32[1000]{0:S(1)}, f32[1000]{0:S(1)}) all-reduce-start(%x), replica_groups={{0,1,2,3,4}}, to_apply=%add
  %work = f32[8]{0:S(1)} fusion(%x), calls=%add, backend_config={"window_config":{"estimated_cycles":"9000"}}
  ROOT %ended = f32[1000]{0:S(1)} all-reduce-done(%begun)
}
"""


def test_a_collective_takes_what_its_ring_takes_less_the_work_beside_it():
    ring = 8 / 5 * 4000 / 1e9 + 8e-6
    tpu = Rates(bandwidth=1e12, flops=1e14, clock=1e9, links=1e9, hop=1e-6)
    found = counts_of(ProgramText(RING), tpu)
    assert found["microseconds of collectives"] == pytest.approx(1e6 * (ring + ring - 9e-6), abs=0.1)
    assert found["microseconds"] == pytest.approx(1e6 * 2 * ring, abs=0.1), "and the work itself"
    assert found["collectives: all-reduce"] == 2 and found["waited bytes"] == found["hidden bytes"] == 4000
    without = Rates(bandwidth=1e12, flops=1e14, clock=1e9)
    assert counts_of(ProgramText(RING), without)["microseconds"] == 9, "of devices whose links are not known"

"""The instructions of sorting by group, as LLVM IR.

Operands: groups [P], and something as long as the counts [E + 1], of which the last is of none. Results: order [P],
places [P], and the counts, which become the first place of each group, and then the one after its last.
"""

from llvmlite import ir

from pallas_kernels.llvm.builder import I32, Builder, whole
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module


def kernel() -> ir.Module:
    """The one kernel."""
    return kernel_module(lambda b, frame: whole(1), lambda b, frame, i: emit_all(b, frame))


def emit_all(b: Builder, frame: Frame) -> None:
    groups, num_things, num_counts = frame.operand(0), frame.extent(0, 0), frame.extent(1, 0)
    order, places, counts = (frame.result(i) for i in range(3))
    b.clear(counts, b.mul(num_counts, whole(4)))

    def put(value: ir.Value, base: ir.Value, index: ir.Value) -> None:
        b.write(b.trunc(value, I32), base, b.mul(index, whole(4)), align=4)

    def group_of(thing: ir.Value) -> ir.Value:
        return b.smaller(b.integer(groups, thing), b.sub(num_counts, whole(1)))

    with b.counting(whole(0), num_things, whole(1)) as (thing, _):
        group = group_of(thing)
        put(b.add(b.integer(counts, group), whole(1)), counts, group)
    with b.counting(whole(0), num_counts, whole(1), [whole(0)]) as (group, before):
        count = b.integer(counts, group)
        put(before[0], counts, group)
        before[0] = b.add(before[0], count)
    with b.counting(whole(0), num_things, whole(1)) as (thing, _):
        group = group_of(thing)
        place = b.integer(counts, group)
        put(place, places, thing)
        put(thing, order, place)
        put(b.add(place, whole(1)), counts, group)

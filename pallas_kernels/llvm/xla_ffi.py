"""How XLA calls a kernel: the frame of a call, XLA's own thread pool, and the handler around a kernel's two pieces.

The offsets are those of `xla/ffi/api/c_api.h`, which jaxlib brings along, in the versions of `machine.KNOWN_FFI`. XLA
promises that structures only grow at their ends.

A kernel is a number of chunks, each done by one thread in a fixed order, whoever that is: threads change no bit. Chunks
are handed out by a counter. The thread that XLA calls works too, and waits only for chunks that others have begun, so
a pool without a free thread costs time and never stands still. A thread that comes late finds no chunk left and must
not touch the frame, which is gone by then; what it reads is freed by the last one to leave.
"""

from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.llvm.builder import I32, I64, NULL, PTR, VOID, Builder, declare, whole
from pallas_kernels.llvm.machine import ffi_version

HANDLER = "handler"
"""The name of the function that XLA calls, in every module."""

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 8, 16, 24, 72, 112
# XLA_FFI_Metadata_Extension: its metadata, and there the version and the traits
_METADATA, _MAJOR, _MINOR, _TRAITS = 24, 24, 28, 32
# XLA_FFI_Api
_SCHEDULE, _NUM_THREADS = 136, 144
# XLA_FFI_Buffer
_DATA, _DIMS = 24, 40

# What the threads of a call share: 64 bytes apart where many write.
_NEXT, _DONE, _OWNERS, _COUNT, _FRAME, _SHARED_BYTES = 0, 64, 128, 136, 144, 192


class Frame:
    """The operands and results of a call, as values in the function that `builder` writes."""

    def __init__(self, builder: Builder, pointer: ir.Value):
        self._builder, self.pointer = builder, pointer

    def operand(self, index: int) -> ir.Value:
        """The address of an operand's first element."""
        return self._builder.read(PTR, self._buffer(_ARGUMENTS, index), _DATA)

    def result(self, index: int) -> ir.Value:
        return self._builder.read(PTR, self._buffer(_RESULTS, index), _DATA)

    def extent(self, operand: int, axis: int) -> ir.Value:
        """How long an axis of an operand is."""
        return self._extent(_ARGUMENTS, operand, axis)

    def result_extent(self, index: int, axis: int) -> ir.Value:
        return self._extent(_RESULTS, index, axis)

    def _extent(self, list_offset: int, index: int, axis: int) -> ir.Value:
        dims = self._builder.read(PTR, self._buffer(list_offset, index), _DIMS)
        return self._builder.read(I64, dims, 8 * axis)

    def _buffer(self, list_offset: int, index: int) -> ir.Value:
        buffers = self._builder.read(PTR, self.pointer, list_offset)
        return self._builder.read(PTR, buffers, 8 * index)


def kernel_module(
    num_chunks: Callable[[Builder, Frame], ir.Value], chunk: Callable[[Builder, Frame, ir.Value], None]
) -> ir.Module:
    """The module of a kernel. `num_chunks(builder, frame)` emits how many pieces there are, `chunk(builder, frame, i)`
    the work of one of them."""
    module = ir.Module("kernel")
    work = _worker(module, chunk)
    handler = ir.Function(module, ir.FunctionType(PTR, [PTR]), HANDLER)
    b, (frame,) = Builder(handler.append_basic_block()), handler.args
    extension = b.read(PTR, frame, _EXTENSION)
    with b.if_then(b.icmp_unsigned("!=", extension, NULL)):
        _answer_metadata(b, extension)
    count = num_chunks(b, Frame(b, frame))
    shared = b.call(declare(module, "malloc", PTR, I64), [whole(_SHARED_BYTES)])
    for value, offset in ((whole(0), _NEXT), (whole(0), _DONE), (whole(1), _OWNERS), (count, _COUNT), (frame, _FRAME)):
        b.write(value, shared, offset)
    failure = b.room(1)
    b.store(NULL, failure)
    _call_helpers(b, frame, shared, count, work, failure)
    b.call(work, [shared, whole(1)])
    b.ret(b.load(failure, typ=PTR))
    return module


def _answer_metadata(b: Builder, extension: ir.Value) -> None:
    """XLA asks once which version of the interface the handler was written for."""
    metadata, version = b.read(PTR, extension, _METADATA), ffi_version()
    for value, offset in zip((*version, 0), (_MAJOR, _MINOR, _TRAITS)):
        b.write(ir.Constant(I32, value), metadata, offset)
    b.ret(NULL)


def _call_helpers(
    b: Builder, frame: ir.Value, shared: ir.Value, count: ir.Value, work: ir.Function, failure: ir.Value
) -> None:
    """Ask the pool for as many threads as there are chunks for, this one not counted; `failure` takes XLA's error."""
    api, context = b.read(PTR, frame, _API), b.read(PTR, frame, _CONTEXT)
    asked, num_threads = b.room(5), b.room(1)
    b.store(whole(1), num_threads)
    for value, offset in ((whole(32), 0), (NULL, 8), (context, 16), (num_threads, 24)):
        b.write(value, asked, offset)
    asking = ir.FunctionType(PTR, [PTR]).as_pointer()
    b.store(b.call(b.read(asking, api, _NUM_THREADS), [asked]), failure)
    alone = _helper(b.module, work)
    for value, offset in ((whole(40), 0), (alone, 24), (shared, 32)):
        b.write(value, asked, offset)
    schedule, owners = b.read(asking, api, _SCHEDULE), b.address(shared, _OWNERS)
    with b.counting(whole(1), b.smaller(b.load(num_threads, typ=I64), count), whole(1)):
        succeeded = b.icmp_unsigned("==", b.load(failure, typ=PTR), NULL)
        with b.if_then(succeeded):
            b.atomic_rmw("add", owners, whole(1), "monotonic")
            error = b.call(schedule, [asked])
            with b.if_then(b.icmp_unsigned("!=", error, NULL)):
                b.atomic_rmw("sub", owners, whole(1), "monotonic")
                b.store(error, failure)


def _helper(module: ir.Module, work: ir.Function) -> ir.Function:
    """What the pool's threads run: the work, without waiting for others."""
    helper = ir.Function(module, ir.FunctionType(VOID, [PTR]), "helper")
    b = Builder(helper.append_basic_block())
    b.call(work, [helper.args[0], whole(0)])
    b.ret_void()
    return helper


def _worker(module: ir.Module, chunk: Callable[[Builder, Frame, ir.Value], None]) -> ir.Function:
    """`work(shared, waits)`: do chunks until none is left; whoever `waits` leaves when all are done."""
    work = ir.Function(module, ir.FunctionType(VOID, [PTR, I64]), "work")
    b, (shared, waits) = Builder(work.append_basic_block()), work.args
    count = b.read(I64, shared, _COUNT)
    take, do, finish, wait, pause, leave = (b.append_basic_block(name) for name in _BLOCKS)
    b.branch(take)
    b.position_at_end(take)
    i = b.atomic_rmw("add", b.address(shared, _NEXT), whole(1), "monotonic")
    b.cbranch(b.icmp_signed("<", i, count), do, finish)
    b.position_at_end(do)
    chunk(b, Frame(b, b.read(PTR, shared, _FRAME)), i)
    b.atomic_rmw("add", b.address(shared, _DONE), whole(1), "release")
    b.branch(take)
    b.position_at_end(finish)
    b.cbranch(b.icmp_signed("!=", waits, whole(0)), wait, leave)
    b.position_at_end(wait)
    done = b.load_atomic(b.address(shared, _DONE), "acquire", 8, typ=I64)
    b.cbranch(b.icmp_signed("<", done, count), pause, leave)
    b.position_at_end(pause)
    b.call(declare(module, "sched_yield", I32), [])
    b.branch(wait)
    b.position_at_end(leave)
    left = b.atomic_rmw("sub", b.address(shared, _OWNERS), whole(1), "acq_rel")
    with b.if_then(b.icmp_signed("==", left, whole(1))):
        b.call(declare(module, "free", VOID, PTR), [shared])
    b.ret_void()
    return work


_BLOCKS = ("take", "do", "finish", "wait", "pause", "leave")

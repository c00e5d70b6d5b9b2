"""Arrays of zeros on a CPU whose memory the system gives where something is first read or written.

XLA writes zeros everywhere, which takes half a second a gigabyte, and all of a KV cache is taken before a token is in
it. Here memory that XLA has allocated is handed back page by page: those of a private mapping come again as zeros. So
it is a program as any other, of one operation that is a foreign function. Python runs that: it happens once a start.

The offsets are those of `xla/ffi/api/c_api.h`, in the versions of `KNOWN_FFI`.
"""

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.llvm.machine import KNOWN_FFI, ffi_version

TARGET = "jaxpaged.zero_pages"
"""What XLA calls it. Programs that are stored have it in them."""

# XLA_FFI_CallFrame: its extensions, the operands, the number of results, and the results
_EXTENSION, _OPERANDS, _NUM_RESULTS, _RESULTS = 8, 72, 96, 112
# XLA_FFI_Metadata_Extension: its metadata, and there the version
_METADATA, _MAJOR, _MINOR = 24, 24, 28
# XLA_FFI_Buffer
_DATA, _RANK, _DIMS = 24, 32, 40


def zeros_on(mesh: Mesh | AbstractMesh) -> Callable[[Sequence[Any]], list[jax.Array]]:
    """What makes arrays of zeros, of given shapes and types, in a traced program for the devices of `mesh`."""
    if not isinstance(mesh, AbstractMesh) and mesh.size == 1 and has_zero_pages(mesh.devices.flat[0].platform):
        return zero_pages
    return lambda shapes: [jnp.zeros(each.shape, each.dtype) for each in shapes]


def zeros_like(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """Zeros for a tree of shapes, in a traced program for the devices of `mesh`."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(zeros_on(mesh)(leaves))


def zero_pages(shapes: Sequence[Any]) -> list[jax.Array]:
    """Zeros of these shapes, in a traced program for one device that `has_zero_pages`. They are one operation, since
    XLA makes one of several that look alike, and copies of it."""
    itemsizes = np.array([each.dtype.itemsize for each in shapes], np.int32)
    return list(jax.ffi.ffi_call(TARGET, [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in shapes])(itemsizes))


@functools.cache
def has_zero_pages(platform: str) -> bool:
    """Whether programs for one device of a platform can have them. If so, XLA knows the function from now on: it must
    before a program is loaded that calls it."""
    if platform != "cpu" or sys.platform != "linux" or ffi_version() not in KNOWN_FFI:
        return False
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="cpu", api_version=1)
    return True


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _handler(frame: int) -> None:
    """What XLA calls, with a frame of operands and results; once for the version of the interface."""
    if extension := _pointer(frame, _EXTENSION):
        metadata, version = _pointer(extension, _METADATA), ffi_version()
        assert version is not None, "it is not registered without one"
        for offset, part in zip((_MAJOR, _MINOR), version):
            ctypes.c_int32.from_address(metadata + offset).value = part
        return
    itemsizes = _pointer(_pointer(_pointer(frame, _OPERANDS), 0), _DATA)
    results = _pointer(frame, _RESULTS)
    for i in range(_number(frame, _NUM_RESULTS)):
        buffer = _pointer(results, 8 * i)
        dims = _pointer(buffer, _DIMS)
        size = math.prod(_number(dims, 8 * axis) for axis in range(_number(buffer, _RANK)))
        clear(_pointer(buffer, _DATA), size * ctypes.c_int32.from_address(itemsizes + 4 * i).value)


def clear(address: int, num_bytes: int) -> None:
    """Make memory of a private mapping zeros, without its pages where they are whole."""
    page, end = mmap.PAGESIZE, address + num_bytes
    first, last = min(-(-address // page) * page, end), max(end // page * page, address)
    whole_pages, advise = (ctypes.c_size_t(first), ctypes.c_size_t(last - first)), ctypes.CDLL(None).madvise
    if first < last and advise(*whole_pages, mmap.MADV_DONTNEED) == 0:
        advise(*whole_pages, mmap.MADV_HUGEPAGE)  # blocks lie anywhere, and every small page costs a look-up
        ctypes.memset(address, 0, first - address)
        ctypes.memset(last, 0, end - last)
    else:  # too small, or pages that are locked
        ctypes.memset(address, 0, num_bytes)


def _pointer(address: int, offset: int) -> int:
    return ctypes.c_size_t.from_address(address + offset).value


def _number(address: int, offset: int) -> int:
    return ctypes.c_int64.from_address(address + offset).value

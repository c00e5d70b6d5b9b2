"""Zeros whose memory is given where it is touched: that they are zeros, and what they take."""

import ctypes
import mmap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpaged.worker.step.zero_pages import clear, has_zero_pages, zeros_on

MIB = 2**20
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not has_zero_pages("cpu"), reason="needs Linux and an interface of XLA that is known")


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]), ("model",))


def resident_bytes():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def dirty_memory():
    """Leave what was freed full of sevens, in large pieces and in small ones."""
    arrays = [jnp.full(size, 7, jnp.int8) for size in (40 * MIB, 40 * MIB, *range(64, 300_000, 7_000))]
    jax.block_until_ready(arrays)


@pytest.mark.parametrize("size", [0, 1, 63, PAGE - 1, PAGE, PAGE + 64, 3 * PAGE + 5, 30 * MIB + 1])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "bool", "float8_e4m3fn"])
def test_they_are_zeros_whatever_the_memory_held(size, dtype):
    dirty_memory()
    shapes = [jax.ShapeDtypeStruct((size,), dtype), jax.ShapeDtypeStruct((2, size), dtype)]
    for array, shape in zip(jax.jit(lambda: zeros_on(mesh_of(1))(shapes))(), shapes, strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert not np.asarray(array).view(np.uint8).any()


def test_memory_is_taken_where_it_is_written_and_arrays_that_look_alike_are_different_ones():
    shape = jax.ShapeDtypeStruct((64 * MIB,), jnp.int8)
    before = resident_bytes()
    one, other = jax.block_until_ready(jax.jit(lambda: zeros_on(mesh_of(1))([shape, shape]))())
    assert resident_bytes() - before < 16 * MIB
    place = one.unsafe_buffer_pointer()
    changed = jax.jit(lambda array: array.at[5].set(1), donate_argnums=0)(one)
    assert changed.unsafe_buffer_pointer() == place  # it can be donated
    assert resident_bytes() - before < 16 * MIB
    assert np.asarray(changed)[:8].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert not np.asarray(other).any()


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (1, 4), (0.5, 3.5), (1.25, 1.75), (1.5, 2.5), (2, 2), (0.5, 1)])
def test_nothing_is_cleared_beside_it(begin, end):
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"\7" * len(memory)
    begin, end = int(begin * PAGE), int(end * PAGE)
    clear(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + begin, end - begin)
    assert memory[:] == b"\7" * begin + bytes(end - begin) + b"\7" * (len(memory) - end)


def test_pages_that_are_locked_are_cleared_too():
    memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(PAGE)) != 0:
        pytest.skip("this process may lock no memory")
    memory[:] = b"\7" * PAGE
    clear(address, PAGE)
    assert memory[:] == bytes(PAGE)


def test_several_devices_and_other_platforms_have_xla_write_them():
    shapes = [jax.ShapeDtypeStruct((8, 3), jnp.float32)]
    text = jax.jit(lambda: zeros_on(mesh_of(2))(shapes)).lower().as_text()
    assert "zero_pages" not in text
    assert not has_zero_pages("gpu")

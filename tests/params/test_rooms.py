"""Memory for parameters: where arrays lie, and that they are apart."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.params.rooms import ALIGNMENT, LARGE_PAGE, REGION_BYTES, Rooms

SHAPES = (((3, 5), np.float32), ((0, 4), np.int8), ((7,), jnp.bfloat16), ((), np.float32), ((LARGE_PAGE, 3), np.int8))


def test_arrays_lie_one_behind_the_other_and_apart_from_each_other():
    rooms = Rooms()
    arrays = [rooms.room(shape, dtype) for shape, dtype in SHAPES]
    assert [(array.shape, array.dtype) for array in arrays] == [(shape, np.dtype(dtype)) for shape, dtype in SHAPES]
    places = [array.ctypes.data for array in arrays if array.size]
    assert places[0] % LARGE_PAGE == 0 and all(place % ALIGNMENT == 0 for place in places)
    for i, array in enumerate(arrays):
        array[...] = i
    assert all((array == i).all() for i, array in enumerate(arrays))
    assert max(places) - min(places) < REGION_BYTES


def test_what_no_region_holds_has_one_of_its_own():
    rooms = Rooms()
    small, large, after = (rooms.room((size,), np.int8) for size in (8, REGION_BYTES + 1, 8))
    assert large.nbytes == REGION_BYTES + 1 and large.ctypes.data % LARGE_PAGE == 0
    assert not any(np.shares_memory(large, other) for other in (small, after))


def test_a_cpu_takes_an_array_for_its_own_and_gives_the_region_back_with_the_last():
    rooms = Rooms()
    host = rooms.room((1000,), np.float32)
    host[:] = 1
    array = jax.device_put(host)
    assert array.unsafe_buffer_pointer() == host.ctypes.data
    region = host
    while isinstance(region.base, np.ndarray):
        region = region.base
    seen = weakref.ref(region)
    del rooms, host, region
    gc.collect()
    assert float(array.sum()) == 1000 and seen() is not None
    array.delete()
    gc.collect()
    assert seen() is None

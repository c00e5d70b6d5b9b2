"""Parameters that can leave the devices and come back: from copies on the host, or from where they were read first,
and the name by which the prefix cache knows them.

On a CPU the device's memory is the host's, so a copy would free nothing: there, parameters are read again, and files
that were read lately are in the system's cache. This module knows neither steps nor files.
"""

import contextlib
import ctypes
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Weights:
    """`load` makes the parameters, any number of times, and compiles nothing but the first time.

    `identify` names what `load` would make. `keeps_copies`: parameters that leave the devices are kept on the host,
    unless they are to be discarded.
    """

    def __init__(self, load: Callable[[], Any], identify: Callable[[], str], keeps_copies: bool):
        self._load, self._identify = load, identify
        self._keeps_copies = keeps_copies
        self._copies: Any = None
        self.version = ""

    def put_aside(self, params: Any, discard: bool) -> None:
        """Free the memory of `params`, whose arrays are deleted. None: they left before."""
        if discard:
            self._copies = None
        elif self._keeps_copies and params is not None:
            self._copies = jax.tree.map(HostCopy, params)
        free(params)

    def bring_back(self) -> Any:
        """The parameters on their devices. Raises what loading raises; then they can still be brought back later."""
        if self._copies is None:
            self.version = self._identify()
            return self._load()
        params = jax.tree.map(HostCopy.to_devices, self._copies)
        self._copies = None
        return params

    def rename(self) -> None:
        """The parameters are others than those that were loaded; nobody knows which."""
        self.version = secrets.token_hex(16)


class WeightsSeen:
    """Which arrays parameters were at one moment, without keeping them alive. Arrays never change."""

    def __init__(self, params: Any):
        self._arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]

    def are(self, params: Any) -> bool:
        """Whether `params` are the same arrays."""
        leaves = jax.tree.leaves(params)
        return len(leaves) == len(self._arrays) and all(ref() is leaf for ref, leaf in zip(self._arrays, leaves))


class HostCopy:
    """One sharded array in host memory: what devices hold alike is kept once."""

    def __init__(self, array: jax.Array):
        self._shape, self._sharding = array.shape, array.sharding
        self._parts = {}
        for shard in array.addressable_shards:
            if str(shard.index) not in self._parts:
                self._parts[str(shard.index)] = np.array(shard.data)  # never a view of the device's memory

    def to_devices(self) -> jax.Array:
        """The array again, with the same sharding."""
        parts = lambda index: self._parts[str(index)]
        return jax.make_array_from_callback(self._shape, self._sharding, parts).block_until_ready()


def free(tree: Any) -> None:
    """Delete all arrays of a pytree now, whoever still refers to them. Those that were deleted before pass."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def return_freed_pages() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc); it keeps it otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

"""How many KV blocks fit into the memory that there is. The arrays that hold them are made in `cache/`."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from jaxpaged.config import CacheConfig
from jaxpaged.distributed.backend import usable_share_of_pool
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.kv_cache_spec import KVCacheConfig, KVCacheGroup, pool_layouts, wanted_blocks

# Where the device reports no memory of its own (CPU), KV blocks take at most this share of the host's memory, unless
# one request needs more.
HOST_MEMORY_SHARE = 0.125
# Of what is free they take no more than this.
FREE_HOST_SHARE = 0.5


@dataclass(frozen=True)
class Demand:
    """What requests may ask of the cache."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


class Division:
    """Memory divided among the pools of a KV cache in proportion to what a request of full length needs of each: so the
    number of blocks of the first pool says how many all others have."""

    def __init__(self, groups: Sequence[KVCacheGroup], demand: Demand, num_shards: int):
        pools = pool_layouts(groups)
        self._groups, self._num_shards, self._demand = tuple(groups), num_shards, demand
        self._needs = wanted_blocks(pools, demand.max_model_len, demand.max_num_batched_tokens, num_shards)
        block_bytes = [pool.block_bytes(num_shards) for pool in pools]
        self.block_bytes = block_bytes[0]
        self._null_bytes = sum(block_bytes)
        self._request_bytes = sum(need * size for need, size in zip(self._needs, block_bytes))

    @property
    def row_bytes(self) -> int:
        """Bytes per device that all layers keep for a request besides its blocks."""
        specs = [(group.spec, len(group.layer_idxs)) for group in self._groups]
        return sum(n * spec.row_bytes // (self._num_shards if spec.is_split else 1) for spec, n in specs)

    @property
    def blocks_per_request(self) -> int:
        """Blocks of the first pool that a request of full length needs."""
        return self._needs[0]

    @property
    def least_bytes(self) -> int:
        """Bytes per device of a cache for one request of full length, and the null blocks."""
        return self._null_bytes + self._request_bytes

    def num_blocks_in(self, num_bytes: int) -> int:
        """Blocks of the first pool, if all pools together take at most so many bytes per device."""
        return max(1 + (num_bytes - self._null_bytes) * self._needs[0] // self._request_bytes, 0)

    def kv_cache(self, num_blocks: int) -> KVCacheConfig:
        """The cache whose first pool has `num_blocks`."""
        first = self._needs[0]
        return KVCacheConfig(tuple(max(1 + (num_blocks - 1) * need // first, 0) for need in self._needs), self._groups)

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes per device of that cache."""
        return self.kv_cache(num_blocks).num_bytes(self._num_shards)


def size_kv_cache(
    cache: CacheConfig, division: Division, demand: Demand, reserved_bytes: int, device: jax.Device
) -> KVCacheConfig:
    """Decide the number of blocks. `reserved_bytes` per device are taken by weights and temporaries.

    Raises CapacityError when not even one request of `max_model_len` fits, and for more blocks than there is memory.
    """
    if cache.num_gpu_blocks_override:
        num_blocks, source = cache.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif cache.kv_cache_memory_bytes:
        num_blocks, source = division.num_blocks_in(cache.kv_cache_memory_bytes), "kv_cache_memory_bytes"
    else:
        free, source = free_bytes(cache.gpu_memory_utilization, reserved_bytes, device, division.least_bytes)
        num_blocks = division.num_blocks_in(free)
        if device.platform == "cpu":
            num_blocks = min(num_blocks, division.blocks_per_request * demand.max_num_seqs + 1)
    if num_blocks < division.blocks_per_request + 1:
        raise CapacityError(
            f"one request of max_model_len = {demand.max_model_len} tokens needs {division.blocks_per_request} KV "
            f"blocks of {division.block_bytes} bytes and one null block, {division.least_bytes} bytes in all, but "
            f"{source} gives {num_blocks}. Lower max_model_len, or "
            f"{f'raise {source}' if source in EXPLICIT else 'give the KV cache more memory'}."
        )
    if source in EXPLICIT:
        check_there_is(division.num_bytes(num_blocks), reserved_bytes, device, source)
    return division.kv_cache(num_blocks)


EXPLICIT = ("num_gpu_blocks_override", "kv_cache_memory_bytes")


def check_there_is(num_bytes: int, reserved_bytes: int, device: jax.Device, source: str) -> None:
    """Raise CapacityError for KV blocks that an option asks for and the device has not. A host would only notice when
    it has to fill them, and end some process or other."""
    stats = device.memory_stats() or {}
    if device.platform == "cpu":
        free = available_host_bytes() - reserved_bytes
    elif "bytes_limit" in stats:
        free = stats["bytes_limit"] - max(reserved_bytes, stats.get("bytes_in_use", 0))
    else:
        return
    if num_bytes > free:
        raise CapacityError(
            f"{source} asks for {num_bytes / 2**30:.2f} GiB of KV blocks, but {max(free, 0) / 2**30:.2f} GiB are free "
            f"beside {reserved_bytes / 2**30:.2f} GiB of weights and temporaries. Lower it, or leave it out."
        )


@contextlib.contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """What XLA says of memory that it cannot have becomes a CapacityError: `what` does not fit, and `remedy`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        words = str(error).splitlines()[0].rstrip(".")
        raise CapacityError(f"there is no memory for the {what}: {words}. {remedy}") from error


def compiled_kv_cache(
    num_blocks: int, cache: CacheConfig, division: Division, reserved_bytes: int, device: jax.Device
) -> KVCacheConfig:
    """The cache of programs that were compiled for `num_blocks`, which still must fit.

    A host's free memory comes and goes, so all of it counts here, and not the share that a new cache may take.
    Raises ConfigError when the options name another number, CapacityError when there is too little memory.
    """
    if cache.num_gpu_blocks_override not in (None, num_blocks):
        raise ConfigError(
            f"bundle is stale: num_gpu_blocks is {num_blocks} there and num_gpu_blocks_override is "
            f"{cache.num_gpu_blocks_override} here. Leave the option out, or compile the bundle again with it."
        )
    if cache.kv_cache_memory_bytes:
        free, source = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        free, source = free_bytes(cache.gpu_memory_utilization, reserved_bytes, device, least=None)
    if division.num_bytes(num_blocks) > free:
        raise CapacityError(
            f"the bundle was compiled for {num_blocks} KV blocks, {division.num_bytes(num_blocks)} bytes in all, but "
            f"{source} gives {free}. Free memory, or compile it again with a lower num_gpu_blocks_override."
        )
    return division.kv_cache(num_blocks)


def free_bytes(utilization: float, reserved_bytes: int, device: jax.Device, least: int | None) -> tuple[int, str]:
    """Bytes of `device` left for KV blocks, and the words that say where the number comes from.

    Of a host's memory that is a share, but `least` if that fits; None: all that is free.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        # What a GPU reports is jax's pool, which is a share of its memory already.
        share = usable_share_of_pool(utilization) if device.platform == "gpu" else utilization
        free = int(limit * share) - max(reserved_bytes, stats.get("bytes_in_use", 0))
        words = f"{share:.3g} of the {limit / 2**30:.1f} GiB that jax has (gpu_memory_utilization {utilization})"
        return max(free, 0), f"{words} after weights"
    if device.platform != "cpu":
        raise ConfigError(
            f"this {device.platform} does not tell how much memory it has, so KV blocks cannot be counted. "
            "Unset XLA_PYTHON_CLIENT_ALLOCATOR if it is set, or set kv_cache_memory_bytes or num_gpu_blocks_override."
        )
    free = max(available_host_bytes() - reserved_bytes, 0)
    if least is None:
        return free, "the free host memory"
    return host_budget(host_bytes(), free, least), "a share of the host's memory"


def host_budget(installed: int, free: int, least: int) -> int:
    """Bytes for KV blocks on a host: a power of two, or `least`, that depends on `free` as little as possible.

    The number of blocks is part of every program's shapes. Would it follow what happens to be free, each start would
    compile anew instead of finding its programs in the compilation cache.
    """
    budget = max(1 << max(int(installed * HOST_MEMORY_SHARE).bit_length() - 1, 0), least)
    while budget > free * FREE_HOST_SHARE:
        budget //= 2
    return budget


def host_bytes() -> int:
    """Memory that the host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_host_bytes() -> int:
    """Memory that the host can still give; what only caches files counts, where the system tells (Linux)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kibibytes) * 1024
    except (OSError, StopIteration):
        return host_bytes()

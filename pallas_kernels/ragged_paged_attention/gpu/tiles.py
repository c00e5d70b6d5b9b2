"""What depends on the kind of GPU: how large tiles are, tuned for a device and shape or by default.

This module knows nothing of what the kernels do with the sizes.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.gpu.items import Sizes
from pallas_kernels.shapes import ceil_div

TUNED = Path(__file__).with_name("tuned.json")
INTERPRETER = "interpreter"
# Streaming multiprocessors of the devices that are known, by the beginning of their names.
NUM_CORES = {
    "NVIDIA A100": 108,
    "NVIDIA H100": 132,
    "NVIDIA H200": 132,
    "NVIDIA GH200": 132,
    "NVIDIA B200": 148,
    "NVIDIA L4": 58,
    "NVIDIA L40": 142,
    "NVIDIA A10": 72,
    INTERPRETER: 1,
}
LIKELY_NUM_CORES = 132
# Devices of compute capability 8.9 and more convert float8_e4m3fn, those before do not.
READS_FLOAT8 = (
    "NVIDIA H100",
    "NVIDIA H200",
    "NVIDIA GH200",
    "NVIDIA H800",
    "NVIDIA H20",
    "NVIDIA B200",
    "NVIDIA GB200",
    "NVIDIA L4",
    "NVIDIA RTX 6000 Ada",
    "NVIDIA GeForce RTX 40",
    "NVIDIA GeForce RTX 50",
)
HOPPER = ("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200", "NVIDIA H800", "NVIDIA H20")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one class of work.

    rows: of a query tile, unless one token's heads are more. slots: of one iteration. per_core: programs that fill
    a core. min_slots: the shortest part of a context worth a program. warps, stages: Triton's.
    """

    rows: int
    slots: int
    per_core: int
    min_slots: int
    warps: int
    stages: int

    def rows_for(self, group_size: int) -> int:
        """Rows of a query tile: a power of two that holds at least one token."""
        return max(self.rows, 1 << (group_size - 1).bit_length())

    def queries(self, group_size: int) -> int:
        """Tokens of a query tile."""
        return self.rows_for(group_size) // group_size

    def sizes(self, group_size: int, num_kv_heads: int, kind: str) -> Sizes:
        """How work is cut for a device of this kind, which runs every item for each kv head."""
        programs = ceil_div(self.per_core * num_cores(kind), num_kv_heads)
        return Sizes(self.queries(group_size), self.slots, programs, self.min_slots)


def choose_tiles(work: str, group_size: int, head_dim: int, dtype: Any, kind: str) -> Tiles:
    """What was tuned for "decode" or "prefill" on a device of this kind, or else the defaults."""
    entry = tuned().get(tuned_key(work, group_size, head_dim, dtype, kind))
    return entry or default_tiles(work, head_dim, dtype, kind)


def default_tiles(work: str, head_dim: int, dtype: Any, kind: str) -> Tiles:
    """Sizes that compile without spills, and were fast on an H200 (27 November 2026).

    Decodes: 32 KiB of keys and values an iteration in two stages let four programs fit a core, so that 64 rows of 8 kv
    heads run at once. Prompts: 128 slots need the shared memory of Hopper, and scale outputs half as often.
    """
    if kind == INTERPRETER:
        return Tiles(rows=16, slots=32, per_core=6, min_slots=64, warps=4, stages=1)
    if jnp.dtype(dtype).itemsize > 2 and head_dim > 128:
        return Tiles(rows=16, slots=16, per_core=2, min_slots=256, warps=8, stages=1)
    if head_dim > 256:
        return Tiles(rows=16 if work == "decode" else 32, slots=32, per_core=2, min_slots=256, warps=8, stages=2)
    if jnp.dtype(dtype).itemsize > 2:
        return Tiles(rows=16 if work == "decode" else 32, slots=32, per_core=2, min_slots=256, warps=8, stages=2)
    slots = 64 if head_dim <= 128 else 32
    if work == "decode" and jnp.dtype(dtype).itemsize == 2 and head_dim <= 128:
        return Tiles(rows=16, slots=64 if head_dim > 64 else 128, per_core=4, min_slots=256, warps=4, stages=2)
    if work == "decode" and jnp.dtype(dtype).itemsize == 1 and head_dim <= 128 and reads_float8(kind):
        return Tiles(rows=16, slots=128, per_core=3, min_slots=256, warps=4, stages=2)
    if work == "decode":
        return Tiles(rows=16, slots=slots, per_core=4, min_slots=256, warps=4, stages=3)
    if jnp.dtype(dtype).itemsize == 1 and not reads_float8(kind):  # what is converted takes registers
        return Tiles(rows=64, slots=32, per_core=2, min_slots=1024, warps=8 if head_dim > 128 else 4, stages=2)
    if kind.startswith(HOPPER) and jnp.dtype(dtype).itemsize == 2 and 64 < head_dim <= 128:
        slots = 128
    return Tiles(rows=128, slots=slots, per_core=2, min_slots=1024, warps=8, stages=3)


def tuned_key(work: str, group_size: int, head_dim: int, dtype: Any, kind: str) -> str:
    """The name under which a choice is kept: shapes that share a kernel share an entry."""
    return f"{kind}, {work}, {jnp.dtype(dtype).name}, head_dim {head_dim}, group {group_size}"


@functools.cache
def tuned() -> dict[str, Tiles]:
    """Every entry of tuned.json, which scripts/tune_kernel.py writes."""
    return read_tuned(TUNED, Tiles)


def read_tuned[T](file: Path, tiles: Callable[..., T]) -> dict[str, T]:
    """Name -> `tiles` of each entry of such a file; none where there is no file."""
    entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {key: tiles(**entry["tiles"]) for key, entry in entries.items()}


def num_cores(kind: str) -> int:
    """Streaming multiprocessors of a device of this kind, or a likely number."""
    known = [name for name in NUM_CORES if kind.startswith(name)]
    return NUM_CORES[max(known, key=len)] if known else LIKELY_NUM_CORES


def reads_float8(kind: str) -> bool:
    """Whether a device of this kind is known to convert float8_e4m3fn; the others can be helped (`as_operand`)."""
    return kind.startswith(READS_FLOAT8)


def device_kind(interpret: bool) -> str:
    """The kind of device that the program being traced is for."""
    if interpret:
        return INTERPRETER
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if described is None else described.device_kind

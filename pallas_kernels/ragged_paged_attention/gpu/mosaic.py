"""When prompts are attended to by the kernel in Mosaic GPU, and with which tiles; imports nothing of Mosaic.

Triton's kernel takes every layer. This one takes those with an entry in tuned_mosaic.json, for which it was timed and
is faster, as far as it can take them. This module knows nothing of how either works.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.gpu.statics import LayerRule
from pallas_kernels.ragged_paged_attention.gpu.tiles import HOPPER, INTERPRETER, Tiles, read_tuned, tuned_key

ROWS = 64  # of a warp group: those of one product
TUNED = Path(__file__).with_name("tuned_mosaic.json")
TYPES = tuple(jnp.dtype(x) for x in ("bfloat16", "float16"))
HEAD_DIMS = (64, 128)
LEAST_BLOCK = 8  # rows that lie together in shared memory


@dataclasses.dataclass(frozen=True)
class MosaicTiles(Tiles):
    """Sizes of prompts' tiles. `rows` are of two warp groups, whose tokens are whole; a third one fetches, so `warps`
    are always 12. stages: iterations whose keys and values lie in shared memory. takes_turns: whether the two groups
    take turns with the tensor cores. least_tokens: of a step, padding included, as far as it was timed."""

    takes_turns: bool = True
    least_tokens: int = 0

    def queries(self, group_size: int) -> int:
        """Tokens of a query tile: as many as fit, for each of the two."""
        return 2 * (ROWS // group_size)


def choose_mosaic_tiles(group_size: int, head_dim: int, dtype: Any, kind: str) -> MosaicTiles | None:
    """What was timed for prompts on a device of this kind and was ahead of Triton's kernel, or None."""
    return tuned().get(tuned_key("prefill", group_size, head_dim, dtype, kind))


@functools.cache
def tuned() -> dict[str, MosaicTiles]:
    """Every entry of tuned_mosaic.json; without that file Triton's kernel takes all."""
    return read_tuned(TUNED, MosaicTiles)


def default_mosaic_tiles(head_dim: int) -> MosaicTiles:
    """Sizes that compile without spills in the loop, for a tuner to begin with."""
    return MosaicTiles(rows=2 * ROWS, slots=128, per_core=1, min_slots=1024, warps=12, stages=2 if head_dim > 64 else 4)


def cannot_take(
    tiles: MosaicTiles,
    rule: LayerRule,
    *,
    num_tokens: int,
    group_size: int,
    head_dim: int,
    block_size: int,
    q_dtype: Any,
    kv_dtype: Any,
    shares: bool,
    kind: str,
) -> str | None:
    """Why Mosaic's kernel cannot attend for such a layer, or None. `shares`: spans that rows share come before."""
    if not kind.startswith((*HOPPER, INTERPRETER)):
        return f"the device is {kind}; accepted are those of Hopper"
    if num_tokens < tiles.least_tokens:
        return f"a step of {num_tokens} tokens; accepted are {tiles.least_tokens} and more"
    if kv_dtype not in TYPES or q_dtype != kv_dtype:
        return f"q is {q_dtype} and the cache {kv_dtype}; accepted are {', '.join(map(str, TYPES))}, the same of both"
    if head_dim not in HEAD_DIMS:
        return f"head_dim = {head_dim}; accepted are {', '.join(map(str, HEAD_DIMS))}"
    if group_size > ROWS:
        return f"{group_size} query heads per kv head; accepted are at most {ROWS}"
    if block_size % LEAST_BLOCK or max(block_size, tiles.slots) % min(block_size, tiles.slots):
        return (
            f"block_size = {block_size}; accepted are multiples of {LEAST_BLOCK} that divide {tiles.slots}, or reverse"
        )
    if shares:
        return "spans that rows share come before"
    return "tokens see what stands behind them" if rule.sees_ahead else None

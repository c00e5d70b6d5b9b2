"""Attention of a tower: every patch sees all patches of its segment, which is a picture, or a window of one.

Scores are computed for a tile of queries at a time: those of all 4,096 patches of a picture would be 1 GB in float32.
Where segments are short and lie together, only keys near a tile are read. On a TPU JAX's own kernel keeps the scores of
long segments within the core.

Letters: P patches, Q patches of a tile of queries, S patches whose keys it reads, N heads of the tower, H numbers of a
head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxpaged.params.sharding import MODEL_AXES

PADDING = -1
"""The segment of patches that only pad a batch. They see each other."""
NOWHERE = -2
"""The segment of keys that only fill a tile up."""
SCORES = 2**25
"""The most scores that are there at once: 128 MB in float32."""
FLASH_QUERIES, FLASH_KEYS = 512, 1024
"""Patches in a block of the TPU's kernel."""


def attend_patches(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    segment_P: jax.Array | None,
    scale: float,
    *,
    longest: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """[P, N, H]: of each patch the mean of values of its segment, weighed by softmax(scale * q . k) in float32.

    `segment_P`: int32; None: there is one segment. `longest`: no segment has more patches, and those of a segment are
    neighbours. `mesh`: the queries, in order, are split over its devices, each of which has all keys.
    """
    if segment_P is None:
        segment_P = jnp.zeros(len(q_PNH), jnp.int32)
    attend = partial(attend_part, scale=scale, longest=longest)
    if mesh is None or len(q_PNH) % mesh.size:
        return attend(q_PNH, segment_P, 0, k_PNH, v_PNH, segment_P)
    split, whole = PartitionSpec(MODEL_AXES), PartitionSpec()

    def on_device(q_PNH, segment_of_query_P, k_PNH, v_PNH, segment_P):
        first = jax.lax.axis_index(MODEL_AXES) * len(q_PNH)
        return attend(q_PNH, segment_of_query_P, first, k_PNH, v_PNH, segment_P)

    in_specs = (split, split, whole, whole, whole)
    everywhere = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False)
    return everywhere(q_PNH, segment_P, k_PNH, v_PNH, segment_P)


def attend_part(
    q_PNH: jax.Array,
    segment_of_query_P: jax.Array,
    first: jax.Array | int,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    segment_P: jax.Array,
    *,
    scale: float,
    longest: int | None,
) -> jax.Array:
    """The same of some queries, of which the first is number `first`, with all keys."""
    plain = partial(attend_in_tiles, first=first, scale=scale, longest=longest)
    operands = q_PNH, k_PNH, v_PNH, segment_of_query_P, segment_P
    is_long = longest is None and len(q_PNH) % FLASH_QUERIES == 0 and len(k_PNH) % FLASH_KEYS == 0
    if not is_long or q_PNH.dtype != jnp.bfloat16:
        return plain(*operands)
    return jax.lax.platform_dependent(*operands, tpu=partial(attend_flash, scale=scale), default=plain)


def attend_flash(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    segment_of_query_P: jax.Array,
    segment_P: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """The same by JAX's kernel for TPUs, of whole blocks of queries and of keys."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    by_head = (x_PNH.swapaxes(0, 1)[None] for x_PNH in (q_PNH, k_PNH, v_PNH))
    segments = flash.SegmentIds(segment_of_query_P[None], segment_P[None])
    blocks = flash.BlockSizes(block_q=FLASH_QUERIES, block_k_major=FLASH_KEYS, block_k=FLASH_KEYS // 2, block_b=1)
    out_1NPH = flash.flash_attention(*by_head, segment_ids=segments, sm_scale=scale, block_sizes=blocks)
    return out_1NPH[0].swapaxes(0, 1)


def attend_in_tiles(
    q_PNH: jax.Array,
    k_PNH: jax.Array,
    v_PNH: jax.Array,
    segment_of_query_P: jax.Array,
    segment_P: jax.Array,
    *,
    first: jax.Array | int,
    scale: float,
    longest: int | None,
) -> jax.Array:
    """The same by XLA, tile by tile."""
    num_queries, num_heads, _ = q_PNH.shape
    tile = tile_size(num_queries, num_heads, len(k_PNH), longest)
    reach = None if longest is None or tile + 2 * longest >= len(k_PNH) else longest
    padded = -num_queries % tile
    q_PNH = jnp.pad(q_PNH, ((0, padded), (0, 0), (0, 0)))
    segment_of_query_P = jnp.pad(segment_of_query_P, (0, padded), constant_values=PADDING)
    if reach is not None:
        # Key i of the whole is number i + reach; a part of the queries may end behind the last key.
        k_PNH, v_PNH = (jnp.pad(x, ((reach, reach + padded), (0, 0), (0, 0))) for x in (k_PNH, v_PNH))
        segment_P = jnp.pad(segment_P, (reach, reach + padded), constant_values=NOWHERE)

    def of_tile(number: jax.Array | int) -> jax.Array:
        queries = partial(jax.lax.dynamic_slice_in_dim, start_index=number * tile, slice_size=tile)
        keys = lambda x: x
        if reach is not None:
            keys = partial(jax.lax.dynamic_slice_in_dim, start_index=first + number * tile, slice_size=tile + 2 * reach)
        is_seen_QS = queries(segment_of_query_P)[:, None] == keys(segment_P)[None, :]
        return attend_tile(queries(q_PNH), keys(k_PNH), keys(v_PNH), is_seen_QS, scale)

    num_tiles = len(q_PNH) // tile
    if num_tiles == 1:
        return of_tile(0)[:num_queries]
    return jax.lax.map(of_tile, jnp.arange(num_tiles)).reshape(q_PNH.shape)[:num_queries]


def tile_size(num_queries: int, num_heads: int, num_keys: int, longest: int | None) -> int:
    """How many queries a tile has: a power of two, or all of them."""
    if longest is not None:
        size = max(64, 1 << (longest - 1).bit_length())
    else:
        size = max(64, 1 << (SCORES // (num_heads * num_keys)).bit_length() >> 1)
    return min(size, num_queries)


def attend_tile(q_QNH: jax.Array, k_SNH: jax.Array, v_SNH: jax.Array, is_seen_QS: jax.Array, scale: float) -> jax.Array:
    """[Q, N, H] of queries with some keys, of which each query sees one at least, or gives anything finite."""
    precision = jax.lax.Precision.HIGHEST if q_QNH.dtype == jnp.float32 else None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scores_NQS = product("QNH,SNH->NQS", q_QNH, k_SNH) * scale
    scores_NQS = jnp.where(is_seen_QS, scores_NQS, jnp.finfo(jnp.float32).min)
    weights_NQS = jax.nn.softmax(scores_NQS, axis=-1).astype(v_SNH.dtype)
    return product("NQS,SNH->QNH", weights_NQS, v_SNH).astype(q_QNH.dtype)

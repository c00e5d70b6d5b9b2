"""The programs that copy blocks out of the KV cache and into it, in the form that pages have.

What leaves the device is `[blocks, layers, 2, tokens, KV heads, head dim]` (1 in place of 2 for latents), whatever the
layout of the attention backend, with each head of the model once, however many devices have it, and whole on every
device, in the form that pages have (`forms.py`). Block ids outside of the pool are padding.

Letters: P blocks of a copy, L layers, S slots of a block.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, LatentSpec, PoolLayout, StateSpec
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.kv_transfer.forms import PageForm
from pallas_kernels import kv_copy
from pallas_kernels.ragged_paged_attention import KVTensor, kv_layout

GATHER, SCATTER = "kv_gather", "kv_scatter"
MOST_BYTES, MOST_BLOCKS = 32 << 20, 64
"""What one copy moves at most: smaller ones are as fast, and take less memory."""
NOWHERE = -1
"""The id of padding."""


def copy_key(kind: str, pool_idx: int, size: int) -> ProgramKey:
    return ProgramKey(f"{kind}_{pool_idx}" if pool_idx else kind, size)


def copy_sizes(pool: PoolLayout) -> tuple[int, ...]:
    """Numbers of blocks that get a program: one for the end of an answer, one for a prompt."""
    largest = min(max(MOST_BYTES // (pool.num_tensors * page_bytes(pool.storage)), 1), MOST_BLOCKS)
    return tuple(sorted({max(largest // 8, 1), largest}))


def page_shape(spec: Any) -> tuple[int, ...]:
    """Of one layer of a page. Latents keep what a kernel adds to them: another layout is another namespace."""
    if isinstance(spec, LatentSpec):
        return 1, spec.block_size, 1, spec.stored_width or spec.width
    assert isinstance(spec, AttentionSpec), f"{spec} holds neither keys and values nor latents"
    return 2, spec.block_size, spec.num_model_heads, spec.head_dim


def page_bytes(spec: Any) -> int:
    """Of one layer of a page, as it is cached."""
    return int(np.prod(page_shape(spec))) * spec.dtype_bytes


def token_bytes(kv_cache: KVCacheConfig, form: PageForm) -> float:
    """Of a token in all layers, as pages have them; 0 where there are recurrent states, which have no pages."""
    specs = [(group.spec, len(group.layer_idxs)) for group in kv_cache.groups]
    if any(isinstance(spec, StateSpec) for spec, _ in specs):
        return 0.0
    return sum(num_layers * form.num_bytes(page_shape(spec)) / spec.block_size for spec, num_layers in specs)


def first_tensor(kv_cache: KVCacheConfig, pool_idx: int) -> int:
    """The index of a pool's first KV tensor."""
    return sum(pool.num_tensors for pool in kv_cache.pools[:pool_idx])


def copy_builders(
    kv_cache: KVCacheConfig, kv: list[Any], backend: str, replicated: Any, form: PageForm
) -> dict[ProgramKey, Any]:
    """How to lower the copies of every pool. `kv` are the shapes of the KV tensors."""
    builders = {}
    for pool_idx, pool in enumerate(kv_cache.pools):
        first = first_tensor(kv_cache, pool_idx)
        tensors = kv[first : first + pool.num_tensors]
        for size in copy_sizes(pool):
            args = tensors, pool.storage, backend, replicated, size, form
            builders[copy_key(GATHER, pool_idx, size)] = partial(lower_gather, *args)
            builders[copy_key(SCATTER, pool_idx, size)] = partial(lower_scatter, *args)
    return builders


def lower_gather(
    tensors: list[Any], spec: Any, backend: str, replicated: Any, size: int, form: PageForm
) -> jax.stages.Lowered:
    def kv_gather(tensors, id_P):
        return form.leaving(jnp.stack([pages_of(tensor, id_P, spec, backend) for tensor in tensors], axis=1))

    ids = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=replicated)
    return jax.jit(kv_gather, out_shardings=replicated).lower(tensors, ids)


def lower_scatter(
    tensors: list[Any], spec: Any, backend: str, replicated: Any, size: int, form: PageForm
) -> jax.stages.Lowered:
    def kv_scatter(tensors, id_P, pages):
        layers = [form.coming([array[:, i] for array in pages]) for i in range(len(tensors))]
        return [with_pages(tensor, id_P, values, spec, backend) for tensor, values in zip(tensors, layers)]

    shardings = jax.tree.map(lambda leaf: leaf.sharding, tensors)
    ids = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=replicated)
    whole = (size, len(tensors), *page_shape(spec))
    pages = tuple(jax.ShapeDtypeStruct(*each, sharding=replicated) for each in form.layout(whole))
    return jax.jit(kv_scatter, donate_argnums=(0,), out_shardings=shardings).lower(tensors, ids, pages)


def pages_of(tensor: Any, id_P: Any, spec: Any, backend: str) -> Any:
    """Blocks of one layer as in a page."""
    if not isinstance(tensor, KVTensor):
        (blocks,) = kv_copy.gather_blocks((tensor,), id_P)
        return blocks[:, None, :, None, :]
    blocks = kv_copy.gather_blocks(tensor.arrays, id_P)
    return jnp.stack(kv_layout(backend).unpack(blocks, spec.head_dim), axis=1)[..., :: spec.head_copies, :]


def with_pages(tensor: Any, id_P: Any, pages: Any, spec: Any, backend: str) -> Any:
    """One layer with blocks replaced."""
    if not isinstance(tensor, KVTensor):
        return kv_copy.scatter_blocks((tensor,), id_P, (pages[:, 0, :, 0, :],))[0]
    pages = jnp.repeat(pages, spec.head_copies, axis=-2)
    blocks = kv_layout(backend).pack(pages[:, 0], pages[:, 1])
    return KVTensor(kv_copy.scatter_blocks(tensor.arrays, id_P, blocks), tensor.scales)

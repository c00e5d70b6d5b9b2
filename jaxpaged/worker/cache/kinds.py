"""The kinds of caches that layers have, each a module of this package, by the spec that describes it.

The KV cache is a list of KV tensors, those of one pool after those of the other; the i-th layers of all groups of a
pool share its tensor i. Nothing here knows which block belongs to whom.

Letters: P blocks of a copy.
"""

from functools import partial
from typing import Any, Protocol

import jax

from jaxpaged.kv_cache_spec import AttentionSpec, CacheSpec, LatentSpec, StateSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext
from jaxpaged.layers.ranks import on_all_ranks
from jaxpaged.layers.state import StateBatch
from jaxpaged.worker.cache import attention, latent, state
from jaxpaged.worker.step.packed import StepParts


class CacheKind(Protocol):
    """What a module of this package has for the specs of its kind."""

    def as_stored(self, spec: Any, backend: str) -> Any:
        """The spec, with as many numbers as lie in memory for a token."""

    def check_heads(self, context: AttentionContext, num_heads: int, spec: Any, dtype: Any, kv_dtype: Any) -> None:
        """Raise ValueError unless the kernel takes the query heads of a layer that attends to such a cache."""

    def tensor_of_rank(
        self, context: AttentionContext, spec: Any, num_blocks: int, dtype: Any, num_rows: int, num_layers: int
    ) -> Any:
        """Shapes and shardings of one KV tensor of one attention rank, which has so many rows for requests. As many
        layers share it."""

    def step_batch(
        self,
        context: AttentionContext,
        spec: Any,
        parts: StepParts,
        tables_RM: Any,
        *,
        num_tokens: int,
        decodes_only: bool,
        shared_6R: jax.Array | None,
        visible_end_T: jax.Array | None,
    ) -> AttentionBatch | StateBatch:
        """What a step tells the layers of a group; `ragged_paged_attention.make_metadata` says what that is."""

    def gather(self, tensor: Any, id_P: Any, spec: Any, backend: str) -> tuple[Any, ...]:
        """Blocks of one layer, in the form of `spec.page_shape`, and their scales where each token has some."""

    def scatter(self, tensor: Any, id_P: Any, pages: tuple[Any, ...], spec: Any, backend: str) -> Any:
        """One layer with blocks replaced by what has that form."""


KINDS: dict[type, CacheKind] = {AttentionSpec: attention, LatentSpec: latent, StateSpec: state}


def kind_of(spec: CacheSpec) -> CacheKind:
    return KINDS[type(spec)]


def tensor_struct(
    context: AttentionContext, spec: CacheSpec, num_blocks: int, dtype: Any, *, num_rows: int = 0, num_layers: int = 1
) -> Any:
    """Shapes and shardings of one KV tensor, of all attention ranks together. `dtype` is that of cached keys and
    values whose layers have no other; states have their own, and `num_rows` of them besides blocks. `num_layers` share
    the tensor."""
    own = context.of_cache(spec.context_shards)
    tensor = kind_of(spec).tensor_of_rank(own, spec, num_blocks, dtype, num_rows, num_layers)
    return jax.tree.map(partial(on_all_ranks, context.mesh), tensor)

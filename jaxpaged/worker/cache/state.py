"""Recurrent states: blocks are snapshots of them. A module of `kinds.CacheKind`.

Letters: P blocks of a copy.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.kv_cache_spec import StateSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.worker.step.packed import StepParts


def as_stored(spec: StateSpec, backend: str) -> StateSpec:
    return spec


def check_heads(context: AttentionContext, num_heads: int, spec: StateSpec, dtype: Any, kv_dtype: Any) -> None:
    raise AssertionError("nothing attends to a state")


def tensor_of_rank(context: AttentionContext, spec: StateSpec, num_blocks: int, dtype: Any) -> Any:
    split = NamedSharding(context.mesh, PartitionSpec(None, MODEL_AXES))
    return [jax.ShapeDtypeStruct((num_blocks, *each.shape), each.dtype, sharding=split) for each in spec.arrays]


def step_batch(
    context: AttentionContext, spec: StateSpec, parts: StepParts, tables_RM: Any, **settings: Any
) -> AttentionBatch:
    raise AssertionError("no model has states yet")


def gather(tensor: Any, id_P: Any, spec: StateSpec, backend: str) -> Any:
    raise AssertionError("a state has no pages")


def scatter(tensor: Any, id_P: Any, values: Any, spec: StateSpec, backend: str) -> Any:
    raise AssertionError("a state has no pages")

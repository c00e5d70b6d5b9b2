"""Scales of keys and values for each layer and kv head: what is known of them, and how they get to the devices.

They are data beside the KV cache, which every step only reads, so no program depends on them. Layers that share a KV
tensor have a row each. This module does not know where scales are found.

Letters: K kv heads of the model, G layers that share a KV tensor.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxpaged.config.cache_types import LARGEST, CacheType
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import CacheSpec, KVCacheConfig
from jaxpaged.params.kv_scales import LayerScales, rescaled
from pallas_kernels.ragged_paged_attention import KVTensor

logger = logging.getLogger(__name__)


SATURATES = (
    "kv_cache_dtype is %s, and no scales of keys and values are known: numbers beyond %g become %g. Give "
    "kv_cache_dtype fp8_per_token_head or int8_per_token_head, which need none."
)


@dataclass(frozen=True)
class HeadScales:
    """`of_layers`: layer -> (k_K, v_K), float32, one number where all heads have the same; 1 where a layer has none."""

    of_layers: Mapping[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, found: LayerScales, made_for: str, cache_type: CacheType) -> "HeadScales":
        """Those that were found for numbers of type `made_for`, for those that are cached; none where all are 1. Raises
        ConfigError for a type that is none of 8 bits."""
        if made_for not in LARGEST:
            raise ConfigError(f"scales were found for {made_for!r:.40}; accepted are {', '.join(sorted(LARGEST))}.")
        return cls(rescaled(found, LARGEST[made_for], cache_type.largest) if cls(found).identity else {})

    @property
    def identity(self) -> str:
        """Names the numbers; empty where all are 1."""
        told = {i: pair for i, pair in sorted(self.of_layers.items()) if any((each != 1).any() for each in pair)}
        if not told:
            return ""
        digest = hashlib.sha256()
        for i, pair in told.items():
            digest.update(f"{i} {[each.astype('<f4').tobytes().hex() for each in pair]}\n".encode())
        return digest.hexdigest()[:32]

    def check(self, name: str, cache_type: CacheType, layers: Collection[int]) -> None:
        """Raise ConfigError where `layers`, which are cached as the type called `name` says, need scales and have none;
        warn where numbers are cut off without."""
        missing = sorted({*layers} - self.of_layers.keys())
        if not missing or cache_type.scales != "head":
            return
        if cache_type.dtype == "int8":
            raise ConfigError(
                f"kv_cache_dtype is {name!r}, but the scales of {len(missing)} layers are not known (first: "
                f"{missing[0]}). Find them (jaxpaged calibrate) and name their file as kv_cache_scales, or give "
                "int8_per_token_head, which needs none."
            )
        logger.warning(SATURATES, name, cache_type.largest, cache_type.largest)

    def rows(self, layer: int | None, spec: Any) -> list[np.ndarray]:
        """Of keys and of values of a layer, a number for each of the heads that the devices have of the model's; None:
        no layer."""
        one = np.ones((), np.float32)
        pair = (one, one) if layer is None else self.of_layers.get(layer, (one, one))
        return [np.repeat(np.broadcast_to(each, spec.num_model_heads), spec.head_copies) for each in pair]


def with_scales(kv: Sequence[Any], kv_cache: KVCacheConfig, scales: HeadScales, first_layer: int = 0) -> list[Any]:
    """The KV tensors of an engine, or of the stage of it whose layers begin with `first_layer`, with scales in those
    that have some for each head."""
    tensors, i = list(kv), 0
    for pool in kv_cache.pools:
        for place in range(pool.num_tensors):
            if pool.storage.scales == "head":
                layers = [group.layer_idxs[place : place + 1] for group in pool.groups]
                numbers = [first_layer + each[0] if each else None for each in layers]
                tensors[i] = filled(tensors[i], pool.storage, scales, numbers)
            i += 1
    return tensors


def filled(tensor: KVTensor, spec: CacheSpec, scales: HeadScales, layers: Sequence[int | None]) -> KVTensor:
    """One of them, of these layers. Each attention rank has the same."""
    rows = [scales.rows(layer, spec) for layer in layers]

    def placed(array: Any, which: int) -> jax.Array:
        of_rank = np.stack([pair[which] for pair in rows]).astype(np.float32)
        whole = np.tile(of_rank, (array.shape[0] // len(rows), 1))
        return jax.make_array_from_callback(array.shape, array.sharding, lambda index: whole[index])

    return KVTensor(tensor.arrays, tuple(placed(array, which) for which, array in enumerate(tensor.scales)))

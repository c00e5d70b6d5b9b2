"""The largest keys and values that a model makes of some text, for each layer and kv head.

One request at a time is computed in chunks, with a KV tensor for each layer, none of whose blocks is ever given back:
what lies there afterwards are all keys and values, as they are cached. This module does not know what is made of them.

Letters: C tokens of a chunk, P blocks that are read, S slots of a block, K kv heads of the model, H head dim.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.kv_cache_spec import CacheSpec, blocks_for_tokens
from jaxpaged.models.interface import Batch
from jaxpaged.worker.cache.kinds import kind_of, tensor_struct
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.step.packed import StepParts

CHUNK = 512


class Calibration:
    """Of the model of `engine_spec`, whose cache has the model's type, on sequences of `most` tokens at most."""

    def __init__(self, engine_spec: EngineSpec, params: Any, most: int):
        self._engine_spec, self._params = engine_spec, params
        backend = engine_spec.attention.backend
        self.specs: list[CacheSpec] = [kind_of(spec).as_stored(spec, backend) for spec in engine_spec.cache_specs]
        self._groups = list(dict.fromkeys(self.specs))
        self._chunk = min(CHUNK, most)
        whole = blocks_for_tokens(-(-most // self._chunk) * self._chunk, min(spec.block_size for spec in self.specs))
        self._table = np.arange(1, whole + 1, dtype=np.int32)
        place = lambda spec: tensor_struct(engine_spec.attention, spec, whole + 1, engine_spec.kv_dtype, num_rows=2)
        structs = [place(spec) for spec in self.specs]
        shardings = jax.tree.map(lambda struct: struct.sharding, structs)
        zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs), out_shardings=shardings)
        self._kv = zeros()
        self._step = jax.jit(self._forward, donate_argnums=3, out_shardings=shardings)

    @property
    def layers(self) -> list[int]:
        """That have keys and values."""
        return [i for i, spec in enumerate(self.specs) if spec.page_heads is not None]

    def largest(self, sequences: Iterable[Sequence[int]]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Layer -> the largest absolute numbers (k_K, v_K) in all sequences."""
        found: dict[int, np.ndarray] = {}
        for tokens in sequences:
            for start in range(0, len(tokens), self._chunk):
                chunk = np.zeros(self._chunk, np.int32)
                part = tokens[start : start + self._chunk]
                chunk[: len(part)] = part
                self._kv = self._step(self._params, chunk, np.array([start, len(part)], np.int32), self._kv)
            for layer, values_2K in zip(self.layers, self._largest_here(self._kv)):
                found[layer] = np.maximum(found.get(layer, 0.0), np.asarray(values_2K))
        return {layer: (values[0], values[1]) for layer, values in found.items()}

    @cached_property
    def _largest_here(self) -> Any:
        ids, backend = self._table, self._engine_spec.attention.backend

        def largest(kv: Any) -> list[jax.Array]:
            cached = [kind_of(self.specs[i]).gather(kv[i], ids, self.specs[i], backend)[0] for i in self.layers]
            return [jnp.max(jnp.abs(x_P2SKH.astype(jnp.float32)), axis=(0, 2, 4)) for x_P2SKH in cached]

        return jax.jit(largest)

    def _forward(self, params: Any, tokens_C: Any, where_2: Any, kv: Any) -> Any:
        """The KV tensors with a chunk, of so many tokens behind so many."""
        batch = self.batch(tokens_C, where_2)
        return self._engine_spec.model.forward(params, self._engine_spec.decoder, batch, kv).kv

    def batch(self, tokens_C: Any, where_2: Any) -> Batch:
        """What a model is asked of a chunk."""
        start, length = where_2
        tables = jnp.stack([self._table, np.zeros_like(self._table)])
        parts = StepParts(
            jnp.array([1]),
            jnp.arange(2),
            jnp.stack([0, length, length]),
            jnp.stack([start + length, 0]),
            tokens_C,
            *[None] * 8,
        )
        settings = {"num_tokens": self._chunk, "decodes_only": False, "shared_6R": None, "visible_end_T": None}
        context = self._engine_spec.attention
        attention = [kind_of(spec).step_batch(context, spec, parts, tables, **settings) for spec in self._groups]
        caches = tuple((self._groups.index(spec), i) for i, spec in enumerate(self.specs))
        return Batch(tokens_C, start + jnp.arange(self._chunk), tuple(attention), caches)

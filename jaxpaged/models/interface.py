"""What a model module gives to the rest: a `Model`, a record of pure functions.

    model = registry.model_for(hf)                        # hf: the raw config.json as a dict
    config = model.config_from_hf(hf)
    specs = model.param_specs(config, num_model_shards)   # pytree of Spec
    params = load_params(specs, config, folder, mesh, dtype)
    hidden_TD, kv = model.forward(params, config, context, places, tokens_T, positions_T, metadata, kv)
    logits_SV = model.compute_logits(model.head(params), config, hidden_TD[rows_that_sample])

Before use, `config = dataclasses.replace(config, max_model_len=...)` with the engine's limit: some rope scalings
depend on it. Models know nothing of requests, blocks or programs: `kv` and `metadata` pass through to
`layers.attention.attend`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.models.config import DecoderConfig

Places = tuple[tuple[int, int], ...]
"""Per layer: the index of its KV group, and the index of its KV tensor."""


@dataclass(frozen=True)
class Model:
    """One architecture.

    `config_from_hf(hf)` -> DecoderConfig; CheckpointError for what is missing or not supported.
    `param_specs(config, num_model_shards)` -> pytree of Spec, shaped like the parameters.
    `forward(params, config, context, places, tokens_T, positions_T, metadata, kv)` -> (hidden_TD, kv):
        hidden states after the final norm. Layer i reads and writes `kv[tensor]` under `metadata[group]`, where
        `(group, tensor) = places[i]`. T must be at least 2: on CPU a product with one row is several times slower.
    `head(params)` -> what `compute_logits` needs of the parameters.
    `compute_logits(head, config, hidden_SD)` -> float32 logits_SV; columns that only pad the vocabulary are -inf.
    `attention_specs(config, block_size, dtype_bytes, num_model_shards)` -> one AttentionSpec per layer; key heads
        are counted after they were repeated for the shards.
    """

    architectures: tuple[str, ...]
    config_from_hf: Callable[[dict[str, Any]], DecoderConfig]
    param_specs: Callable[[DecoderConfig, int], Any]
    forward: Callable[..., tuple[Any, list[Any]]]
    head: Callable[[Any], Any]
    compute_logits: Callable[[Any, DecoderConfig, Any], Any]
    attention_specs: Callable[[DecoderConfig, int, int, int], list[AttentionSpec]]

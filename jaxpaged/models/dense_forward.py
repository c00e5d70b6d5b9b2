"""A model on whole texts, without a cache, that can be differentiated: so that a trainer and an engine have one
definition, and one tree of parameters.

    dense = llm.dense_model()
    params = llm.apply_model(lambda params: params)[0]
    logprobs_RC = dense.logprobs(params, tokens_RC, segments_RC)

The layers are those of the engine. Attention is that of `layers/dense_attention.py`, and XLA multiplies, since kernels
of our own have no gradients.

Letters: R rows, C tokens of a row, V words of the vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.errors import ConfigError
from jaxpaged.layers.dense_attention import DenseBatch, positions_in
from jaxpaged.layers.linear import XLA, Linear
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, Model


def dense_forward(
    model: Model, params: Any, config: DecoderConfig, tokens_RC: jax.Array, segments_RC: jax.Array
) -> jax.Array:
    """Float32 logits [R, C, V] for what follows each token. `segments_RC`: int32, of each token the number of its text;
    a row may hold several texts, which do not see each other. What pads a row is a text of its own.

    Raises ConfigError for models with experts, latents or states, and for tokens that see those behind them.
    """
    of_layers = attention_of(model, config)
    groups = tuple(dict.fromkeys(of_layers))
    batch = Batch(
        tokens_RC.reshape(-1),
        positions_in(segments_RC).reshape(-1),
        tuple(DenseBatch(segments_RC, window, chunk) for window, chunk in groups),
        tuple((groups.index(each), i) for i, each in enumerate(of_layers)),
    )
    config = replace(config, matmul_backend=XLA)
    hidden_TD = model.forward(with_xla(params), config, batch, [None] * len(of_layers)).hidden_TD
    logits_TV = model.compute_logits(model.head(params), config, hidden_TD)
    return logits_TV.reshape(*tokens_RC.shape, -1)


def attention_of(model: Model, config: DecoderConfig) -> list[tuple[int | None, int | None]]:
    """The window and the chunk of each layer. Raises ConfigError for a model that has more than plain attention."""
    if model.draft is not None:
        raise ConfigError("a model that drafts goes with this one, and dense_forward takes one. Leave it out.")
    specs = model.attention_specs(config, 1, 4, 1)
    if config.experts is not None or config.sees_both_ways or any(spec.page_heads is None for spec in specs):
        raise ConfigError(
            f"{config.architecture} has experts, latents, states or attention to both sides; dense_forward takes "
            "causal attention with keys and values, and layers without experts."
        )
    return [(spec.window, spec.chunk) for spec in specs]


def with_xla(params: Any) -> Any:
    """The same parameters, multiplied by XLA."""
    is_linear = lambda node: isinstance(node, Linear)
    bound = lambda node: node.replace(backend=XLA) if is_linear(node) else node
    return jax.tree.map(bound, params, is_leaf=is_linear)


@dataclass(frozen=True)
class DenseModel:
    """An engine's model, for trainers. Hashable, so it can be a static argument."""

    model: Model
    config: DecoderConfig

    def logits(self, params: Any, tokens_RC: jax.Array, segments_RC: jax.Array) -> jax.Array:
        """See `dense_forward`."""
        return dense_forward(self.model, params, self.config, tokens_RC, segments_RC)

    def logprobs(self, params: Any, tokens_RC: jax.Array, segments_RC: jax.Array) -> jax.Array:
        """Float32 [R, C]: the log probability of each token behind those of its text before it, at temperature 1; 0 for
        the first one."""
        before_RCV = jax.nn.log_softmax(self.logits(params, tokens_RC, segments_RC)[:, :-1], axis=-1)
        found_RC = jnp.take_along_axis(before_RCV, tokens_RC[:, 1:, None], axis=-1)[..., 0]
        follows_RC = segments_RC[:, 1:] == segments_RC[:, :-1]
        return jnp.pad(jnp.where(follows_RC, found_RC, 0.0), ((0, 0), (1, 0)))

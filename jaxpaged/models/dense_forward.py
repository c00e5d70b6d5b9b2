"""A model on whole texts, without a cache, that can be differentiated: so that a trainer and an engine have one
definition, and one tree of parameters.

    dense = llm.dense_model()
    params = llm.apply_model(lambda params: params)[0]
    logprobs_RC = dense.logprobs(params, tokens_RC, segments_RC)

The layers are those of the engine, on texts in place of a step (`layers/dense_attention.py`): attention, also over
latents, is plain products, a convolution begins with each text, and each device computes all tokens of its experts at
once. XLA multiplies, since kernels of our own have no gradients but those of experts.

Letters: R rows, C tokens of a row, V words of the vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpaged.errors import ConfigError
from jaxpaged.layers.dense_attention import DenseBatch, positions_in
from jaxpaged.layers.linear import XLA, Linear
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.drafted import DraftedParams
from jaxpaged.models.interface import Batch, Model
from jaxpaged.params.sharding import num_ranks


def dense_forward(
    model: Model, params: Any, config: DecoderConfig, mesh: Mesh, tokens_RC: jax.Array, segments_RC: jax.Array
) -> jax.Array:
    """Float32 logits [R, C, V] for what follows each token. `segments_RC`: int32, of each token the number of its text;
    a row may hold several texts, which do not see each other. What pads a row is a text of its own. `mesh`: where the
    parameters lie. Those of a model that drafts may come along, and are not used.

    Raises ConfigError for encoders, and for experts that several ranks have together.
    """
    check(config, mesh)
    params = params.decoder if isinstance(params, DraftedParams) else params
    of_layers = [(spec.window, spec.chunk) for spec in model.attention_specs(config, 1, 4, 1)]
    groups = tuple(dict.fromkeys(of_layers))
    batch = Batch(
        tokens_RC.reshape(-1),
        positions_in(segments_RC).reshape(-1),
        tuple(DenseBatch(segments_RC, mesh, window, chunk) for window, chunk in groups),
        tuple((groups.index(each), i) for i, each in enumerate(of_layers)),
    )
    config = replace(config, matmul_backend=XLA)
    hidden_TD = model.forward(with_xla(params), config, batch, [None] * len(of_layers)).hidden_TD
    logits_TV = model.compute_logits(model.head(params), config, hidden_TD)
    return logits_TV.reshape(*tokens_RC.shape, -1)


def check(config: DecoderConfig, mesh: Mesh) -> None:
    """Raise ConfigError for what dense_forward does not take."""
    if config.sees_both_ways:
        raise ConfigError(
            f"{config.architecture} is an encoder, whose tokens see those behind them; dense_forward takes models that "
            "generate."
        )
    if config.experts is not None and num_ranks(mesh) > 1:
        raise ConfigError(
            f"{num_ranks(mesh)} data-parallel ranks have the experts together, and dense_forward takes those of one. "
            "Spread them with tensor_parallel_size and enable_expert_parallel."
        )


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
    mesh: Mesh

    def logits(self, params: Any, tokens_RC: jax.Array, segments_RC: jax.Array) -> jax.Array:
        """See `dense_forward`."""
        return dense_forward(self.model, params, self.config, self.mesh, tokens_RC, segments_RC)

    def logprobs(self, params: Any, tokens_RC: jax.Array, segments_RC: jax.Array) -> jax.Array:
        """Float32 [R, C]: the log probability of each token behind those of its text before it, at temperature 1; 0 for
        the first one."""
        before_RCV = jax.nn.log_softmax(self.logits(params, tokens_RC, segments_RC)[:, :-1], axis=-1)
        found_RC = jnp.take_along_axis(before_RCV, tokens_RC[:, 1:, None], axis=-1)[..., 0]
        follows_RC = segments_RC[:, 1:] == segments_RC[:, :-1]
        return jnp.pad(jnp.where(follows_RC, found_RC, 0.0), ((0, 0), (1, 0)))

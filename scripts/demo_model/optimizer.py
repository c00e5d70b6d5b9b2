"""The optimiser as optax has it: Muon for the matrices, Adam for embeddings, heads and norms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from demo_model.muon import orthogonal
from demo_model.network import Params

Schedule = Callable[[jax.Array], jax.Array]


def scale_by_muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Nesterov momentum, made orthogonal."""

    def direction(momentum: jax.Array, gradient: jax.Array) -> jax.Array:
        rows, columns = gradient.shape
        update = orthogonal(beta * momentum + gradient)
        return update * max(1.0, rows / columns) ** 0.5

    def update(gradients, momenta, params=None):
        del params
        momenta = jax.tree.map(lambda m, g: beta * m + g, momenta, gradients)
        return jax.tree.map(direction, momenta, gradients), momenta

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def make_optimizer(matrix_rate: Schedule, other_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    muon = optax.chain(
        scale_by_muon(),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(matrix_rate),
    )
    adam = optax.adam(other_rate, b1=0.9, b2=0.98)

    def labels(params: Params) -> dict[str, str]:
        tables = ("embed_tokens", "lm_head")
        is_matrix = lambda name, value: value.ndim == 2 and not any(table in name for table in tables)
        return {name: "muon" if is_matrix(name, value) else "adam" for name, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"muon": muon, "adam": adam}, labels),
    )

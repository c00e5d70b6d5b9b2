"""The optimiser: Muon for the matrices, Adam for embeddings, heads and norms.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest
orthogonal matrix.  Weights are stored [outputs, inputs].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from demo_model.network import Params

Schedule = Callable[[jax.Array], jax.Array]

# Quintic Newton-Schulz step with the coefficients of the Muon paper; it need
# not converge, singular values between 0.7 and 1.2 are good enough.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def _orthogonal(matrix: jax.Array) -> jax.Array:
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def scale_by_muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Nesterov momentum, made orthogonal."""

    def direction(momentum: jax.Array, gradient: jax.Array) -> jax.Array:
        rows, columns = gradient.shape
        update = _orthogonal(beta * momentum + gradient)
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

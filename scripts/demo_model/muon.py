"""Muon for matrices and Adam for the rest, in plain JAX.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest
orthogonal matrix.  Weights are stored [outputs, inputs].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from demo_model.network import Params

# Quintic Newton-Schulz step with the coefficients of the Muon paper; it need
# not converge, singular values between 0.7 and 1.2 are good enough.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_BETAS = (0.9, 0.98)


def orthogonal(matrices: jax.Array) -> jax.Array:
    """The nearest orthogonal matrices, nearly, of [..., rows, columns]."""
    a, b, c = _COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Moments(NamedTuple):
    """Means of gradients, of all weights, and of their squares, of those that are no matrices."""

    count: jax.Array
    means: Params
    squares: Params


def init_moments(params: Params, is_matrix: Callable[[str, jax.Array], bool]) -> Moments:
    squares = {name: jnp.zeros_like(value) for name, value in params.items() if not is_matrix(name, value)}
    return Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), squares)


def _directions(momenta: Params) -> Params:
    """Those of equal shape are made orthogonal together: a device starts few large products in place of many small."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, value in momenta.items():
        by_shape.setdefault(tuple(sorted(value.shape)), []).append(name)
    found = {}
    for names in by_shape.values():
        tall = [momenta[name].shape[0] > momenta[name].shape[1] for name in names]
        wide = [momenta[name].T if turn else momenta[name] for name, turn in zip(names, tall, strict=True)]
        for name, turn, direction in zip(names, tall, orthogonal(jnp.stack(wide)), strict=True):
            rows, columns = momenta[name].shape
            found[name] = (direction.T if turn else direction) * max(1.0, rows / columns) ** 0.5
    return found


class Rates(NamedTuple):
    matrix: float
    other: float
    decay: float  # of matrices, times their rate
    beta: float = 0.95


def update(params: Params, gradients: Params, moments: Moments, rates: Rates, factor: jax.Array):
    """New weights and moments; the old ones where a gradient is not finite. `factor` multiplies all rates."""
    norm = jnp.sqrt(sum(jnp.vdot(value, value) for value in gradients.values()))
    finite, scale = jnp.isfinite(norm), 1 / jnp.maximum(norm, 1.0)
    count = moments.count + 1
    gradients = {name: value * scale for name, value in gradients.items()}
    is_other, (slow, slower) = moments.squares.keys(), _BETAS
    means, squares = {}, {}
    for name, value in gradients.items():
        if name in is_other:
            means[name] = slow * moments.means[name] + (1 - slow) * value
            squares[name] = slower * moments.squares[name] + (1 - slower) * value**2
        else:
            means[name] = rates.beta * moments.means[name] + value
    momenta = {name: rates.beta * means[name] + gradients[name] for name in params if name not in is_other}
    directions, new = _directions(momenta), {}
    for name, value in params.items():
        if name in is_other:
            mean, square = means[name] / (1 - slow**count), squares[name] / (1 - slower**count)
            new[name] = value - factor * rates.other * mean / (jnp.sqrt(square) + 1e-8)
        else:
            new[name] = value - factor * rates.matrix * (directions[name] + rates.decay * value)
    after = new, Moments(count, means, squares)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, (params, moments))

"""The feed-forward block: down(activation(gate(x)) * up(x)) (arXiv 2002.05202), or down(activation(up(x))) without a
gate."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.layers.linear import Linear, apply_linear, silu_product

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""hidden_act in config.json -> function."""


@dataclass(frozen=True)
class ClampedSwiglu:
    """Gate and up are limited, the gate from above only; then gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float


Activation = str | ClampedSwiglu
"""What becomes of gate and up: one of `ACTIVATIONS` of the gate, times up, or something of both."""


@struct.dataclass
class Xielu:
    """What a layer has learned of its own activation, two numbers before their softplus (arXiv 2411.13010)."""

    alpha_p: jax.Array
    alpha_n: jax.Array


@struct.dataclass
class Mlp:
    """`gate_proj` is None where a block has no gate. `gate_up_proj` [F, 2, D] is there in place of two where they are
    joined (`models/joined.py`). `xielu` is there in place of an activation without parameters."""

    gate_proj: Linear | None
    up_proj: Linear | None
    down_proj: Linear
    gate_up_proj: Linear | None = None
    xielu: Xielu | None = None


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """What goes into the down projection, in float32 as both of them are."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)


XIELU_BETA, XIELU_EPS = 0.5, -1e-6
"""The slope of xIELU at zero, and where its negative half stops to be computed."""


def xielu(x: jax.Array, p: Xielu) -> jax.Array:
    """alpha_p x^2 + beta x where x > 0, and alpha_n (exp(x) - 1 - x) + beta x elsewhere (arXiv 2411.13010, eq. 9)."""
    alpha_p, alpha_n = jax.nn.softplus(p.alpha_p), XIELU_BETA + jax.nn.softplus(p.alpha_n)
    negative = (jnp.expm1(jnp.minimum(x, XIELU_EPS)) - x) * alpha_n
    return jnp.where(x > 0, alpha_p * x * x, negative) + XIELU_BETA * x


def gated_mlp(x_TD: jax.Array, p: Mlp, activation: Activation, added_TD: jax.Array | None = None) -> jax.Array:
    """[T, D] -> [T, D] through F columns, and `added_TD` more. In between float32: an activation rounds once, and takes
    0.4 of the time."""
    return apply_linear("TF,DF->TD", gated_columns(x_TD, p, activation), p.down_proj, added_TD)


def gated_columns(x_TD: jax.Array, p: Mlp, activation: Activation) -> jax.Array:
    """[T, F], in the type of x."""
    if p.gate_up_proj is None and p.gate_proj is None:
        up_TF = apply_linear("TD,FD->TF", x_TD, p.up_proj).astype(jnp.float32)
        return (ACTIVATIONS[activation](up_TF) if p.xielu is None else xielu(up_TF, p.xielu)).astype(x_TD.dtype)
    if p.gate_up_proj is None:
        gate_TF = apply_linear("TD,FD->TF", x_TD, p.gate_proj).astype(jnp.float32)
        up_TF = apply_linear("TD,FD->TF", x_TD, p.up_proj).astype(jnp.float32)
        return gated(gate_TF, up_TF, activation).astype(x_TD.dtype)
    if activation == "silu" and (hidden_TF := silu_product(x_TD, p.gate_up_proj)) is not None:
        return hidden_TF
    both_TF2 = apply_linear("TD,F2D->TF2", x_TD, p.gate_up_proj).astype(jnp.float32)
    return gated(both_TF2[:, :, 0], both_TF2[:, :, 1], activation).astype(x_TD.dtype)

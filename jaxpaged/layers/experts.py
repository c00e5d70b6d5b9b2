"""A feed-forward block of experts, of which a router chooses a few for each token (arXiv 2101.03961, 2401.06066).

The router computes in float32. Pairs of a token and one of its experts are sorted by expert, multiplied group by group
(`pallas_kernels.grouped_matmul`), and summed for each token: shapes are fixed, and no pair is dropped. Tokens that only
pad a step go to no expert. Every device has a slice of every expert's columns, and the one sum over devices comes last,
so all of this lies within one `shard_map`. Knows neither models nor checkpoints.

Letters: P pairs of a token and an expert, J experts of a token, G groups of experts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.layers.few_rows import XLA
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import Activation, Mlp, gated, gated_mlp
from jaxpaged.params.quantized import QuantizedArray
from jaxpaged.params.sharding import MODEL_AXIS
from pallas_kernels.grouped_matmul import ExpertWeights, choose_backend, grouped_matmul

SOFTMAX, SIGMOID = "softmax", "sigmoid"


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen and weighed.

    `score` makes numbers between 0 and 1 of the router's logits. The best `experts_per_token` are chosen, of the best
    `groups_per_token` of `num_groups` groups; a group is as good as its `best_of_group` best experts together. A
    token's weights are its scores, made to add up to 1 if `is_normalised`, times `scale`. `weighs_inputs`: they are
    weights of what goes into the experts and not of what comes out.
    """

    experts_per_token: int
    score: str = SOFTMAX
    is_normalised: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    scale: float = 1.0
    weighs_inputs: bool = False


@struct.dataclass
class Experts:
    """`router` is [E, D]; gate and up are [E, Q, D], down is [E, D, Q]; biases, if any, lack the last axis.

    `correction` [E] is added to scores where experts are chosen, and not where they are weighed. `shared` are experts
    of all tokens, as one block; their output is weighed by the sigmoid of a product with `shared_gate` [D].
    """

    router: Linear
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    correction: jax.Array | None = None
    shared: Mlp | None = None
    shared_gate: jax.Array | None = None


def mixture_of_experts(
    x_TD: jax.Array,
    p: Experts,
    config: RouterConfig,
    activation: Activation,
    num_tokens: jax.Array,
    mesh: Mesh,
    few_rows: str = XLA,
) -> jax.Array:
    """[T, D] -> [T, D]: every token's experts, weighed, and the shared ones. Tokens from `num_tokens` on pad."""
    platform = mesh.devices.flat[0].platform

    def on_device(x_TD: jax.Array, p: Experts, num_tokens: jax.Array) -> jax.Array:
        expert_TJ, weight_TJ = route(x_TD, p, config)
        real_T1 = jnp.arange(len(x_TD))[:, None] < num_tokens
        expert_TJ = jnp.where(real_T1, expert_TJ, p.router.weight.shape[0])
        sum_TD = routed_sum(x_TD, p, expert_TJ, weight_TJ, activation, platform, config.weighs_inputs)
        if p.shared is not None:
            shared_TD = gated_mlp(x_TD, p.shared, activation, few_rows).astype(jnp.float32)
            sum_TD += shared_TD if p.shared_gate is None else shared_TD * gate_of_shared(x_TD, p.shared_gate)
        return jax.lax.psum(sum_TD.astype(x_TD.dtype), MODEL_AXIS)

    whole = PartitionSpec()
    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, partitions(p), whole),
        out_specs=whole,
        check_vma=False,  # kernels' loops start from constants, which vary over no axis
    )
    return sharded(x_TD, p, num_tokens)


def route(x_TD: jax.Array, p: Experts, config: RouterConfig) -> tuple[jax.Array, jax.Array]:
    """(expert_TJ int32, weight_TJ float32): which experts each token goes to, and how much each of them counts."""
    logits_TE = apply_linear("TD,ED->TE", x_TD.astype(jnp.float32), p.router)
    score_TE = jax.nn.softmax(logits_TE) if config.score == SOFTMAX else jax.nn.sigmoid(logits_TE)
    merit_TE = score_TE if p.correction is None else score_TE + p.correction
    if config.num_groups > 1:
        merit_TE = within_best_groups(merit_TE, config)
    _, expert_TJ = jax.lax.top_k(merit_TE, config.experts_per_token)
    weight_TJ = jnp.take_along_axis(score_TE, expert_TJ, axis=1)
    if config.is_normalised:
        weight_TJ /= jnp.sum(weight_TJ, axis=1, keepdims=True) + 1e-20  # sigmoids may all be zero
    return expert_TJ, weight_TJ * config.scale


def within_best_groups(merit_TE: jax.Array, config: RouterConfig) -> jax.Array:
    """The merits of experts of a token's best groups, and -inf for all others."""
    num_tokens, num_experts = merit_TE.shape
    merit_TGE = merit_TE.reshape(num_tokens, config.num_groups, num_experts // config.num_groups)
    best_TGJ, _ = jax.lax.top_k(merit_TGE, min(config.best_of_group, merit_TGE.shape[2]))
    _, group_TJ = jax.lax.top_k(jnp.sum(best_TGJ, axis=2), config.groups_per_token)
    is_best_TG = jnp.any(group_TJ[:, :, None] == jnp.arange(config.num_groups), axis=1)
    return jnp.where(is_best_TG[:, :, None], merit_TGE, -jnp.inf).reshape(num_tokens, num_experts)


def routed_sum(
    x_TD: jax.Array, p: Experts, expert_TJ: jax.Array, weight_TJ: jax.Array, activation: Activation, platform: str,
    weighs_inputs: bool,
) -> jax.Array:  # fmt: skip
    """Float32 [T, D]: the weighed sum of what each token's experts make of it; the plain sum where inputs are weighed.
    Expert E makes nothing."""
    num_experts, num_experts_per_token = p.router.weight.shape[0], expert_TJ.shape[1]
    expert_P = expert_TJ.reshape(-1)
    order_P = jnp.argsort(expert_P)
    sizes_E = jnp.sum(expert_P[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    product = partial(group_product, expert_P=expert_P[order_P], sizes_E=sizes_E, platform=platform)
    x_PD = x_TD[order_P // num_experts_per_token]
    if weighs_inputs:
        x_PD = (x_PD * weight_TJ.reshape(-1)[order_P][:, None]).astype(x_TD.dtype)
    gate_PQ, up_PQ = (product(x_PD, each) for each in (p.gate_proj, p.up_proj))
    y_PD = product(gated(gate_PQ, up_PQ, activation).astype(x_TD.dtype), on_first_device(p.down_proj))
    y_TJD = y_PD[jnp.argsort(order_P)].reshape(*expert_TJ.shape, -1)
    return jnp.sum(y_TJD if weighs_inputs else y_TJD * weight_TJ[:, :, None], axis=1)


def on_first_device(p: Linear) -> Linear:
    """The same with a bias of zero on all devices but one: each of them computes a summand of what it is added to."""
    if p.bias is None:
        return p
    return p.replace(bias=jnp.where(jax.lax.axis_index(MODEL_AXIS) == 0, p.bias, 0))


def group_product(x_PD: jax.Array, p: Linear, expert_P: jax.Array, sizes_E: jax.Array, platform: str) -> jax.Array:
    """Each pair times the weight of its expert, rounded to the type of x, and its bias, if there is one, in float32.

    Pairs are sorted by expert; those of expert E get neither.
    """
    weights = ExpertWeights(p.weight)
    if isinstance(p.weight, QuantizedArray):
        weights = ExpertWeights(p.weight.values, p.weight.scales[:, None, :])
    backend = choose_backend("auto", platform, x_PD, weights)
    y = grouped_matmul(x_PD, weights, sizes_E, backend=backend).astype(jnp.float32)
    return y if p.bias is None else y + p.bias.at[expert_P].get(mode="fill", fill_value=0)


def gate_of_shared(x_TD: jax.Array, gate_D: jax.Array) -> jax.Array:
    """[T, 1]: how much the shared experts count for each token."""
    return jax.nn.sigmoid(jnp.sum(x_TD.astype(jnp.float32) * gate_D, axis=1, keepdims=True))


def partitions(p: Experts) -> Any:
    """How the parameters lie on devices: columns of every expert are split, and what chooses experts is whole."""
    whole = jax.tree.map(lambda _: PartitionSpec(), p)
    shared = p.shared and Mlp(
        split_outputs(p.shared.gate_proj, 0), split_outputs(p.shared.up_proj, 0), split_inputs(p.shared.down_proj, 1)
    )
    return whole.replace(
        gate_proj=split_outputs(p.gate_proj, 1),
        up_proj=split_outputs(p.up_proj, 1),
        down_proj=split_inputs(p.down_proj, 2),
        shared=shared,
    )


def expert_weights(params: Any) -> list[Any]:
    """The arrays of all experts of which a router chooses, in a pytree of parameters."""
    blocks = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Experts))
    return jax.tree.leaves([(p.gate_proj, p.up_proj, p.down_proj) for p in blocks if isinstance(p, Experts)])


def split_outputs(p: Linear, axis: int) -> Any:
    """An output axis is split, which scales have too."""
    return jax.tree.map(lambda _: PartitionSpec(*[None] * axis, MODEL_AXIS), p)


def split_inputs(p: Linear, axis: int) -> Any:
    """The input axis is split, which scales do not have."""
    return jax.tree.map(lambda x: PartitionSpec(*[None] * axis, MODEL_AXIS) if x.ndim > axis else PartitionSpec(), p)

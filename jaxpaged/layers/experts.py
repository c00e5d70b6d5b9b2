"""A feed-forward block of experts, of which a router chooses a few for each token (arXiv 2101.03961, 2401.06066).

The router computes in float32. Pairs of a token and one of its experts are sorted by expert, multiplied group by group
(`pallas_kernels.grouped_matmul`), and summed for each token: shapes are fixed, and no pair is dropped. Tokens that only
pad a step go to no expert. Every device knows all tokens, chooses experts for all of them, and computes what its own
part of the experts makes of them: a slice of every expert's columns, or the whole of some experts. The one sum over
devices comes last, so all of this lies within one `shard_map`, and nothing else is exchanged.

Attention ranks (`ranks.py`) have tokens of their own and experts together: each chooses experts for its tokens, all of
them are gathered, with what was chosen, and every rank gets back the sums of its own.

A device with some of the experts has nothing to do for most pairs, and cannot know beforehand for how many: it takes
those that it has a number at a time, until none are left. Knows neither models nor checkpoints.

Letters: P pairs of a token and an expert, C of them that are computed at a time, J experts of a token, G groups of
experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.layers.linear import Linear, apply_linear, lora_parts
from jaxpaged.layers.lora import on_one_device, own_ranks
from jaxpaged.layers.mlp import Activation, Mlp, gated, gated_mlp
from jaxpaged.layers.ranks import over_model_axes
from jaxpaged.params.quantized import QuantizedArray, Stored, StoredArray
from jaxpaged.params.sharding import (
    DATA_AXIS,
    EXPERT_AXIS,
    MODEL_AXES,
    TENSOR_AXIS,
    num_expert_devices,
    num_ranks,
)
from pallas_kernels.grouped_matmul import ExpertWeights, choose_backend, grouped_matmul
from pallas_kernels.sort_by_group import choose_backend as choose_sort
from pallas_kernels.sort_by_group import sort_by_group

SOFTMAX, SIGMOID = "softmax", "sigmoid"

LEAST_PAIRS = 128
"""So many pairs are computed at once however few of them a device can expect: a kernel's tile holds no fewer."""

MOST_SUMMANDS = 16
"""Of a token, which XLA:CPU adds up where it gathers them, in one kernel of so many terms: 32 tokens of 8 experts and
512 numbers take 26 us in place of 50, in which they are gathered first."""


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen and weighed.

    `score` makes numbers between 0 and 1 of the router's logits. The best `experts_per_token` are chosen, of the best
    `groups_per_token` of `num_groups` groups; a group is as good as its `best_of_group` best experts together. A
    token's weights are its scores, made to add up to 1 if `is_normalised`, times `scale`. `weighs_inputs`: they are
    weights of what goes into the experts and not of what comes out. `least_sum` is added to what scores are divided by,
    since sigmoids may all be zero. `tells`: blocks say which experts each token went to.
    """

    experts_per_token: int
    score: str = SOFTMAX
    is_normalised: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    scale: float = 1.0
    weighs_inputs: bool = False
    least_sum: float = field(default=1e-20, metadata={"later": True})  # `models.config.LATER`
    tells: bool = field(default=False, metadata={"later": True})


@struct.dataclass
class Placement:
    """Where experts are, if that changes while the engine runs: each has `num_places_E` places, the first numbers of
    its row of `place_ER`. Places are numbered over all devices."""

    num_places_E: jax.Array
    place_ER: jax.Array


@struct.dataclass
class Experts:
    """`router` is [E, D]; gate and up are [e, Q, D], down is [e, D, Q]; biases, if any, lack the last axis.

    `correction` [E] is added to scores where experts are chosen, and not where they are weighed. `shared` are experts
    of all tokens, as one block; their output is weighed by the sigmoid of a product with `shared_gate` [D].
    `expert_scale` [E] multiplies the weights of chosen experts.
    `placement` None: the first places have all experts in their order, and the others are not used.
    """

    router: Linear
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    correction: jax.Array | None = None
    shared: Mlp | None = None
    shared_gate: jax.Array | None = None
    placement: Placement | None = None
    expert_scale: jax.Array | None = None


@struct.dataclass
class Routed:
    """What a block tells of its tokens besides what it makes of them. `load_E`: how many that are no padding went to
    each expert, uint32, where experts have a placement. `expert_TJ`: the experts that each went to, int16, the best one
    first, where that is wanted; wherever these have their places."""

    load_E: jax.Array | None = None
    expert_TJ: jax.Array | None = None


def of_layers(told: Sequence[Routed]) -> Routed | None:
    """What several blocks tell, along a first axis."""
    return jax.tree.map(lambda *each: jnp.stack(each), *told) if told else None


def mixture_of_experts(
    x_TD: jax.Array,
    p: Experts,
    config: RouterConfig,
    activation: Activation,
    num_tokens: jax.Array,
    mesh: Mesh,
    judged_TD: jax.Array | None = None,
    in_turns: bool = True,
) -> tuple[jax.Array, Routed | None]:
    """[T, D] -> [T, D]: every token's experts, weighed, and the shared ones; and what there is to tell besides. Tokens
    from `num_tokens` on pad. `judged_TD`: what the router reads, where that is not `x_TD`. If not `in_turns` a device
    computes all of its pairs at once, which can be differentiated."""
    platform, ranks = mesh.devices.flat[0].platform, num_ranks(mesh)

    def on_device(
        x_TD: jax.Array, p: Experts, num_tokens: jax.Array, judged_TD: jax.Array | None
    ) -> tuple[jax.Array, Routed | None]:
        p = on_one_device(p)
        expert_TJ, weight_TJ = route(x_TD if judged_TD is None else judged_TD, p, config)
        real_T1 = jnp.arange(len(x_TD))[:, None] < num_tokens
        own = x_TD, expert_TJ, weight_TJ, real_T1
        all_TD, all_TJ, all_weight_TJ, all_real_T1 = jax.tree.map(of_all_ranks, own) if ranks > 1 else own
        place_TJ = places_here(all_TJ, all_real_T1, p, ranks)
        at_once = pairs_at_once(place_TJ.size, num_expert_devices(mesh)) if in_turns else place_TJ.size
        sum_TD = routed_sum(all_TD, p, place_TJ, all_weight_TJ, activation, platform, config.weighs_inputs, at_once)
        if ranks > 1:
            sum_TD = jax.lax.psum_scatter(sum_TD.astype(x_TD.dtype), DATA_AXIS, scatter_dimension=0, tiled=True)
        if p.shared is not None:
            shared_TD = gated_mlp(x_TD, p.shared, activation).astype(jnp.float32)
            sum_TD += shared_TD if p.shared_gate is None else shared_TD * gate_of_shared(x_TD, p.shared_gate)
        load_E = None if p.placement is None else tokens_of_experts(expert_TJ, real_T1, p)
        told = Routed(load_E, expert_TJ.astype(jnp.int16) if config.tells else None)
        is_wanted = config.tells or load_E is not None
        return jax.lax.psum(sum_TD.astype(x_TD.dtype), MODEL_AXES), told if is_wanted else None

    whole = PartitionSpec()
    sharded = over_model_axes(mesh, on_device, (whole, partitions(p), whole, whole), whole)
    return sharded(x_TD, p, num_tokens, judged_TD)


def of_all_ranks(x_T: jax.Array) -> jax.Array:
    """What all attention ranks have of their tokens, one rank after the other."""
    return jax.lax.all_gather(x_T, DATA_AXIS, axis=0, tiled=True)


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
        weight_TJ /= jnp.sum(weight_TJ, axis=1, keepdims=True) + config.least_sum
    if p.expert_scale is not None:
        weight_TJ *= p.expert_scale[expert_TJ]
    return expert_TJ, weight_TJ * config.scale


def within_best_groups(merit_TE: jax.Array, config: RouterConfig) -> jax.Array:
    """The merits of experts of a token's best groups, and -inf for all others."""
    num_tokens, num_experts = merit_TE.shape
    merit_TGE = merit_TE.reshape(num_tokens, config.num_groups, num_experts // config.num_groups)
    best_TGJ, _ = jax.lax.top_k(merit_TGE, min(config.best_of_group, merit_TGE.shape[2]))
    _, group_TJ = jax.lax.top_k(jnp.sum(best_TGJ, axis=2), config.groups_per_token)
    is_best_TG = jnp.any(group_TJ[:, :, None] == jnp.arange(config.num_groups), axis=1)
    return jnp.where(is_best_TG[:, :, None], merit_TGE, -jnp.inf).reshape(num_tokens, num_experts)


def places_here(expert_TJ: jax.Array, real_T1: jax.Array, p: Experts, ranks: int = 1) -> jax.Array:
    """Where this device has each token's experts: 0 to e - 1, and e for those of other devices and of padding."""
    num_here = p.gate_proj.weight.shape[0]
    if p.placement is not None:
        expert_TJ = place_of(expert_TJ, p.placement)
    axes = (DATA_AXIS, EXPERT_AXIS) if ranks > 1 else EXPERT_AXIS
    place_TJ = expert_TJ - jax.lax.axis_index(axes) * num_here
    return jnp.where(real_T1 & (place_TJ >= 0) & (place_TJ < num_here), place_TJ, num_here)


def place_of(expert_TJ: jax.Array, placement: Placement) -> jax.Array:
    """A place of each token's experts. Tokens take turns with the places of an expert that has several."""
    token_T1 = jnp.arange(len(expert_TJ))[:, None]
    return placement.place_ER[expert_TJ, token_T1 % placement.num_places_E[expert_TJ]]


def expert_of(placement: Placement) -> jax.Array:
    """int32 [e]: which expert is in each place."""
    place_ER = placement.place_ER
    num_experts, spare = place_ER.shape
    experts_E1 = jnp.arange(num_experts, dtype=jnp.int32)[:, None]
    return jnp.zeros(num_experts + spare - 1, jnp.int32).at[place_ER].set(experts_E1)


def placements_of(params: Any) -> dict[str, Placement]:
    """Where experts are, by the path of their block, if that changes while the engine runs."""
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_block)[0]
    placed = [(path, node.placement) for path, node in nodes if is_block(node) and node.placement is not None]
    return {jax.tree_util.keystr(path): placement for path, placement in placed}


def tokens_of_experts(expert_TJ: jax.Array, real_T1: jax.Array, p: Experts) -> jax.Array:
    """uint32 [E]: how many tokens that are no padding go to each expert."""
    goes_TJE = (expert_TJ[:, :, None] == jnp.arange(p.router.weight.shape[0])) & real_T1[:, :, None]
    return jnp.sum(goes_TJE, axis=(0, 1), dtype=jnp.uint32)


def pairs_at_once(num_pairs: int, num_devices: int) -> int:
    """How many pairs a device computes at a time, of those of all `num_devices` over which experts are spread: twice
    its share of them, which is mostly enough for all that it has."""
    share = -(-2 * num_pairs // num_devices)
    return min(num_pairs, -(-share // LEAST_PAIRS) * LEAST_PAIRS)


def routed_sum(
    x_TD: jax.Array,
    p: Experts,
    place_TJ: jax.Array,
    weight_TJ: jax.Array,
    activation: Activation,
    platform: str,
    weighs_inputs: bool,
    at_once: int,
) -> jax.Array:
    """Float32 [T, D]: the weighed sum of what each token's experts make of it; the plain sum where inputs are weighed.
    What is not in a place of this device makes nothing."""
    num_here, num_experts_per_token = p.gate_proj.weight.shape[0], place_TJ.shape[1]
    place_P = place_TJ.reshape(-1)
    order_P, rank_P = sort_by_group(place_P, num_here, backend=choose_sort("auto", platform))
    down_proj = on_first_device(p.down_proj)
    bound = [each.lora for each in (p.gate_proj, p.up_proj, p.down_proj) if each.lora is not None]
    own_TS = slots_of_all_ranks(bound[0].slots.own_TS, len(x_TD)) if bound else None

    def of_pairs(pair_C: jax.Array, place_C: jax.Array) -> jax.Array:
        """[C, D] float32 of pairs that are sorted by place."""
        sizes_e = jnp.sum(place_C[:, None] == jnp.arange(num_here), axis=0, dtype=jnp.int32)
        product = partial(group_product, place_C=place_C, sizes_e=sizes_e, platform=platform)
        x_CD = x_TD[pair_C // num_experts_per_token]
        if weighs_inputs:
            x_CD = (x_CD * weight_TJ.reshape(-1)[pair_C][:, None]).astype(x_TD.dtype)
        if own_TS is not None:
            product = partial(product, own_CS=own_TS[pair_C // num_experts_per_token])
        gate_CQ, up_CQ = (product(x_CD, each) for each in (p.gate_proj, p.up_proj))
        return product(gated(gate_CQ, up_CQ, activation).astype(x_TD.dtype), down_proj)

    y_PD = of_all_pairs(of_pairs, order_P, place_P[order_P], num_here, at_once, x_TD.shape[1])
    rank_TJ = rank_P.reshape(place_TJ.shape)
    return sum_of_pairs(y_PD, rank_TJ, None if weighs_inputs else weight_TJ, platform)


def sum_of_pairs(y_PD: jax.Array, rank_TJ: jax.Array, weight_TJ: jax.Array | None, platform: str) -> jax.Array:
    """[T, D]: for each token the sum of some of y, weighed if there are weights."""
    if platform == "cpu" and rank_TJ.shape[1] <= MOST_SUMMANDS:
        ys = (y_PD[rank_TJ[:, j]] for j in range(rank_TJ.shape[1]))
        return sum(ys if weight_TJ is None else (y_TD * weight_TJ[:, j, None] for j, y_TD in enumerate(ys)))
    y_TJD = y_PD[rank_TJ]
    return jnp.sum(y_TJD if weight_TJ is None else y_TJD * weight_TJ[:, :, None], axis=1)


def of_all_pairs(
    of_pairs: Callable[[jax.Array, jax.Array], jax.Array],
    order_P: jax.Array,
    place_P: jax.Array,
    num_here: int,
    at_once: int,
    width: int,
) -> jax.Array:
    """`of_pairs` of all pairs that have a place here, `at_once` at a time: [P, D], zeros for the others, which come
    last."""
    num_pairs = len(order_P)
    if at_once >= num_pairs:
        return of_pairs(order_P, place_P)
    missing = -num_pairs % at_once
    order_P, place_P = jnp.pad(order_P, (0, missing)), jnp.pad(place_P, (0, missing), constant_values=num_here)

    def turn(i: jax.Array, y_PD: jax.Array) -> jax.Array:
        own = partial(jax.lax.dynamic_slice_in_dim, start_index=i * at_once, slice_size=at_once)
        return jax.lax.dynamic_update_slice_in_dim(y_PD, of_pairs(own(order_P), own(place_P)), i * at_once, axis=0)

    num_turns = (jnp.sum(place_P < num_here) + at_once - 1) // at_once
    zeros_PD = jnp.zeros((num_pairs + missing, width), jnp.float32)
    return jax.lax.fori_loop(0, num_turns, turn, zeros_PD)[:num_pairs]


def on_first_device(p: Linear) -> Linear:
    """The same with a bias of zero on all devices but one of those that share an expert: each of them computes a
    summand of what it is added to."""
    if p.bias is None:
        return p
    return p.replace(bias=jnp.where(jax.lax.axis_index(TENSOR_AXIS) == 0, p.bias, 0))


def slots_of_all_ranks(own_TS: jax.Array, num_tokens: int) -> jax.Array:
    """The slots of so many tokens: those of this attention rank, or of all."""
    return own_TS if len(own_TS) == num_tokens else of_all_ranks(own_TS)


def group_product(
    x_CD: jax.Array,
    p: Linear,
    place_C: jax.Array,
    sizes_e: jax.Array,
    platform: str,
    own_CS: jax.Array | None = None,
) -> jax.Array:
    """Each pair times the weight of its expert, rounded to the type of x, and its bias, if there is one, in float32.

    Pairs are sorted by place; those without one, place e, get neither. `own_CS`: which slots of adapters pairs have.
    """
    weights = ExpertWeights(p.weight)
    if isinstance(p.weight, QuantizedArray):
        weights = ExpertWeights(p.weight.values, p.weight.scales[:, None, :])
    elif isinstance(p.weight, StoredArray):
        weights = ExpertWeights(p.weight.values, p.weight.scales)
    backend = choose_backend("auto", platform, x_CD, weights)
    y = grouped_matmul(x_CD, weights, sizes_e, backend=backend).astype(jnp.float32)
    if own_CS is not None and p.lora is not None:
        if (growth := p.lora.stacks.growth) is not None:
            y *= 1 + growth_of_pairs(growth, place_C, own_CS)
        y += adapters_of_pairs(x_CD, p, sizes_e, platform, own_CS)
    return y if p.bias is None else y + p.bias.at[place_C].get(mode="fill", fill_value=0)


def adapters_of_pairs(x_CD: jax.Array, p: Linear, sizes_e: jax.Array, platform: str, own_CS: jax.Array) -> jax.Array:
    """Float32 [C, outputs]: what the adapter of each pair's token adds to its expert."""
    assert p.lora is not None, "it has stacks"
    product, added = partial(grouped_matmul, group_sizes_E=sizes_e), jnp.zeros((), jnp.float32)
    for part in p.lora.stacks.parts:
        a_eKD = ExpertWeights(part.a.reshape(len(part.a), -1, x_CD.shape[1]))
        b_eFK = ExpertWeights(part.b.reshape(*part.b.shape[:2], -1))
        x = x_CD.astype(part.a.dtype)
        u_CK = product(x, a_eKD, backend=choose_backend("auto", platform, x, a_eKD))
        u_CK = own_ranks(u_CK.astype(jnp.float32), own_CS, part.b.dtype)
        added += product(u_CK, b_eFK, backend=choose_backend("auto", platform, u_CK, b_eFK)).astype(jnp.float32)
    return added


def growth_of_pairs(growth_eSF: jax.Array, place_C: jax.Array, own_CS: jax.Array) -> jax.Array:
    """Float32 [C, outputs]: by how much more the adapter of each pair's token counts what its expert's weight makes."""
    more_CF = growth_eSF.at[place_C, jnp.argmax(own_CS, axis=1)].get(mode="clip")
    return more_CF * jnp.sum(own_CS, axis=1, keepdims=True)


def gate_of_shared(x_TD: jax.Array, gate_D: jax.Array) -> jax.Array:
    """[T, 1]: how much the shared experts count for each token."""
    return jax.nn.sigmoid(jnp.sum(x_TD.astype(jnp.float32) * gate_D, axis=1, keepdims=True))


def partitions(p: Experts) -> Any:
    """How the parameters lie on devices: experts are spread, the columns of each are split, and what chooses experts
    is whole."""
    whole = jax.tree.map(lambda _: PartitionSpec(), p)
    outputs, inputs = PartitionSpec(MODEL_AXES), PartitionSpec(None, MODEL_AXES)
    shared = p.shared and Mlp(
        split(p.shared.gate_proj, outputs), split(p.shared.up_proj, outputs), split(p.shared.down_proj, inputs)
    )
    outputs, inputs = PartitionSpec(EXPERT_AXIS, TENSOR_AXIS), PartitionSpec(EXPERT_AXIS, None, TENSOR_AXIS)
    return whole.replace(
        gate_proj=with_expert_stacks(split(p.gate_proj, outputs), None, TENSOR_AXIS),
        up_proj=with_expert_stacks(split(p.up_proj, outputs), None, TENSOR_AXIS),
        down_proj=with_expert_stacks(split(p.down_proj, inputs), TENSOR_AXIS, None),
        shared=shared,
    )


def with_expert_stacks(parts: Linear, inputs: str | None, outputs: str | None) -> Linear:
    """How the arrays of experts lie, with their stacks: those of whole experts where these are."""
    if (lora := parts.lora) is None:
        return parts
    a, b = PartitionSpec(EXPERT_AXIS, None, None, inputs), PartitionSpec(EXPERT_AXIS, outputs)
    growth = None if lora.stacks.growth is None else PartitionSpec(EXPERT_AXIS, None, outputs)
    stacks = lora.stacks.replace(parts=tuple(part.replace(a=a, b=b) for part in lora.stacks.parts), growth=growth)
    slots = lora.slots.replace(own_TS=PartitionSpec(), place_T=PartitionSpec())
    return parts.replace(lora=lora.replace(stacks=stacks, slots=slots))


def expert_weights(params: Any) -> list[Any]:
    """The arrays of all experts of which a router chooses, in a pytree of parameters."""
    return [part for p in expert_blocks(params) for part in weights_of(p)]


def weights_of(p: Experts) -> list[Any]:
    """The arrays of a block that go where its experts go."""
    return jax.tree.leaves((p.gate_proj, p.up_proj, p.down_proj))


def expert_blocks(params: Any) -> list[Experts]:
    """All blocks of experts in a pytree of parameters, in its order."""
    return [node for node in jax.tree.leaves(params, is_leaf=is_block) if is_block(node)]


def map_experts(change: Callable[[Experts], Experts], params: Any) -> Any:
    """The parameters with every block of experts changed, in the order of `expert_blocks`."""
    return jax.tree.map(lambda node: change(node) if is_block(node) else node, params, is_leaf=is_block)


def is_block(node: Any) -> bool:
    return isinstance(node, Experts)


def split(p: Linear, axes: PartitionSpec) -> Any:
    """How its arrays lie where its weight lies like `axes`: scales and biases have no input axis, the last one; scales
    of groups of inputs have it before that of outputs."""
    parts = jax.tree.map(lambda x: PartitionSpec(*axes[: x.ndim]), p)
    if p.lora is not None and p.lora.split is not None:
        parts = parts.replace(lora=lora_parts(p.lora, p.lora.split))
    if not isinstance(p.weight, StoredArray):
        return parts
    *experts, outputs, inputs = (*axes, *[None] * (p.weight.values.ndim - len(axes)))
    groups, zeros = PartitionSpec(*experts, inputs, outputs), p.weight.zeros
    order = None if p.weight.order is None else PartitionSpec()
    weight = parts.weight.replace(scales=groups, zeros=zeros if zeros is None else groups, order=order)
    return parts.replace(weight=weight)


def expert_kernel(platform: str, dtype: Any, form: Stored, outputs: int, inputs: int) -> str | None:
    """The kernel that multiplies with the experts' weights of a form; None: only XLA does, which writes them to memory
    first."""
    struct = jax.ShapeDtypeStruct
    values = struct((1, outputs, inputs), jnp.dtype(form.values))
    weights = ExpertWeights(values, struct((1, inputs // form.group, outputs), jnp.dtype(form.scales)))
    name = choose_backend("auto", platform, struct((LEAST_PAIRS, inputs), jnp.dtype(dtype)), weights)
    return None if name == "reference" else name

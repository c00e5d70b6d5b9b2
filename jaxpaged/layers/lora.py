"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685), many on one base: what each slot adds to a product.

An adapter of rank r adds B A x to W x. Slot s of the stacks has one adapter, and every token of a step has the slot of
its request; slot 0 is no adapter and has no place in the stacks. Shapes are fixed, whichever adapters are in a step:
`pallas_kernels.lora_matmul` multiplies each token with its own slot, or with all, and masks what is not its own between
the two products. Experts and tables do the latter. How large alpha is, is folded into B, and adapters of smaller ranks
end with zeros.

Ranks are in parts: the first of all slots in one pair of arrays, the others in another. A program of steps in which all
adapters are small takes the first part alone.

DoRA (arXiv 2402.09353) scales the outputs of W x + B A x; of B that is folded in, `growth` scales W x. This module
knows neither models nor requests, nor how adapters are read.

Letters: S slots, r ranks, I inputs and O outputs of a product, each all of its axes in one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.params.sharding import Split


@struct.dataclass
class LoraStack:
    """Some ranks of all slots: `a` is [S, r, inputs...] and `b` [S, r, outputs...]."""

    a: jax.Array
    b: jax.Array


@struct.dataclass
class ExpertStack:
    """The same of the experts of a block, e: `a` is [e, S, r, inputs...] and `b` [e, outputs..., S, r], as
    `grouped_matmul` takes both."""

    a: jax.Array
    b: jax.Array


@struct.dataclass
class TableStack:
    """The same of a table of embeddings [V, D], whose rows are looked up: `a` is [S, r, D] and `b` [S, V, r]."""

    a: jax.Array
    b: jax.Array


@struct.dataclass
class WholeStack:
    """Parameters of a classifier, of which each adapter may have its own: float32 `values` [S, ...], and `is_own` [S],
    1 where a slot has one."""

    values: jax.Array
    is_own: jax.Array


@struct.dataclass
class LoraStacks:
    """What the slots add to one linear layer. `growth` [S, outputs...], of experts [e, S, outputs...], float32: by how
    much more than itself W x is counted (DoRA); zero for others, and None where no adapter of a step has one."""

    parts: tuple[LoraStack | ExpertStack | TableStack, ...]
    growth: jax.Array | None = None


@struct.dataclass
class TokenSlots:
    """Which slot each token of a step has: in float32 [T, S] 1 where it is the token's, so zeros for slot 0, and as a
    place in the stacks, int32 [T], -1 for slot 0."""

    own_TS: jax.Array
    place_T: jax.Array


@struct.dataclass
class SlottedLines:
    """Hidden states of tokens [T, D], and the slots of their adapters, int32 [T]: what logits or scores are computed of
    where adapters change the output head, or a classifier."""

    lines: jax.Array
    slots: jax.Array


def plain_lines(hidden: Any) -> Any:
    """Hidden states alone."""
    return hidden.lines if isinstance(hidden, SlottedLines) else hidden


@struct.dataclass
class BoundLora:
    """The stacks of a linear layer with the slots of a step's tokens. `split`: over which axes of a mesh the layer's
    outputs or inputs are split; None: this is the part of one device, or there is one."""

    stacks: LoraStacks
    slots: TokenSlots
    split: Split | None = struct.field(pytree_node=False, default=None)


def token_slots(slot_T: jax.Array, num_slots: int) -> TokenSlots:
    """Of int32 [T] with 0 for no adapter, and numbers from 1 on."""
    own_TS = slot_T[:, None] == jnp.arange(1, num_slots + 1)
    own_TS, place_T = jax.lax.optimization_barrier((own_TS.astype(jnp.float32), slot_T - 1))
    return TokenSlots(own_TS, place_T)


def on_one_device(p: Any) -> Any:
    """Parameters within a function of one device, which has its part of all stacks."""
    is_bound = lambda node: isinstance(node, BoundLora)
    return jax.tree.map(lambda node: node.replace(split=None) if is_bound(node) else node, p, is_leaf=is_bound)


def own_ranks(u_TK: jax.Array, own_TS: jax.Array, dtype: Any) -> jax.Array:
    """[T, S r] of what all slots make of each token's inputs, zeros where a slot is not the token's."""
    num_tokens, num_slots = own_TS.shape
    u_TSr = u_TK.reshape(num_tokens, num_slots, -1)
    return (u_TSr * own_TS[:, :, None]).reshape(num_tokens, -1).astype(dtype)


def product(equation: str, x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Sums of `x`, in the type of `w`, taken in float32 and given in `dtype`."""
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jnp.einsum(equation, x.astype(w.dtype), w, preferred_element_type=dtype, precision=precision)


def stacked_product(u_TK: jax.Array, b: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """[T, O] in `dtype`: what the ranks of all slots add, of b [S, r, outputs...]."""
    return product("TK,KO->TO", u_TK, b.reshape(u_TK.shape[1], -1), dtype)


def grown_TO(base_TO: jax.Array, growth: jax.Array | None, slots: TokenSlots) -> jax.Array:
    """Float32 [T, O]: what the weights make of tokens, counted by as much more as their slots say."""
    base_TO = base_TO.astype(jnp.float32)
    if growth is None:
        return base_TO
    growth_SO = growth.reshape(len(growth), -1)
    more_TO = jnp.einsum("TS,SO->TO", slots.own_TS, growth_SO, precision=jax.lax.Precision.HIGHEST)
    return base_TO * (1 + more_TO)


def adapted_rows(row_TD: jax.Array, ids_T: jax.Array, lora: BoundLora) -> jax.Array:
    """Rows of a table with what the adapter of each token adds to them, in their type."""
    slots, sum_TD = lora.slots, grown_TO(row_TD, lora.stacks.growth, lora.slots)
    for part in lora.stacks.parts:
        u_Tr = part.b.at[slots.place_T, ids_T].get(mode="clip")
        u_TSr = u_Tr[:, None, :].astype(jnp.float32) * slots.own_TS[:, :, None]
        sum_TD += stacked_product(u_TSr.reshape(len(ids_T), -1).astype(part.a.dtype), part.a)
    return sum_TD.astype(row_TD.dtype)


# ---- of matrices that latent attention absorbs, head by head: letters as in `models/deepseek.py` ----


def grown_heads(x_TNv: jax.Array, lora: BoundLora) -> jax.Array:
    """Of every head what its rows are counted by, in the type of x."""
    if lora.stacks.growth is None:
        return x_TNv
    exact = jax.lax.Precision.HIGHEST
    more_TNv = jnp.einsum("TS,SNv->TNv", lora.slots.own_TS, lora.stacks.growth, precision=exact)
    return (x_TNv * (1 + more_TNv)).astype(x_TNv.dtype)


def into_latents(q_TNk: jax.Array, lora: BoundLora) -> jax.Array:
    """Float32 [T, N, C]: what adapters add to queries that meet latents, of a [S, r, C] and b [S, r, N, k]."""
    return sum(_through(q_TNk, part.b, part.a, "TNk,SrNk->TNSr", "TNSr,SrC->TNC", lora) for part in lora.stacks.parts)


def out_of_latents(x_TNC: jax.Array, lora: BoundLora) -> jax.Array:
    """Float32 [T, N, v]: what adapters add to values, of a [S, r, C] and b [S, r, N, v]."""
    return sum(_through(x_TNC, part.a, part.b, "TNC,SrC->TNSr", "TNSr,SrNv->TNv", lora) for part in lora.stacks.parts)


def _through(x: jax.Array, into: jax.Array, out: jax.Array, first: str, second: str, lora: BoundLora) -> jax.Array:
    """Both products of each head, of which the first gives what all slots make, and the second takes a token's own."""
    u_TNSr = product(first, x, into) * lora.slots.own_TS[:, None, :, None]
    return product(second, u_TNSr, out)

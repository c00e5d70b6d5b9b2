"""How a query's attention to parts of its context is computed and becomes one: the plain way, and what any way is.

Scores, softmax state and accumulators are float32; probabilities enter the second product in the cache's dtype.
This module knows nothing of blocks, and not how a context is cut. A `problem` is a `reference.Problem`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.products import product

LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Softmax:
    """A softmax-weighted sum over part of a context, not divided yet.

    `top` is what was subtracted from scores, `total` the sum of weights, `out` (one axis more: H) of weighted values.
    """

    top: jax.Array
    total: jax.Array
    out: jax.Array


def packed(part: Softmax) -> jax.Array:
    """All of it in one array, whose last axis is H + 2: moving one is cheaper to compile, and to do, than three."""
    return jnp.concatenate([part.out, part.total[..., None], part.top[..., None]], axis=-1)


def unpacked(x: jax.Array) -> Softmax:
    """What `packed` made an array of."""
    return Softmax(x[..., -1], x[..., -2], x[..., :-2])


class Numerics(NamedTuple):
    """How parts of a context become one: what `invariant` does in another way.

    add_chunk(problem, state_KX, q_KXH, k_KCH, v_KCH, visible_XC): the state with one more chunk of the context.
    attend_items(problem, q_IKGH, k_IKCH, v_IKCH, visible_IC): every query's attention to its item's slots.
    add(one, other): the merger of two parts of the same queries' contexts, the earlier one first.
    merge_queries(part_JKG, token_J): for every part, the merger of all parts of the same query.
    divide(state, sinks): weighted values over the sum of weights.
    """

    add_chunk: Callable[..., Softmax]
    attend_items: Callable[..., Softmax]
    add: Callable[..., Softmax]
    merge_queries: Callable[..., Softmax]
    divide: Callable[..., jax.Array]


def masked_scores(problem: Any, q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """Float32 scores [..., X, C] of queries [..., X, H] at slots [..., C, H], -inf where not `visible`."""
    score = product("...XH,...CH->...XC", q.astype(k.dtype), k) * problem.scale
    if problem.soft_cap is not None:
        score = problem.soft_cap * jnp.tanh(score / problem.soft_cap)
    return jnp.where(visible, score, -jnp.inf)


def nothing(shape: tuple[int, ...], head_dim: int) -> Softmax:
    """The softmax over no slots at all."""
    return Softmax(jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def _add_chunk(
    problem: Any, state_KX: Softmax, q_KXH: jax.Array, k_KCH: jax.Array, v_KCH: jax.Array, visible_XC: jax.Array
) -> Softmax:
    part_KX = _attend_slots(problem, q_KXH, k_KCH, v_KCH, visible_XC, state_KX.top)
    fade_KX = jnp.exp(state_KX.top - part_KX.top)
    return Softmax(
        part_KX.top,
        state_KX.total * fade_KX + part_KX.total,
        state_KX.out * fade_KX[..., None] + part_KX.out,
    )


def _add(one: Softmax, other: Softmax) -> Softmax:
    top = jnp.maximum(one.top, other.top)
    fade_one, fade_other = jnp.exp(one.top - top), jnp.exp(other.top - top)
    return Softmax(
        top,
        one.total * fade_one + other.total * fade_other,
        one.out * fade_one[..., None] + other.out * fade_other[..., None],
    )


def _attend_each_item(
    problem: Any, q_IKGH: jax.Array, k_IKCH: jax.Array, v_IKCH: jax.Array, visible_IC: jax.Array
) -> Softmax:
    G = q_IKGH.shape[2]
    q_IKGH = _no_single_query(q_IKGH, k_IKCH.dtype)
    part_IKG = _attend_slots(problem, q_IKGH, k_IKCH, v_IKCH, visible_IC[:, None, None, :], jnp.float32(LOWEST))
    return jax.tree.map(lambda x: x[:, :, :G], part_IKG)


def _no_single_query(q_IKGH: jax.Array, kv_dtype: Any) -> jax.Array:
    """Repeat the query where a head has only one: XLA:CPU's one-row products convert all of a 16-bit operand."""
    if q_IKGH.shape[2] > 1 or kv_dtype == jnp.float32:
        return q_IKGH
    return jnp.repeat(q_IKGH, 2, axis=2)


def _merge_queries(part_JKG: Softmax, token_J: jax.Array) -> Softmax:
    """For every part, the merger of all parts of the same query. A product, because scatters are slower here."""
    same_JJ = token_J[:, None] == token_J
    top_JKG = jnp.max(jnp.where(same_JJ[..., None, None], part_JKG.top, LOWEST), axis=1)
    weight_JKG = jnp.exp(part_JKG.top - top_JKG)
    same_JJ = same_JJ.astype(jnp.float32)
    total_JKG = product("IJ,JKG->IKG", same_JJ, part_JKG.total * weight_JKG)
    out_JKGH = product("IJ,JKGH->IKGH", same_JJ, part_JKG.out * weight_JKG[..., None])
    return Softmax(top_JKG, total_JKG, out_JKGH)


def _attend_slots(
    problem: Any, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, top: jax.Array
) -> Softmax:
    """Attend from queries [..., X, H] to slots [..., C, H]; `visible` broadcasts to [..., X, C].

    `top` [..., X] is a lower bound of the result's.
    """
    score = masked_scores(problem, q, k, visible)
    top = jnp.maximum(score.max(-1), top)
    weight = jnp.exp(score - top[..., None])
    out = product("...XC,...CH->...XH", weight.astype(v.dtype), v)
    return Softmax(top, weight.sum(-1), out)


def _divide(state: Softmax, sinks: jax.Array | None) -> jax.Array:
    """Weighted values over the sum of weights; a sink is one more weight, with no value."""
    if sinks is None:
        return state.out / state.total[..., None]
    top = jnp.maximum(state.top, sinks)
    weight = jnp.exp(state.top - top)
    return state.out * (weight / (state.total * weight + jnp.exp(sinks - top)))[..., None]


PLAIN = Numerics(_add_chunk, _attend_each_item, _add, _merge_queries, _divide)

"""The reference attention with results that depend on a query's own context only, to the last bit.

Neither the other rows of a step, nor how a prompt is cut into chunks, nor whether a query is one of a tile or one
of a list of items changes a bit of its output. It reads, cuts and skips as `reference` does; this module holds the
numerics that differ, and what of XLA:CPU they rely on. It is proven on the CPU only (tests, and `why_not`).

Numerics: the context is cut at fixed positions, into items of equal length for tiles and lists alike. The
part of each item is computed on its own, with nothing carried in. Exponentials have base 2 and what is subtracted
from scores is rounded up to a whole number, so that bringing parts to a common scale multiplies by powers of two, which
rounds nothing: then the order of additions alone decides, and it is the order of the context in both forms.
Sums over slots are products with ones: XLA orders a reduction as suits the shape around it, but a product's entry
depends on its row and its column only. That holds from two rows on, for float32 operands of whole vectors
(`LANES`); the tests find out where it does not. In a list, the product that merges parts adds them in order, and
the zeros between them change nothing.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import numerics, reference, work_lists
from pallas_kernels.ragged_paged_attention.numerics import LOWEST, Numerics, Softmax
from pallas_kernels.ragged_paged_attention.reference import Problem

LAYOUT = reference.LAYOUT
cannot_take = reference.cannot_take
make_plan = reference.make_plan
shared_work = reference.shared_work

LANES = 64
"""Columns to which float32 products are padded: with fewer, XLA:CPU takes other loops for few rows than for many."""

LOG2_E = math.log2(math.e)


def why_not(platform: str) -> str | None:
    """Only the CPU's products have been shown to be invariant."""
    if platform == "cpu":
        return None
    return "its numerics rely on how XLA:CPU computes products, and nobody has shown that of other devices"


def add_chunk(
    problem: Problem, state_KX: Softmax, q_KXH: jax.Array, k_KCH: jax.Array, v_KCH: jax.Array, visible_XC: jax.Array
) -> Softmax:
    """The state with the items of one chunk added, one after the other."""
    (K, C, H), X = k_KCH.shape, q_KXH.shape[1]
    item_slots, _ = work_lists.item_and_chunk_slots(problem.k_BKSH.shape[2])
    score_KXC = masked_scores(problem, q_KXH, k_KCH, visible_XC)
    score_KIXC = score_KXC.reshape(K, X, C // item_slots, item_slots).transpose(0, 2, 1, 3)
    part_KIX = attend_scores(score_KIXC, v_KCH.reshape(K, C // item_slots, item_slots, H))
    parts = [jax.tree.map(lambda x, i=i: x[:, i], part_KIX) for i in range(C // item_slots)]
    return add_in_order([state_KX, *parts])


def attend_items(
    problem: Problem, q_IKGH: jax.Array, k_IKCH: jax.Array, v_IKCH: jax.Array, visible_IC: jax.Array
) -> Softmax:
    """Every query's attention to its item. Never by a product with a single row, which takes a way of its own."""
    G = q_IKGH.shape[2]
    q_IKGH = jnp.repeat(q_IKGH, 2, axis=2) if G == 1 else q_IKGH
    score_IKGC = masked_scores(problem, q_IKGH, k_IKCH, visible_IC[:, None, None, :])
    return jax.tree.map(lambda x: x[:, :, :G], attend_scores(score_IKGC, v_IKCH))


def masked_scores(problem: Problem, q: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """As the reference's, with both operands in float32, in the cache's precision."""
    q, k = q.astype(k.dtype).astype(jnp.float32), k.astype(jnp.float32)
    return numerics.masked_scores(problem, q, k, visible)


def attend_scores(score: jax.Array, v: jax.Array) -> Softmax:
    """Softmax-weighted sums of values [..., C, H] by masked scores [..., X, C], one item each."""
    score = score * LOG2_E
    top = jnp.maximum(jnp.ceil(score.max(-1)), LOWEST)
    weight = jnp.exp2(score - top[..., None])
    H, ones = v.shape[-1], jnp.ones((weight.shape[-1], LANES))
    product = partial(jnp.einsum, "...XC,...CH->...XH")
    total = product(weight.reshape(-1, weight.shape[-1]), ones)[:, 0].reshape(weight.shape[:-1])
    return Softmax(top, total, product(weight, whole_lanes(v))[..., :H])


def whole_lanes(x: jax.Array) -> jax.Array:
    """Columns in float32, padded to whole vectors."""
    x = x.astype(jnp.float32)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)])


def add_in_order(parts: list[Softmax]) -> Softmax:
    """The merger of parts of the same queries, added from the first to the last."""
    top = parts[0].top
    for part in parts[1:]:
        top = jnp.maximum(top, part.top)
    total, out = 0.0, 0.0
    for part in parts:
        scale = power_of_two(part.top - top)
        total, out = total + part.total * scale, out + part.out * scale[..., None]
    return Softmax(top, total, out)


def merge_queries(part_JKG: Softmax, token_J: jax.Array) -> Softmax:
    """For every part, the merger of all parts of the same query, in their order."""
    J, K, G, H = part_JKG.out.shape
    same_JJ = token_J[:, None] == token_J
    top_JKG = jnp.max(jnp.where(same_JJ[..., None, None], part_JKG.top, LOWEST), axis=1)
    scale_JKG = power_of_two(part_JKG.top - top_JKG)
    parts_JKGH = jnp.concatenate([part_JKG.out, part_JKG.total[..., None]], axis=-1) * scale_JKG[..., None]
    sums = jnp.einsum("IJ,JX->IX", same_JJ.astype(jnp.float32), whole_lanes(parts_JKGH.reshape(J, K * G * (H + 1))))
    sums_JKGH = sums[:, : K * G * (H + 1)].reshape(J, K, G, H + 1)
    return Softmax(top_JKG, sums_JKGH[..., H], sums_JKGH[..., :H])


def divide(state: Softmax, sinks: jax.Array | None) -> jax.Array:
    """Weighted values over the sum of weights; a sink is one more weight, with no value."""
    if sinks is None:
        return state.out / state.total[..., None]
    sinks = sinks * LOG2_E
    top = jnp.maximum(state.top, jnp.ceil(sinks))
    scale = power_of_two(state.top - top)
    return state.out * scale[..., None] / (state.total * scale + jnp.exp2(sinks - top))[..., None]


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Exactly 2 ** exponent for whole numbers up to 0; 0 below the least normal float32."""
    biased = jnp.clip(exponent, -127, 0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def add(one: Softmax, other: Softmax) -> Softmax:
    """The merger of two parts of the same queries' contexts."""
    return add_in_order([one, other])


attention = partial(reference.attention, numerics=Numerics(add_chunk, attend_items, add, merge_queries, divide))

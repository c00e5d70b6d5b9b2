"""The least logit that may be drawn, on an NVIDIA GPU (Pallas, Triton lowering): several programs search one row.

A search is five launches. Three surveys weigh each piece of a row above eight cuts. The first cuts are as far below the
row's largest logit as weights fall; the next ones divide what lies between two of those before. Logits that are still
in question, a few of each piece, are gathered, and one program searches these. Each kernel begins with the sums of the
one before. The search for top_k comes first, since top_p counts what top_k leaves.

Layout: logits [S, V] as they are.

Grid: rows, and pieces of `PIECE` logits. A vocabulary of up to `ALONE` logits is searched by one program a row.

Skipping: a search that the row does not want.

Requires: nothing.

Padding: columns beyond the vocabulary count as -inf.

Numerics: float32; weights relative to the row's largest. A row's limit is the same bits beside every other row.

Cost: a search reads the row four times, and both once more for its largest logit. Where too many logits of a piece are
in question, one program reads the row 16 times instead: rows whose logits are all but equal, or a top_k of half the
vocabulary. The whole sampler on an H200, rows of 128,256 logits with a top_p, in milliseconds, of which 0.1 is its
call, with this search and (with a program a row): 1 row 0.15 (0.50), 64 rows 0.39 (0.64), 256 rows 0.94 (1.73). That
was with two surveys of sixteen cuts, and logits divided by the temperature before.

Knows nothing of drawing.

Letters: B pieces of a row, T cuts, C gathered logits of a piece, N of all pieces, W logits of a piece.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.shapes import ceil_div
from pallas_kernels.top_k_top_p import search

PIECE = 4096
WARPS = 4  # of a program that surveys a piece
ALONE = 2 * PIECE
SLOTS = 128  # of a piece, for what is in question; fewer than a hundred, where logits are spread as a normal variable
# How far below a row's largest logit the first cuts are, in weights; the very first one is the floor.
DISTANCES = (jnp.inf, 16.0, 8.0, 4.0, 2.0, 1.0, 0.4, 0.0)
NUM_CUTS = len(DISTANCES)
MOST_PASSES = 20  # of the last search, which is over after at most 18


def cannot_take(logits_SV: Any) -> str | None:
    """It takes any logits."""
    return None


def least_logits(
    logits_SV: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    temperature_S: jax.Array,
    *,
    interpret: Any,
) -> jax.Array:
    """See `top_k_top_p.least_logits`."""
    V = logits_SV.shape[1]
    top_S = jnp.max(logits_SV, axis=1)
    find = functools.partial(_search, logits_SV, top_S, temperature_S, interpret=interpret)
    need_k_S = jnp.where((top_k_S > 0) & (top_k_S < V), top_k_S, 0).astype(jnp.float32)
    kth_S = find(need_k_S, jnp.full_like(top_S, -jnp.inf), by_weight=False)
    floor_S = jnp.maximum(kth_S, top_S + jnp.log(min_p_S) * temperature_S)
    return find(jnp.where(top_p_S < 1.0, top_p_S, 0.0), floor_S, by_weight=True)


def _search(
    logits_SV: jax.Array,
    top_S: jax.Array,
    temperature_S: jax.Array,
    need_S: jax.Array,
    floor_S: jax.Array,
    *,
    by_weight: bool,
    interpret: Any,
) -> jax.Array:
    """The largest t >= floor above which enough lies; the floor where `need` is 0.

    Enough: `need` logits, or if `by_weight` the share `need` of the weight of what is not below the floor.
    """
    (S, V), piece = logits_SV.shape, min(PIECE, pl.next_power_of_2(logits_SV.shape[1]))
    num_pieces = ceil_div(V, piece)
    B = pl.next_power_of_2(num_pieces)  # of the arrays between kernels, where that is simpler
    row = _Row(by_weight, piece, num_pieces)
    outputs = {
        "sums": jax.ShapeDtypeStruct((S, B, NUM_CUTS), jnp.float32),
        "cuts": jax.ShapeDtypeStruct((S, NUM_CUTS), jnp.int32),
        "bounds": jax.ShapeDtypeStruct((S, 2), jnp.int32),
        "weights": jax.ShapeDtypeStruct((S, 2), jnp.float32),
        "counts": jax.ShapeDtypeStruct((S, B), jnp.int32),
        "slots": jax.ShapeDtypeStruct((S, B, SLOTS), jnp.float32),
        "least": jax.ShapeDtypeStruct((S,), jnp.float32),
    }

    def call(kernel: Callable[..., None], grid: tuple[int, ...], names: str, *inputs: jax.Array) -> Any:
        return pl.pallas_call(
            functools.partial(kernel, row),
            out_shape=[outputs[name] for name in names.split()],
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=WARPS if len(grid) == 2 else 8),
            interpret=interpret,
            name=f"top_k_top_p{kernel.__name__}",
        )(logits_SV, top_S, temperature_S, need_S, floor_S, *inputs)

    if V <= ALONE:
        return call(_alone, (S,), "least")[0]
    by_piece = (num_pieces, S)
    far = call(_survey_far, by_piece, "sums cuts")
    near = call(_survey_near, by_piece, "sums cuts bounds weights", *far)
    nearer = call(_survey_near, by_piece, "sums cuts bounds weights", *near)
    in_question = call(_gather, by_piece, "bounds weights counts slots", *nearer)
    return call(_pick, (S,), "least", *in_question)[0]


@dataclasses.dataclass(frozen=True)
class _Row:
    """How a row is weighed and cut: static in all kernels."""

    by_weight: bool
    piece: int
    num_pieces: int

    def load(self, logits_SV: Any, row: jax.Array, piece: Any) -> jax.Array:
        """A piece of a row."""
        column_W = piece * self.piece + jnp.arange(self.piece)
        at = logits_SV.at[row, pl.ds(piece * self.piece, self.piece)]
        return plgpu.load(at, mask=column_W < logits_SV.shape[1], other=-jnp.inf)

    def weigh(self, x_W: jax.Array, top: jax.Array, temperature: jax.Array) -> jax.Array:
        """What each logit weighs."""
        return jnp.exp((x_W - top) * (1.0 / temperature)) if self.by_weight else jnp.ones_like(x_W)

    def totals(self, sums_SBT: Any, row: jax.Array) -> jax.Array:
        """Sums of a row."""
        _, B, T = sums_SBT.shape
        is_there_BT = jnp.broadcast_to(jnp.arange(B)[:, None] < self.num_pieces, (B, T))
        return jnp.sum(plgpu.load(sums_SBT.at[row], mask=is_there_BT, other=0.0), axis=0)


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """What a search knows: at or above `low` lies what it needs, at or above `high` too little, which is `above`.

    `low` and `high` are places in the order of floats, see `search`.
    """

    low: jax.Array
    high: jax.Array
    need: jax.Array
    above: jax.Array

    @classmethod
    def of_row(cls, top: jax.Array, floor: jax.Array, need: jax.Array) -> "_Bounds":
        """What is known before a search, if need > 0."""
        return cls(_order_of_float(floor), _order_of_float(top) + 1, need, jnp.float32(0.0))

    @classmethod
    def load(cls, bounds_S2: Any, weights_S2: Any, row: jax.Array) -> "_Bounds":
        return cls(bounds_S2[row, 0], bounds_S2[row, 1], weights_S2[row, 0], weights_S2[row, 1])

    def store(self, bounds_S2: Any, weights_S2: Any, row: jax.Array) -> None:
        bounds_S2[row, 0], bounds_S2[row, 1] = self.low, self.high
        weights_S2[row, 0], weights_S2[row, 1] = self.need, self.above

    def narrowed(self, cuts_T: jax.Array, sums_T: jax.Array) -> "_Bounds":
        """What is known when `sums` are known to lie at or above some cuts."""
        enough_T = sums_T >= self.need
        low = jnp.maximum(self.low, jnp.max(jnp.where(enough_T, cuts_T, search.LOWEST)))
        high = jnp.minimum(self.high, jnp.min(jnp.where(enough_T, self.high, cuts_T)))
        above = jnp.maximum(self.above, jnp.max(jnp.where(enough_T, 0.0, sums_T)))
        return _Bounds(low, high, self.need, above)

    def cuts(self, top: jax.Array) -> list[jax.Array]:
        """Cuts between the bounds: at equal distances, or, where `low` is -inf, farther and farther below `top`.

        Not at equal distances in the order of floats, most of which are next to zero.
        """
        low, high = search.float_of_order(self.low), search.float_of_order(self.high)
        result = []
        for i in range(NUM_CUTS):
            between = low + (high - low) * ((i + 1) / (NUM_CUTS + 1))
            cut = jnp.where(low > -jnp.inf, between, top - (top - high) * 2.0 ** (i + 1))
            result.append(jnp.clip(_order_of_float(cut), self.low, self.high))
        return result

    def is_found(self) -> jax.Array:
        """Whether nothing lies between the bounds."""
        return lax.shift_right_logical(self.high - self.low, 1) == 0

    def searched(self, weigh: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]) -> jax.Array:
        """The largest threshold at or above which `weigh` finds enough, beside what is `above`."""

        def quarter(state):
            i, low, high = state
            step = jnp.maximum(lax.shift_right_logical(high - low, 2), 1)
            weights = weigh([search.float_of_order(low + step * (i + 1)) for i in range(search.NUM_THRESHOLDS)])
            num_enough = sum((self.above + weight >= self.need).astype(jnp.int32) for weight in weights)
            low += step * num_enough
            return i + 1, low, jnp.where(num_enough < search.NUM_THRESHOLDS, jnp.minimum(high, low + step), high)

        def goes_on(state):
            i, low, high = state
            return (i < MOST_PASSES) & ~dataclasses.replace(self, low=low, high=high).is_found()

        _, low, _ = lax.while_loop(goes_on, quarter, (jnp.int32(0), self.low, self.high))
        return search.float_of_order(low)


def _survey_far(row: _Row, logits_SV, top_S, temperature_S, need_S, floor_S, sums_SBT, cuts_ST):
    """Weigh a piece above the first cuts."""
    piece, s = pl.program_id(0), pl.program_id(1)
    top, floor = top_S[s], floor_S[s]

    @pl.when(need_S[s] > 0.0)
    def _():
        temperature = temperature_S[s]
        cuts = [_order_of_float(jnp.maximum(floor, top - distance * temperature)) for distance in DISTANCES]
        _weigh_piece(row, logits_SV, s, piece, top, temperature, cuts, sums_SBT, cuts_ST)


def _survey_near(row: _Row, logits_SV, top_S, temperature_S, need_S, floor_S, sums_SBT, cuts_ST, *refs):
    """Weigh a piece above cuts between the two of a survey between which the answer lies. `refs`: the bounds before
    that survey, if it was not the first, and what is written."""
    *known, next_sums_SBT, next_cuts_ST, bounds_S2, weights_S2 = refs
    piece, s = pl.program_id(0), pl.program_id(1)
    top = top_S[s]

    @pl.when(need_S[s] > 0.0)
    def _():
        sums_T = row.totals(sums_SBT, s)
        if known:
            bounds = _Bounds.load(*known, s)
        else:
            share = jnp.max(sums_T) if row.by_weight else 1.0  # of the floor, above which most lies
            bounds = _Bounds.of_row(top, floor_S[s], need_S[s] * share)
        bounds = bounds.narrowed(cuts_ST[s, :], sums_T)
        cuts = bounds.cuts(top)
        _weigh_piece(row, logits_SV, s, piece, top, temperature_S[s], cuts, next_sums_SBT, next_cuts_ST)

        @pl.when(piece == 0)
        def _():
            bounds.store(bounds_S2, weights_S2, s)


def _weigh_piece(
    row: _Row, logits_SV, s, piece, top: jax.Array, temperature: jax.Array, cuts: Sequence[jax.Array], sums_SBT, cuts_ST
):
    x_W = row.load(logits_SV, s, piece)
    weight_W = row.weigh(x_W, top, temperature)
    for i, cut in enumerate(cuts):
        sums_SBT[s, piece, i] = jnp.sum(jnp.where(x_W >= search.float_of_order(cut), weight_W, 0.0))

    @pl.when(piece == 0)
    def _():
        for i, cut in enumerate(cuts):
            cuts_ST[s, i] = cut


def _gather(
    row: _Row, logits_SV, top_S, temperature_S, need_S, floor_S, sums_SBT, cuts_ST, known_S2, known_weights_S2,
    bounds_S2, weights_S2, counts_SB, slots_SBC,
):  # fmt: skip
    """The logits of a piece that lie between the bounds, as many as have room."""
    piece, s, last = pl.program_id(0), pl.program_id(1), slots_SBC.shape[2] - 1

    @pl.when(need_S[s] > 0.0)
    def _():
        bounds = _Bounds.load(known_S2, known_weights_S2, s).narrowed(cuts_ST[s, :], row.totals(sums_SBT, s))
        x_W = row.load(logits_SV, s, piece)
        low, high = search.float_of_order(bounds.low), search.float_of_order(bounds.high)
        is_between_W = (x_W >= low) & (x_W < high) & (x_W > -jnp.inf) & ~bounds.is_found()
        count = jnp.sum(is_between_W.astype(jnp.int32))
        counts_SB[s, piece] = count

        @pl.when(count > 0)
        def _():
            place_W = jnp.cumsum(is_between_W.astype(jnp.int32)) - 1
            has_room_W = is_between_W & (place_W < last)  # the last place stays for those without one
            plgpu.store(slots_SBC.at[s, piece, jnp.where(has_room_W, place_W, last)], x_W, mask=has_room_W)

        @pl.when(piece == 0)
        def _():
            bounds.store(bounds_S2, weights_S2, s)


def _pick(
    row: _Row, logits_SV, top_S, temperature_S, need_S, floor_S, bounds_S2, weights_S2, counts_SB, slots_SBC, least_S
):
    """Search what was gathered of a row, or the row where not all had room."""
    s, (_, B, C) = pl.program_id(0), slots_SBC.shape
    top = top_S[s]
    least_S[s] = floor_S[s]

    @pl.when(need_S[s] > 0.0)
    def _():
        bounds = _Bounds.load(bounds_S2, weights_S2, s)
        count_B = plgpu.load(counts_SB.at[s], mask=jnp.arange(B) < row.num_pieces, other=0)
        most = jnp.max(count_B)

        @pl.when(most < C)
        def _():
            x_BC = plgpu.load(slots_SBC.at[s], mask=jnp.arange(C)[None] < count_B[:, None], other=-jnp.inf)
            x_N = x_BC.reshape(-1)  # Triton's lowering sums over one axis at a time
            weight_N = row.weigh(x_N, top, temperature_S[s])
            weigh = lambda cuts: [jnp.sum(jnp.where(x_N >= cut, weight_N, 0.0)) for cut in cuts]
            least_S[s] = jnp.maximum(floor_S[s], bounds.searched(weigh))

        @pl.when(most >= C)
        def _():
            found = dataclasses.replace(bounds, above=0.0).searched(
                _weigher_of_row(row, logits_SV, s, top, temperature_S[s])
            )
            least_S[s] = jnp.maximum(floor_S[s], found)


def _alone(row: _Row, logits_SV, top_S, temperature_S, need_S, floor_S, least_S):
    """Search a row."""
    s = pl.program_id(0)
    top, floor = top_S[s], floor_S[s]
    least_S[s] = floor

    @pl.when(need_S[s] > 0.0)
    def _():
        weigh, need = _weigher_of_row(row, logits_SV, s, top, temperature_S[s]), need_S[s]
        if row.by_weight:
            need *= weigh([floor])[0]
        least_S[s] = jnp.maximum(floor, _Bounds.of_row(top, floor, need).searched(weigh))


def _weigher_of_row(
    row: _Row, logits_SV, s, top: jax.Array, temperature: jax.Array
) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """What a whole row weighs at or above some thresholds."""

    def weigh(cuts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        def step(piece, sums_W):
            x_W = row.load(logits_SV, s, piece)
            weight_W = row.weigh(x_W, top, temperature)
            return tuple(sum_W + jnp.where(x_W >= cut, weight_W, 0.0) for sum_W, cut in zip(sums_W, cuts))

        zeros = (jnp.zeros(row.piece, jnp.float32),) * len(cuts)
        return [jnp.sum(x_W) for x_W in lax.fori_loop(0, ceil_div(logits_SV.shape[1], row.piece), step, zeros)]

    return weigh


def _order_of_float(x: jax.Array) -> jax.Array:
    """Inverse of `search.float_of_order`."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

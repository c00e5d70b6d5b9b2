"""top_k, top_p and min_p as one number a row: the least logit that may still be drawn.

Most rows are settled by their C largest logits; a search over thresholds, which reads the whole vocabulary 16 times,
runs only when a row is not. Neither sorts the vocabulary. Measured on one CPU core, per row of 262,144 logits: the
largest 256 0.6 ms by `lax.top_k` and 0.1 ms by the kernel of the extra `cpu`, threshold search 1.6 ms, sort 80 ms.

On a TPU and a GPU a kernel finds the limits, without candidates. On a TPU `lax.top_k` looks for one candidate after
the other. What the compiler for a v6e makes of the plain sampler, 256 rows of 128,256 logits, all with a top_p, in
millions of instruction bundles and of cycles as it estimates them: 37 with candidates, of which `lax.top_k` has 34.9,
and 47 as soon as one row needs the search; 5.5 with the kernel, of which it has 2.1 itself and drawing from the whole
vocabulary 1.8. Counted, not timed. On a GPU `lax.top_k` sorts, and the search is a loop whose condition the host reads:
every step then waits for the host, whatever its rows want.
"""

import functools
from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.sampling.rows import RowParams
from pallas_kernels import top_k, top_k_top_p
from pallas_kernels.top_k_top_p.xla import largest_threshold

NUM_CANDIDATES = 256
KERNELS = ("tpu", "gpu")
"""Backends of `top_k_top_p` that find a row's limits in one launch."""
INTERPRET = "-interpret"


@dataclass(frozen=True)
class LimitsMethod:
    """How limits are found: by candidates, or, if `kernel` names one, by a kernel on the devices of `mesh`.

    `kernel`: "" for none, "tpu" or "gpu", with "-interpret" behind it to simulate that. `largest`: the backend of
    `top_k`, which finds candidates, and the tokens whose log probabilities are asked for.
    """

    kernel: str = ""
    mesh: Mesh | None = None
    num_candidates: int = NUM_CANDIDATES
    largest: str = "reference"

    @property
    def reads_once(self) -> bool:
        """Whether a number and its place are looked for in one pass, which a GPU does as fast as for the number."""
        return self.kernel.removesuffix(INTERPRET) == "gpu"


BY_CANDIDATES = LimitsMethod()


def choose_method(platform: str, mesh: Mesh, vocabulary: int, *, simulated: str = "") -> LimitsMethod:
    """The best for a platform. `simulated`: the platform, "tpu" or "gpu", as which this one is to behave."""
    logits_SV = jax.ShapeDtypeStruct((1, vocabulary), jnp.float32)
    backend = top_k_top_p.choose_backend("auto", simulated or platform, logits_SV)
    if backend not in KERNELS:
        # XLA would not split a kernel's rows over devices.
        return LimitsMethod(largest=top_k.choose_backend("auto", platform) if mesh.size == 1 else "reference")
    return LimitsMethod(backend + INTERPRET if simulated else backend, mesh)


@flax.struct.dataclass
class Limits:
    """Row s may draw tokens with logit >= `least_S[s]`, after the temperature.

    `candidates_SC` are its C largest logits, `candidate_ids_SC` their tokens. A row is `narrow` when no other token
    can be drawn, and the draw needs nothing but the candidates.
    """

    least_S: jax.Array
    narrow_S: jax.Array
    candidates_SC: jax.Array
    candidate_ids_SC: jax.Array


def least_by_kernel(logits_SV: jax.Array, rows: RowParams, method: LimitsMethod) -> jax.Array:
    """The least logit, before the temperature, of the rows that have limits, -inf in the others; each device searches
    some of the rows.

    The same tokens as those of `sampling_limits`, but where top_p's sum of the likeliest is as near to top_p as sums
    round: then one token more or less may stay. A row's number depends on nothing but the row.
    """
    num_rows = len(logits_SV)
    limited_S = rows.limited_S
    limits = (
        jnp.where(limited_S, rows.top_k_S, 0),
        jnp.where(limited_S, rows.top_p_S, 1.0),
        jnp.where(limited_S, rows.min_p_S, 0.0),
        jnp.where(limited_S, rows.temperature_S, 1.0),
    )
    missing = -num_rows % method.mesh.size
    padded = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in (logits_SV, *limits)]
    by_row = PartitionSpec(method.mesh.axis_names)
    find = jax.shard_map(
        functools.partial(
            top_k_top_p.least_logits,
            backend=method.kernel.removesuffix(INTERPRET),
            interpret=interpret_mode(method.kernel),
        ),
        mesh=method.mesh,
        in_specs=(by_row,) * 5,
        out_specs=by_row,
        check_vma=False,
    )
    return find(*padded)[:num_rows]


def interpret_mode(kernel: str) -> object:
    """What Pallas takes as `interpret`."""
    if kernel != "tpu" + INTERPRET:
        return kernel.endswith(INTERPRET)
    from jax.experimental.pallas import tpu as pltpu  # a quarter of a second, which only tests wait for

    return pltpu.InterpretParams()


def sampling_limits(logits_SV: jax.Array, rows: RowParams, method: LimitsMethod) -> Limits:
    """Limits for logits that were divided by the temperature, by candidates.

    min_p goes first, by probability relative to the largest; then top_k, where tokens that tie with the k-th stay;
    then top_p over what is left, renormalised: a token stays while the tokens strictly more likely than it have
    less than top_p together. So one always stays, and tokens of equal probability stay or go together.
    """
    num_tokens = logits_SV.shape[1]
    num_candidates = min(method.num_candidates, num_tokens)
    candidates_SC, ids_SC = largest(logits_SV, num_candidates, method)
    first_S, last_S = candidates_SC[:, 0], candidates_SC[:, -1]
    weights_SV = jnp.exp(logits_SV - first_S[:, None])

    kth_S, kth_known_S = kth_largest(candidates_SC, rows.top_k_S, num_tokens)
    wide_k_S = rows.random_S & ~kth_known_S
    ones_SV = jnp.ones((1, 1), jnp.float32)
    kth_S = search_if(wide_k_S, kth_S, logits_SV, ones_SV, rows.top_k_S.astype(jnp.float32))
    floor_S = jnp.maximum(kth_S, first_S + jnp.log(rows.min_p_S))

    total_S = row_sums(jnp.where(logits_SV >= floor_S[:, None], weights_SV, 0.0))
    need_S = rows.top_p_S * total_S
    nucleus_S, reached_S = nucleus_of_candidates(candidates_SC, floor_S, need_S)
    nucleus_known_S = reached_S | (num_candidates == num_tokens)
    cuts_S = rows.top_p_S < 1.0
    nucleus_S = search_if(rows.random_S & cuts_S & ~nucleus_known_S, nucleus_S, logits_SV, weights_SV, need_S)

    least_S = jnp.where(cuts_S, jnp.maximum(floor_S, nucleus_S), floor_S)
    narrow_S = (least_S > last_S) | (num_candidates == num_tokens)
    return Limits(least_S, narrow_S, candidates_SC, ids_SC)


def row_sums(x_SV: jax.Array) -> jax.Array:
    """The sum of every row, as a product with ones.

    An entry of a product of two or more rows depends on its own row only; how XLA orders a reduction depends on the
    number of rows, and then a draw would depend on how many requests are drawn for.
    """
    ones_2V = jnp.ones((2, x_SV.shape[1]), x_SV.dtype)
    return jnp.einsum("SV,OV->SO", x_SV, ones_2V, precision=jax.lax.Precision.HIGHEST)[:, 0]


def largest(logits_SV: jax.Array, count: int, method: LimitsMethod) -> tuple[jax.Array, jax.Array]:
    """The largest logits, best first, and their token ids."""
    refusal = top_k.backends(method.largest, logits_SV, count)[method.largest]
    return top_k.top_k(logits_SV, count, backend="reference" if refusal else method.largest)


def kth_largest(candidates_SC: jax.Array, top_k_S: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """(The k-th largest logit, -inf where top_k keeps all; whether it is among the candidates)."""
    num_candidates = candidates_SC.shape[1]
    keeps_all_S = (top_k_S <= 0) | (top_k_S >= num_tokens)
    idx_S = jnp.clip(top_k_S - 1, 0, num_candidates - 1)
    value_S = jnp.take_along_axis(candidates_SC, idx_S[:, None], axis=1)[:, 0]
    return jnp.where(keeps_all_S, -jnp.inf, value_S), keeps_all_S | (top_k_S <= num_candidates)


def nucleus_of_candidates(
    candidates_SC: jax.Array, floor_S: jax.Array, need_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(Least logit of the nucleus, as far as the candidates show it; whether they hold `need` weight)."""
    kept_SC = candidates_SC >= floor_S[:, None]
    weights_SC = jnp.where(kept_SC, jnp.exp(candidates_SC - candidates_SC[:, :1]), 0.0)
    above_SC = jnp.cumsum(weights_SC, axis=1) - weights_SC
    count_S = jnp.sum(kept_SC & (above_SC < need_S[:, None]), axis=1)
    last_S = jnp.take_along_axis(candidates_SC, jnp.maximum(count_S - 1, 0)[:, None], axis=1)[:, 0]
    return last_S, count_S < candidates_SC.shape[1]


def search_if(
    wanted_S: jax.Array, known_S: jax.Array, logits_SV: jax.Array, weights_SV: jax.Array, need_S: jax.Array
) -> jax.Array:
    """`known_S`, replaced by a search in the rows that want it; no work when none does."""
    found_S = jax.lax.cond(jnp.any(wanted_S), largest_threshold, lambda *_: known_S, logits_SV, weights_SV, need_S)
    return jnp.where(wanted_S, found_S, known_S)

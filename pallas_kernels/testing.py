"""What tests of attention kernels share: an oracle, a problem made from a case, and tolerances.

The oracle is per-row dense attention in numpy float64: too simple to be wrong. It knows no blocks.
"""

import dataclasses
from collections.abc import Callable
from itertools import pairwise, takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES, SharedWork, fill_spans
from pallas_kernels.ragged_paged_attention.work_lists import item_and_chunk_slots


def dense_attention(
    q_QNH: np.ndarray,
    k_PKH: np.ndarray,
    v_PKH: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: np.ndarray | None = None,
    both_ways: tuple[tuple[int, int], ...] = (),
) -> np.ndarray:
    """Causal attention of the last Q of P tokens of one request over all P, in float64; those at positions [begin, end)
    of an entry of `both_ways` see each other too, whichever comes first."""
    q_QNH, k_PKH, v_PKH = (np.asarray(x, np.float64) for x in (q_QNH, k_PKH, v_PKH))
    (Q, N, _H), (P, K, _) = q_QNH.shape, k_PKH.shape
    k_PNH, v_PNH = (np.repeat(x, N // K, axis=1) for x in (k_PKH, v_PKH))
    score_NQP = scale * np.einsum("QNH,PNH->NQP", q_QNH, k_PNH)
    if soft_cap is not None:
        score_NQP = soft_cap * np.tanh(score_NQP / soft_cap)
    distance_QP = np.arange(P - Q, P)[:, None] - np.arange(P)
    visible_QP = distance_QP >= 0
    for begin, end in both_ways:
        is_in_P = (np.arange(P) >= begin) & (np.arange(P) < end)
        visible_QP |= is_in_P[P - Q :, None] & is_in_P
    visible_QP &= distance_QP < (window or P)
    weight_NQP = np.where(visible_QP, np.exp(score_NQP), 0)
    sink_N11 = 0 if sinks_N is None else np.exp(np.asarray(sinks_N, np.float64))[:, None, None]
    weight_NQP /= weight_NQP.sum(-1, keepdims=True) + sink_N11
    return np.einsum("NQP,PNH->QNH", weight_NQP, v_PNH)


@dataclasses.dataclass
class Step:
    """One step of a case in numpy float32: what goes into the kernel, and each request's whole context.

    Every slot of `k_BKSH`, `v_BKSH` that holds no token which a query may still see is NaN, the null block
    included; block ids that must not be looked up point outside of the pool.
    """

    q_TNH: np.ndarray
    k_TKH: np.ndarray
    v_TKH: np.ndarray
    k_BKSH: np.ndarray
    v_BKSH: np.ndarray
    sinks_N: np.ndarray | None
    query_start_loc_R1: np.ndarray
    seq_lens_R: np.ndarray
    block_tables_RM: np.ndarray
    shared_6R: np.ndarray  # what `spans_of_step` finds
    visible_end_T: np.ndarray | None  # of tokens; anything for padding. None: the case is causal
    contexts: list[tuple[np.ndarray, np.ndarray]]  # keys and values [P, K, H] of each row


def make_step(case: Any, dtype: Any, seed: int = 0) -> Step:
    """Random numbers, representable in `dtype`, for a `Case`."""
    rng = np.random.default_rng(seed)
    K, N, H, S = case.num_kv_heads, case.num_kv_heads * case.group_size, case.head_dim, case.block_size

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype).astype(np.float32)

    num_tokens = case.num_tokens + case.padding
    contexts = [(normal(cached + new, K, H), normal(cached + new, K, H)) for cached, new in case.rows]
    V = case.value_dim or H
    for _, v_PKH in contexts:
        v_PKH[..., V:] = 0
    for row, other, num_blocks in case.shared:
        for one_PKH, other_PKH in zip(contexts[row], contexts[other]):
            one_PKH[: num_blocks * S] = other_PKH[: num_blocks * S]
    k_TKH, v_TKH = (np.full((num_tokens, K, H), np.nan, np.float32) for _ in range(2))
    start_R = np.cumsum([0] + [new for _, new in case.rows])
    for (cached, new), start, (k_PKH, v_PKH) in zip(case.rows, start_R, contexts):
        k_TKH[start : start + new], v_TKH[start : start + new] = k_PKH[cached:], v_PKH[cached:]
    seq_lens = [cached + new for cached, new in case.rows] + [0] * case.empty_rows
    block_tables_RM, num_blocks = _block_tables(case, seq_lens, rng)
    k_BKSH, v_BKSH = (np.full((num_blocks, K, S, H), np.nan, np.float32) for _ in range(2))
    for (cached, _), table_M, (k_PKH, v_PKH) in zip(case.rows, block_tables_RM, contexts):
        position = np.arange(_first_visible(case, cached), cached)
        k_BKSH[table_M[position // S], :, position % S] = k_PKH[position]
        v_BKSH[table_M[position // S], :, position % S] = v_PKH[position]
    return Step(
        q_TNH=normal(num_tokens, N, H),
        k_TKH=k_TKH,
        v_TKH=v_TKH[..., :V],
        k_BKSH=k_BKSH,
        v_BKSH=v_BKSH,
        sinks_N=normal(N) if case.sinks else None,
        query_start_loc_R1=np.append(start_R, [start_R[-1]] * case.empty_rows).astype(np.int32),
        seq_lens_R=np.array(seq_lens, np.int32),
        block_tables_RM=block_tables_RM,
        shared_6R=spans_of_step(case, block_tables_RM),
        visible_end_T=visible_ends(case) if case.both_ways else None,
        contexts=contexts,
    )


def visible_ends(case: Any) -> np.ndarray:
    """One past the last position that each token sees; garbage for padding."""
    ends = []
    for row, (cached, new) in enumerate(case.rows):
        runs = [run[1:] for run in case.both_ways if run[0] == row]
        for position in range(cached, cached + new):
            ends.append(max([position + 1, *(end for begin, end in runs if begin <= position < end)]))
    return np.array([*ends, *[10**8, -7, 3] * case.padding][: case.num_tokens + case.padding], np.int32)


def spans_of_step(case: Any, block_tables_RM: np.ndarray) -> np.ndarray:
    """What `sharing.fill_spans` finds in a step whose rows share blocks; two are enough to share."""
    work = SharedWork(item_and_chunk_slots(case.block_size)[0], tile=10**6, break_even=1)
    unit_blocks = work.unit // case.block_size
    keys = []
    for (cached, new), table_M in zip(case.rows, block_tables_RM.tolist()):
        num_units = (cached + new) // work.unit
        keys.append([tuple(table_M[i * unit_blocks : (i + 1) * unit_blocks]) for i in range(num_units)])
    places = sorted(range(len(keys)), key=keys.__getitem__)
    equal = lambda pair: pair[0] == pair[1]
    common = [sum(1 for _ in takewhile(equal, zip(keys[one], keys[other]))) for one, other in pairwise(places)]
    shared_6R = np.zeros((NUM_LINES, len(block_tables_RM)), np.int32)
    fill_spans(shared_6R, places, [0, *common], np.array([new for _, new in case.rows]), work)
    return shared_6R


def expected(case: Any, step: Step) -> np.ndarray:
    """out_TNH of the oracle, zeros for padding tokens."""
    out_TNH = np.zeros(step.q_TNH.shape)
    for row, (k_PKH, v_PKH) in enumerate(step.contexts):
        tokens = slice(*step.query_start_loc_R1[row : row + 2])
        out_TNH[tokens] = dense_attention(
            step.q_TNH[tokens],
            k_PKH,
            v_PKH,
            scale=case.head_dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks_N=step.sinks_N,
            both_ways=tuple((begin, end) for of, begin, end in case.both_ways if of == row),
        )
    return out_TNH[..., : case.value_dim]


def layer_of(
    shape: Any, backend: str, num_blocks: int = 1024, blocks_per_row: int = 64
) -> tuple[Callable, tuple[Any, ...]]:
    """(function, shapes of its arguments): one layer's attention in a step of a `ServingShape`, the cache first; what
    rows share and what tokens see ahead last, if the shape has these."""
    K, N, H, T, R = shape.num_kv_heads, shape.num_heads, shape.head_dim, shape.num_tokens, shape.num_rows
    S, dtype, scales = shape.block_size, shape.kv_dtype, shape.kv_scales

    def layer(kv, q_TNH, k_TKH, v_TKH, sinks_N, num_seqs, start_R1, seq_lens_R, tables_RM, *more):
        more = dict(zip(names, more))
        metadata = rpa.make_metadata(
            num_seqs,
            start_R1,
            seq_lens_R,
            tables_RM,
            num_tokens=T,
            block_size=S,
            window=shape.window,
            backend=backend,
            decodes_only=shape.decodes_only,
            **more,
        )
        return rpa.ragged_paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            kv,
            metadata,
            sinks_N=sinks_N if shape.sinks else None,
            scale=H**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            backend=backend,
        )

    kv = jax.eval_shape(lambda: rpa.kv_zeros(num_blocks, S, K, H, dtype, backend, scales))
    new = [jax.ShapeDtypeStruct((T, heads, H), shape.dtype) for heads in (N, K, K)]
    shared = {"shared_6R": (NUM_LINES, R)} if shape.shares else {}
    names = shared | ({"visible_end_T": (T,)} if shape.sees_ahead else {})
    where = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((), (R + 1,), (R,), (R, blocks_per_row), *names.values())]
    return layer, (kv, *new, jax.ShapeDtypeStruct((N,), jnp.float32), *where)


def tolerance(dtype: Any, reduction_length: int) -> float:
    """Largest difference to the oracle for values of unit size: rounding of `dtype`, averaged over a reduction.

    Outputs and softmax weights are rounded once each in `dtype`; sums are float32 and lose with their length.
    """
    return 4 * float(jnp.finfo(dtype).eps) + 8 * float(np.finfo(np.float32).eps) * np.sqrt(reduction_length)


def _first_visible(case: Any, cached: int) -> int:
    """The first position that this step's queries may see, of a row with `cached` tokens."""
    return 0 if case.window is None else max(0, cached - case.window + 1)


def _block_tables(case: Any, seq_lens: list[int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Shuffled blocks for every row, and the size of the pool; ids that nobody needs are not in the pool."""
    S = case.block_size
    num_needed = [-(-n // S) for n in seq_lens]
    num_blocks = sum(num_needed) + 3
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    tables_RM = rng.choice([-7, -1, num_blocks, 10**8], size=(max(len(seq_lens), 1), max(num_needed, default=0) + 2))
    for row, (cached, _) in enumerate(case.rows):
        for column in range(_first_visible(case, cached) // S, num_needed[row]):
            tables_RM[row, column] = next(ids)
    for row, other, blocks in case.shared:
        hold = [_first_visible(case, case.rows[i][0]) // S for i in (row, other)]
        tables_RM[row, max(hold) : blocks] = tables_RM[other, max(hold) : blocks]
    return tables_RM.astype(np.int32), num_blocks


def bits(x: Any) -> np.ndarray:
    """The array's bytes as unsigned integers of its element size, so that NaNs compare by their payload."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def is_simulated(platform: str) -> bool:
    """Whether kernels for "gpu" or "tpu" are interpreted by tests in this process: everywhere but on such a device."""
    return jax.default_backend() != platform


# Half of a suite's time would be LLVM's, for programs that run once. On an accelerator kernels are as users have them.
QUICK_COMPILE = (
    {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} if is_simulated("gpu") else {}
)


def run_once(function: Any, *operands: Any) -> Any:
    """`function(*operands)` as one program, compiled for one run."""
    operands = jax.tree.map(jnp.asarray, operands)
    return jax.jit(function, compiler_options=QUICK_COMPILE)(*operands)


def quantized_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Values of `dtype`, uniform over its range (float8: over [-448, 448]), made without any program."""
    dtype = jnp.dtype(dtype)
    largest = largest_value(dtype)
    if dtype.name.startswith("int"):
        return rng.integers(-largest, largest + 1, shape).astype(dtype)
    return rng.uniform(-largest, largest, shape).astype(dtype)


def largest_value(dtype: Any) -> int:
    return {"int8": 127, "int4": 7, "float4_e2m1fn": 6}.get(jnp.dtype(dtype).name, 448)


def unit_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, reduction_length: int) -> np.ndarray:
    """Scales that give sums of `reduction_length` products of `quantized_values` and unit numbers unit size."""
    unit = np.sqrt(3 / reduction_length) / largest_value(dtype)
    return rng.uniform(0.7 * unit, 1.3 * unit, shape).astype(np.float32)

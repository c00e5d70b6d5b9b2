"""Runs one step of a case on any backend, with the cache in the backend's own layout, and compares with the oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.testing import QUICK_COMPILE, Step, expected, make_step, tolerance


def marks(is_quick: bool) -> Any:
    """The tests that are not quick are the same code with other sizes."""
    return () if is_quick else pytest.mark.exhaustive


def run(case: Case, step: Step, dtype: Any, backend: str, **changes: Any) -> tuple[np.ndarray, rpa.KVTensor]:
    """(out_TNH, cache after the step). `changes` lets mutants pass other settings than the case's."""
    return attend_step(case, step, dtype, backend, packed(step.k_BKSH, step.v_BKSH, dtype, backend), **changes)


def attend_step(
    case: Case, step: Step, dtype: Any, backend: str, kv: rpa.KVTensor, **changes: Any
) -> tuple[np.ndarray, rpa.KVTensor]:
    """The same over a cache that is already in the backend's layout."""
    settings = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.head_dim**-0.5} | changes

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def attend(q_TNH, k_TKH, v_TKH, kv, sinks_N, shared_6R, visible_end_T, num_seqs, *where):
        metadata = rpa.make_metadata(
            num_seqs,
            *where,
            num_tokens=q_TNH.shape[0],
            block_size=case.block_size,
            window=settings["window"],
            backend=backend,
            decodes_only=all(new <= 1 for _, new in case.rows),
            shared_6R=shared_6R,
            visible_end_T=visible_end_T,
        )
        return rpa.ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, kv, metadata, sinks_N=sinks_N, backend=backend, **settings
        )

    shares = case.shared and rpa.shared_work(backend, case.num_tokens, case.block_size) is not None
    heads = step.q_TNH, step.k_TKH, step.v_TKH
    q_TNH, k_TKH, v_TKH = (None if x is None else jnp.asarray(x, dtype) for x in heads)
    out_TNH, kv = attend(
        q_TNH,
        k_TKH,
        v_TKH,
        kv,
        step.sinks_N,
        step.shared_6R if shares else None,
        step.visible_end_T,
        len(case.rows),
        step.query_start_loc_R1,
        step.seq_lens_R,
        step.block_tables_RM,
    )
    return np.asarray(out_TNH, np.float32), kv


def packed(k_BKSH: np.ndarray, v_BKSH: np.ndarray, dtype: Any, backend: str) -> rpa.KVTensor:
    """The cache with these keys and values; where a whole slot is poison, so are its padding lanes."""
    arrays = rpa.kv_layout(backend).pack(*(jnp.asarray(x, dtype).swapaxes(1, 2) for x in (k_BKSH, v_BKSH)))
    poison_BKS1 = np.isnan(k_BKSH).all(axis=-1, keepdims=True)
    return rpa.KVTensor(tuple(jnp.where(poison_BKS1, jnp.nan, x).astype(dtype) for x in arrays))


def after(case: Case, step: Step) -> tuple[np.ndarray, np.ndarray]:
    """(k_BKSH, v_BKSH) as they should be after the step: nothing changes but the slots of the new tokens."""
    caches = step.k_BKSH.copy(), step.v_BKSH.copy()
    for row, (cached, new) in enumerate(case.rows):
        position = np.arange(cached, cached + new)
        block = step.block_tables_RM[row, position // case.block_size]
        for cache_BKSH, context_PKH in zip(caches, step.contexts[row]):
            cache_BKSH[block, :, position % case.block_size] = context_PKH[cached:]
    return caches


def error(case: Case, out_TNH: np.ndarray, step: Step) -> float:
    """The largest difference to the oracle; infinity where something is not a number."""
    difference = np.abs(out_TNH - expected(case, step)).max(initial=0)
    return float(difference) if np.isfinite(difference) else np.inf


def case_tolerance(case: Case, dtype: Any) -> float:
    return tolerance(dtype, max((sum(row) for row in case.rows), default=1))


def check_case(case: Case, dtype: Any, backend: str) -> None:
    """A step gives what dense attention gives, zeros for padding, and changes only the slots of its new tokens."""
    step = make_step(case, dtype)
    out_TNH, kv = run(case, step, dtype, backend)
    difference, allowed = error(case, out_TNH, step), case_tolerance(case, dtype)
    assert difference <= allowed, f"off by {difference}, allowed are {allowed}"
    assert (out_TNH[case.num_tokens :] == 0).all()
    should = packed(*after(case, step), dtype, backend)
    for is_, should_be in zip(kv.arrays, should.arrays):
        np.testing.assert_array_equal(np.asarray(is_, np.float32), np.asarray(should_be, np.float32))

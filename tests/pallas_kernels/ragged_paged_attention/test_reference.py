"""The reference backend against dense attention in float64, with everything poisoned that nobody owns."""

import dataclasses
import functools
import inspect
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention import numerics, reference, work_lists
from pallas_kernels.ragged_paged_attention.cases import BOTH_WAYS_CASES, CASES, SHARED_CASES, Case
from pallas_kernels.testing import make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import after, case_tolerance, error
from tests.pallas_kernels.ragged_paged_attention.one_step import run as run_on_backend

CASE = {case.name: case for case in (*CASES, *SHARED_CASES, *BOTH_WAYS_CASES)}
MIXED = CASE["decodes and prompts in any order"]
SHARING = CASE["rows that share beginnings"]
BOTH_WAYS, IN_WINDOW = CASE["both ways"], CASE["both ways, window shorter than runs"]


run = functools.partial(run_on_backend, backend="reference")


# What bfloat16 changes does not depend on the case: one of each kind is enough, and every case takes a compilation.
IN_BFLOAT16 = ("one decode", "one prompt", MIXED.name, "window, soft cap and sinks", "long tail", "nothing at all")
CASES_AND_TYPES = [(case, jnp.float32) for case in CASE.values()] + [(CASE[name], jnp.bfloat16) for name in IN_BFLOAT16]


@pytest.mark.parametrize(
    ("case", "dtype"), CASES_AND_TYPES, ids=[f"{case.name}-{dtype.__name__}" for case, dtype in CASES_AND_TYPES]
)
def test_a_case_equals_dense_attention_and_changes_only_the_slots_of_its_new_tokens(case, dtype):
    step = make_step(case, dtype)
    out_TNH, kv = run(case, step, dtype)
    assert error(case, out_TNH, step) <= case_tolerance(case, dtype)
    assert (out_TNH[case.num_tokens :] == 0).all()
    for is_BKSH, should_BKSH in zip(kv.arrays, after(case, step)):
        np.testing.assert_array_equal(np.asarray(is_BKSH, np.float32), should_BKSH)


def test_a_batch_equals_each_of_its_requests_alone():
    step = make_step(MIXED, jnp.float32)
    together_TNH, _ = run(MIXED, step, jnp.float32)
    for row in (1, 2, 5):  # a decode over several items, a prompt, a decode that fills a block
        tokens = slice(*step.query_start_loc_R1[row : row + 2])
        alone = dataclasses.replace(
            step,
            q_TNH=step.q_TNH[tokens],
            k_TKH=step.k_TKH[tokens],
            v_TKH=step.v_TKH[tokens],
            query_start_loc_R1=np.array([0, MIXED.rows[row][1]], np.int32),
            seq_lens_R=step.seq_lens_R[row : row + 1],
            block_tables_RM=step.block_tables_RM[row : row + 1],
        )
        alone_TNH, _ = run(dataclasses.replace(MIXED, rows=MIXED.rows[row : row + 1]), alone, jnp.float32)
        np.testing.assert_allclose(together_TNH[tokens], alone_TNH, atol=2e-6)


@pytest.mark.parametrize("window", [None, 37])
def test_a_prompt_in_chunks_equals_the_whole_prompt(window):
    case = Case("a prompt", ((0, 210),), window=window, padding=0, empty_rows=0)
    step = make_step(case, jnp.float32)
    whole_TNH, _ = run(case, step, jnp.float32)
    chunks, kv = [], (step.k_BKSH, step.v_BKSH)
    for first, last in ((0, 70), (70, 140), (140, 210)):  # equal lengths share a program
        part = dataclasses.replace(
            step,
            q_TNH=step.q_TNH[first:last],
            k_TKH=step.k_TKH[first:last],
            v_TKH=step.v_TKH[first:last],
            k_BKSH=kv[0],
            v_BKSH=kv[1],
            query_start_loc_R1=np.array([0, last - first], np.int32),
            seq_lens_R=np.array([last], np.int32),
        )
        out_TNH, kv_tensor = run(case, part, jnp.float32)
        chunks.append(out_TNH)
        kv = tuple(np.asarray(x) for x in kv_tensor.arrays)
    np.testing.assert_allclose(np.concatenate(chunks), whole_TNH, atol=2e-6)


@pytest.mark.parametrize("query_tiles", [False, True])
def test_both_lists_of_work_give_the_same(monkeypatch, query_tiles):
    case = CASE["window, soft cap and sinks"]
    monkeypatch.setattr(work_lists, "items_per_chunk", lambda num_tokens: -1 if query_tiles else 10**6)
    step = make_step(case, jnp.float32)
    assert error(case, run(case, step, jnp.float32)[0], step) <= case_tolerance(case, jnp.float32)


# ---- the tests bite ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("window, no multiple of the block", {"window": 38}),
        ("window, no multiple of the block", {"window": 36}),
        ("window, no multiple of the block", {"window": None}),
        ("soft cap", {"soft_cap": None}),
        ("one decode", {"scale": 0.26}),
    ],
)
def test_wrong_settings_are_noticed(name, changes):
    case = CASE[name]
    step = make_step(case, jnp.bfloat16)
    assert error(case, run(case, step, jnp.bfloat16, **changes)[0], step) > case_tolerance(case, jnp.bfloat16)


def test_wrong_ends_are_noticed():
    """Off by one, as far as the next run that stands side by side, or none: of the run in the middle of a row."""
    step = make_step(BOTH_WAYS, jnp.float32)
    for end in (99, 101, 130, 0):
        ends_T = np.where(step.visible_end_T == 100, end, step.visible_end_T).astype(np.int32)
        out_TNH, _ = run(BOTH_WAYS, dataclasses.replace(step, visible_end_T=ends_T), jnp.float32)
        assert error(BOTH_WAYS, out_TNH, step) > 10 * case_tolerance(BOTH_WAYS, jnp.float32), end


# what is wrong: (a case that must notice, text of the reference, its numerics or lists, what the mutant has there)
MUTANTS = {
    "values that nobody may see only get a weight of zero": (
        MIXED,
        "jnp.where(needed[..., None, :, None], v, 0)",
        "v",
    ),
    "queries in a tile see one position ahead": (
        MIXED,
        "(position_C <= last_Q[:, None])",
        "(position_C <= last_Q[:, None] + 1)",
    ),
    "queries in a list see one position less": (
        MIXED,
        "(position_IC <= _last_visible(problem, token_I, position_I)[:, None])",
        "(position_IC < _last_visible(problem, token_I, position_I)[:, None])",
    ),
    "queries in a list see what the one after them wrote": (
        MIXED,
        "(position_IC <= _last_visible(problem, token_I, position_I)[:, None])",
        "(position_IC <= _last_visible(problem, token_I, position_I)[:, None] + 1)",
    ),
    "the last chunk is forgotten": (
        MIXED,
        "lax.div(last, chunk_slots) + 1, add_chunk",
        "lax.div(last, chunk_slots), add_chunk",
    ),
    "older chunks keep their weight": (
        CASE["chunk that continues a context"],
        "state_KX.out * fade_KX[..., None]",
        "state_KX.out",
    ),
    "what a tile of items carries over is forgotten": (
        CASE["long tail"],
        'mode="drop"), token_J[-1],',
        'mode="drop"), jnp.int32(NOWHERE),',
    ),
    "all attention is causal": (BOTH_WAYS, "position if visible_end_T is None", "position if True"),
    "the last token of a run is not seen": (BOTH_WAYS, "fill_value=0) - 1", "fill_value=0) - 2"),
    "what comes behind a run is seen": (BOTH_WAYS, "fill_value=0) - 1", "fill_value=0)"),
    "tiles see whole runs, before the window too": (
        IN_WINDOW,
        "first_visible(position_Q, problem.window)",
        "first_visible(_last_visible(problem, tile.token_Q, position_Q) - 40, problem.window)",
    ),
    "windows end with what is seen": (
        IN_WINDOW,
        "first_visible(position_I, problem.window)",
        "first_visible(_last_visible(problem, token_I, position_I), problem.window)",
    ),
    "a sink is forgotten": (CASE["sinks"], "if sinks is None:", "if True:"),
    "what rows share is read again by each": (
        SHARING,
        "first_R // item_slots,\n",
        "first_R * 0,\n",
    ),
    "what rows share is forgotten by lists": (SHARING, "(nth_I == 0) & real_I", "(nth_I < 0) & real_I"),
    "what rows share is counted for each item": (SHARING, "(nth_I == 0) & real_I", "real_I"),
    "what rows share is forgotten by tiles": (SHARING, "if begun_QKG is None else", "if True else"),
    "a shared span has no end": (SHARING, ", tile.end - 1)", ", NOWHERE)"),
    "padding tokens write to a block": (
        CASE["rows with no new token"],
        "jnp.where(held_T, block_T, NOWHERE)",
        "block_T * 0 + 1",
    ),
}


def module_of(name, text):
    module = types.ModuleType(f"mutant of the {name}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_reference_is_noticed(monkeypatch, mutant):
    case, original, wrong = MUTANTS[mutant]
    texts = [inspect.getsource(module) for module in (numerics, work_lists, reference)]
    assert sum(text.count(original) for text in texts) == 1, f"the mutant {mutant!r} no longer applies; update it."
    sums, lists, attention = (text.replace(original, wrong) for text in texts)
    monkeypatch.setitem(sys.modules, numerics.__name__, module_of("numerics", sums))
    monkeypatch.setattr(rpa, "work_lists", module_of("work_lists", lists))
    monkeypatch.setitem(sys.modules, work_lists.__name__, rpa.work_lists)
    monkeypatch.setitem(rpa._BACKENDS, "reference", module_of("reference", attention))
    step = make_step(case, jnp.float32)
    assert error(case, run(case, step, jnp.float32)[0], step) > 10 * case_tolerance(case, jnp.float32)

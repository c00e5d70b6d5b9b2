"""The kernels in Triton itself against dense attention in float64, with everything poisoned.

On a GPU where jax sees one; else in Triton's interpreter, which needs TRITON_INTERPRET=1 (test_compiles.py sets it).
"""

import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import BOTH_WAYS_CASES, CASES, SHARED_CASES
from pallas_kernels.ragged_paged_attention.gpu import tiles
from pallas_kernels.testing import make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import after, case_tolerance, check_case, error, packed, run

BACKEND = "gpu-triton" if jax.default_backend() == "gpu" else "gpu-triton-interpret"
REFUSAL = rpa.backends(jax.default_backend())[BACKEND]
if REFUSAL is not None:
    pytest.skip(f"{BACKEND}: {REFUSAL}", allow_module_level=True)

CASE = {case.name: case for case in (*CASES, *SHARED_CASES, *BOTH_WAYS_CASES)}
QUICK = (
    "one decode",
    "rows with no new token",
    "window, soft cap and sinks",
    "rows that share beginnings, window, soft cap and sinks",
    "both ways, window shorter than runs",
)


def all_cases():
    for case, dtype in zip(CASE.values(), itertools.cycle((jnp.bfloat16, jnp.float32, jnp.float16))):
        marks = () if case.name in QUICK else pytest.mark.slow
        yield pytest.param(case, dtype, id=f"{case.name}, {jnp.dtype(dtype)}", marks=marks)


@pytest.mark.parametrize(("case", "dtype"), list(all_cases()))
def test_a_case_equals_dense_attention_and_changes_only_the_slots_of_its_new_tokens(case, dtype):
    check_case(case, dtype, BACKEND)


# None of them forms an address outside of an array: unlike Pallas's, Triton's interpreter would follow it.
# what is wrong: (a case that must notice, text, what the mutant has in its place)
MUTANTS = {
    "slots that nobody may see are read": (
        "window, soft cap and sinks",
        "v_CP = load_pieces(v + slot_C * layer.heads.head_dim, needed_C,",
        "v_CP = load_pieces(v + slot_C * layer.heads.head_dim, None,",
    ),
    "queries see one position ahead": (
        "window, soft cap and sinks",
        "position_C[None, :] <= position_X[:, None]",
        "position_C[None, :] <= position_X[:, None] + 1",
    ),
    "the window is one too long": (
        "window, soft cap and sinks",
        "> position_X[:, None] - layer.window",
        ">= position_X[:, None] - layer.window",
    ),
    "older slots keep their weight": ("long tail of windows", "out_XP[i] * fade_X[:, None]),)", "out_XP[i]),)"),
    "a part's weight is forgotten in the merger": (
        "one decode",
        "total_X * fade_X + new_total_X * weight_X",
        "total_X * fade_X + weight_X",
    ),
    "the last part is forgotten": (
        "one decode",
        "first + tl.load(fact + NUM_PARTS))",
        "first + tl.load(fact + NUM_PARTS) - 1)",
    ),
    "queries see what comes behind a run": (
        "both ways",
        "position_C[None, :] < end_X[:, None]",
        "position_C[None, :] <= end_X[:, None]",
    ),
    "tiles read no further than their last query": (
        "both ways, window shorter than runs",
        "(position_C < stop)",
        "(position_C <= last)",
    ),
    "a sink is forgotten": ("window, soft cap and sinks", "if layer.has_sinks:", "if False:"),
    "new tokens go to other slots": ("rows with no new token", "block_size + offset_X", "block_size + offset_X % 8"),
}


@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "gpu-triton", reason="mutants are read by the interpreter")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_kernels_is_noticed(monkeypatch, tmp_path, mutant):
    from pallas_kernels.ragged_paged_attention.gpu import triton_interpreter, triton_kernels

    name, original, wrong = MUTANTS[mutant]
    with open(triton_kernels.__file__, encoding="utf-8") as file:
        text = file.read()
    assert text.count(original) == 1, f"the mutant {mutant!r} no longer applies; update it with the kernels."
    path = tmp_path / "mutant.py"  # the interpreter reads sources
    path.write_text(text.replace(original, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    monkeypatch.setattr(triton_interpreter, "triton_kernels", mutated)
    fine = tiles.Tiles(rows=16, slots=16, per_core=20, min_slots=16, warps=4, stages=1)
    monkeypatch.setattr(tiles, "default_tiles", lambda *_: fine)
    case = CASE[name]
    step = make_step(case, jnp.float32)
    out_TNH, kv = run(case, step, jnp.float32, BACKEND)
    should = packed(*after(case, step), jnp.float32, BACKEND)
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(kv.arrays, should.arrays))
    assert error(case, out_TNH, step) > 10 * case_tolerance(case, jnp.float32) or not same

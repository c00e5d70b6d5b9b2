"""Attention in machine code of our own, on this CPU and as one with fewer instructions would compute it."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.llvm.calls import prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from pallas_kernels.ragged_paged_attention import cpu, reference
from pallas_kernels.ragged_paged_attention.cases import BOTH_WAYS_CASES, CASES, SHARED_CASES, Case
from pallas_kernels.ragged_paged_attention.cpu import plans
from pallas_kernels.testing import make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import check_case, marks, run

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
CASE = {case.name: case for case in (*CASES, *SHARED_CASES, *BOTH_WAYS_CASES)}
ALL_SETTINGS = CASE["window, soft cap and sinks"]
HEADS_128 = CASE["head_dim 128"]
LONG = Case("one long decode, in parts", ((1000, 1),), padding=1, empty_rows=1, window=900, sinks=True)
GROUP_OF_8 = Case("group of 8, head_dim 64", ((100, 1), (37, 1)), num_kv_heads=1, group_size=8, head_dim=64, window=52)
TEAMS = Case(
    "chunks of four, four and one head", ((300, 1), (47, 1), (16, 1)), num_kv_heads=9, head_dim=128, window=150
)
PROMPT = 2
AMONG_OTHERS = Case(
    "a long prompt among others",
    ((7, 5), (50, 1), (700, 150), (0, 11)),
    num_kv_heads=3,
    head_dim=32,
    padding=0,
    empty_rows=0,
)
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)

QUICK = (
    (ALL_SETTINGS, jnp.float32),
    (LONG, jnp.float32),
    (GROUP_OF_8, jnp.bfloat16),
    (CASE["head_dim 256, multi-query"], jnp.bfloat16),
    (CASE["rows with no new token"], jnp.float32),
    (CASE["group of 8, keys of 192 and values of 128, block_size 128"], jnp.bfloat16),
    (CASE["rows that share beginnings, window, soft cap and sinks"], jnp.float32),
    (CASE["block_size 48, which divides no tile"], jnp.float32),
    (TEAMS, jnp.bfloat16),
    (CASE["both ways"], jnp.float32),
    (CASE["both ways, window shorter than runs"], jnp.bfloat16),
    (CASE["both ways, rows that share what one of them computes"], jnp.float32),
)
OTHERS = [(case, dtype) for dtype in (jnp.bfloat16, jnp.float32) for case in CASE.values()]
OTHERS = [pair for pair in OTHERS if pair not in QUICK]
# One for each plan: heads and types make no difference to it.
of_plan = lambda case: (case.rows, case.empty_rows, case.block_size, case.window, case.shared, case.both_ways)
PLANNED = {of_plan(case): case for case in (*CASE.values(), LONG, AMONG_OTHERS) if case.num_tokens}.values()
name_of = lambda x: x.name if isinstance(x, Case) else x.__name__


@needs_kernels
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*QUICK, *(pytest.param(*pair, marks=marks(is_quick=False)) for pair in OTHERS)],
    ids=name_of,
)
def test_a_case_equals_dense_attention(case, dtype):
    check_case(case, dtype, "cpu")


@needs_kernels
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks(i % 2 == 0)) for i, case in enumerate(PLANNED)], ids=name_of
)
def test_the_kernel_plans_a_step_as_xla_does(case):
    step = make_step(case, jnp.float32)
    rows = step.query_start_loc_R1, step.seq_lens_R, step.block_tables_RM
    settings = {"num_tokens": case.num_tokens, "block_size": case.block_size, "window": case.window}
    for shared_6R in (None, step.shared_6R):
        more = {"shared_6R": shared_6R}
        if case.both_ways:
            more["visible_end_T"] = jnp.asarray(step.visible_end_T[: case.num_tokens])
        expected = plans.by_xla(*map(jnp.asarray, rows), **more, **settings)
        plan = cpu.make_plan(*map(jnp.asarray, rows), **more, **settings)
        real_T, single_T = np.asarray(plan.how_T) & plans.REAL != 0, np.asarray(plan.row_T) >= 0
        for name in (*cpu.PLANNED, *cpu.PLANNED_OF_SPANS):
            values, wanted = (np.asarray(getattr(x, name)) for x in (plan, expected))
            if name in ("slot_offset_T", "seen_T2"):
                values, wanted = values[real_T], wanted[real_T]
            if name == "ranges_PT2":
                values, wanted = values[:, single_T], wanted[:, single_T]
            np.testing.assert_array_equal(values, wanted, name)


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=name_of)
def test_what_else_a_step_has_changes_no_bit_of_a_prompt(dtype):
    """Alone, behind others that move it to another place of its tile, and as far as threads go."""
    step = make_step(AMONG_OTHERS, dtype)
    alone = Case("alone", AMONG_OTHERS.rows[PROMPT : PROMPT + 1], num_kv_heads=3, head_dim=32, padding=0, empty_rows=0)
    places = slice(*step.query_start_loc_R1[PROMPT : PROMPT + 2])
    of_alone = dataclasses.replace(
        step,
        q_TNH=step.q_TNH[places],
        k_TKH=step.k_TKH[places],
        v_TKH=step.v_TKH[places],
        query_start_loc_R1=np.array([0, places.stop - places.start], np.int32),
        seq_lens_R=step.seq_lens_R[PROMPT : PROMPT + 1],
        block_tables_RM=step.block_tables_RM[PROMPT : PROMPT + 1],
    )
    out_TNH, _ = run(AMONG_OTHERS, step, dtype, "cpu")
    np.testing.assert_array_equal(out_TNH[places], run(alone, of_alone, dtype, "cpu")[0])


@needs_kernels
@pytest.mark.parametrize(("case", "dtype"), [(ALL_SETTINGS, jnp.float32), (HEADS_128, jnp.bfloat16)], ids=name_of)
def test_the_kernels_of_lesser_machines_compute_a_case(monkeypatch, case, dtype):
    here = this_machine()
    no_pairs = Machine(here.name, here.features.replace("+avx512bf16", "-avx512bf16"), here.lanes, here.num_registers)
    for machine in {AVX2, no_pairs} - {here}:
        monkeypatch.setattr(cpu, "this_machine", lambda machine=machine: machine)
        check_case(case, dtype, "cpu")


@needs_kernels
def test_the_kernel_computes_what_it_can_and_xla_the_rest(monkeypatch):
    asked, kernel, here = [], cpu.kernel, threading.get_ident()

    def ask(*heads, machine):
        if threading.get_ident() != here:  # an engine of another test compiles on
            return kernel(*heads, machine=machine)
        return kernel(*heads, machine=machine) if heads[0] == "planned" else asked.append(heads) or 1 / 0

    monkeypatch.setattr(cpu, "kernel", ask)
    other = CASE["multi-query, head_dim 10, block_size 8"]
    step = make_step(other, jnp.float32)
    out_TNH, _ = run(other, step, jnp.float32, "cpu")
    np.testing.assert_array_equal(out_TNH, run(other, step, jnp.float32, "reference")[0])
    assert not asked
    with pytest.raises(ZeroDivisionError):
        run(ALL_SETTINGS, make_step(ALL_SETTINGS, jnp.float32), jnp.float32, "cpu")
    assert asked == [("written", "float32")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "queries are float16"),
        ({"kv_dtype": "int8"}, "keys and values int8; accepted are bfloat16 and float32, all alike"),
        ({"group_size": 9}, "9 query heads for each kv head; accepted are 1 to 8"),
        ({"head_dim": 72}, "head_dim = 72; accepted are multiples of 16 up to 256"),
        ({"head_dim": 272}, "head_dim = 272"),
        ({"block_size": 24}, "block_size = 24; accepted are multiples of 16"),
    ],
)
def test_what_the_kernel_cannot_take_is_told_by_name(change, message):
    takes = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "group_size": 2, "head_dim": 64, "block_size": 16}
    assert cpu.kernel_cannot_take(**takes) is None
    assert message in cpu.kernel_cannot_take(**(takes | change))


@needs_kernels
def test_stored_names_make_the_same_kernels_known_again():
    name = cpu.kernel("tiles", "bfloat16", 2, 64, 16, "capped", machine=this_machine())
    prepare({name})
    for wrong, message in (
        (name.replace(".64.", ".72."), "head_dim = 72"),
        (name.replace(".tiles.", ".rows."), "no kernel for rows of bfloat16"),
        (name.replace(".tiles.", ".written."), "no kernel for what is written as bfloat16.2.64"),
        (name.replace(".capped.", ".round."), "'round' scores"),
        (name.replace(".bfloat16.", ".int8."), "no kernel for tiles of int8"),
        (name[:-12] + "0" * 12, "it is pallas_kernels.ragged_paged_attention.tiles.bfloat16.2.64.16.capped"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([wrong])


def test_a_machine_without_kernels_is_told_why_and_auto_takes_the_reference(monkeypatch):
    monkeypatch.setattr(cpu.llvm, "why_not", lambda: "this CPU lacks avx2")
    assert rpa.choose_backend("auto", "cpu") == "reference"
    with pytest.raises(ValueError, match="'cpu' cannot run on 'cpu': this CPU lacks avx2"):
        rpa.choose_backend("cpu", "cpu")
    assert rpa.backends("tpu")["cpu"] == "it needs a CPU" and cpu.LAYOUT is reference.LAYOUT

"""The tests of the TPU kernels bite: deliberate mistakes in them are noticed."""

import importlib
import inspect
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.tpu import TpuBackend
from pallas_kernels.testing import make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import after, case_tolerance, error, marks, packed, run

PACKAGE = "pallas_kernels.ragged_paged_attention.tpu"
BACKEND = "tpu-interpret"
CASE = Case("for mutants", ((300, 1), (20, 40), (37, 1), (5, 3)), group_size=3)
SINKS = Case("for mutants", ((20, 20), (37, 1)), sinks=True)
HALVES = Case("for mutants", ((20, 40),), group_size=16)
WINDOW = Case("for mutants", ((300, 1), (300, 20)), window=30)
SHARED = Case(
    "for mutants",
    ((150, 1), (140, 20), (100, 1)),
    group_size=4,
    window=146,
    shared=((1, 0, 8), (2, 0, 4)),
)
BOTH_WAYS = Case(
    "for mutants",
    ((20, 40), (37, 1), (140, 30)),
    window=146,
    both_ways=((0, 22, 55), (0, 55, 60), (2, 140, 165)),
)
FIRST = Case("for mutants", ((0, 140), (128, 20)), shared=((1, 0, 8),), both_ways=((0, 30, 110),))

# what is wrong: (case, module, its text, what the mutant has in its place)
MUTANTS = {
    "decodes see all that was fetched": (
        CASE,
        "decode",
        "jnp.where(seen_11P, exponent_nXP[mine], LOWEST)",
        "exponent_nXP[mine]",
    ),
    "decodes forget their last piece": (
        CASE,
        "segments",
        "(runs.end_Z - 1) // item_slots - first_Z + 1",
        "(runs.end_Z - 1) // item_slots - first_Z",
    ),
    "what was seen before keeps its weight": (
        CASE,
        "tile_state",
        "one[2] * repeated(keep, other[2])",
        "one[2]",
    ),
    "queries of a tile see one position ahead": (
        CASE,
        "prefill",
        "position_1P <= own_X1",
        "position_1P <= own_X1 + 1",
    ),
    "queries of a tile see others' contexts": (
        CASE,
        "prefill",
        "(query_X1 >= self.first_query) & (query_X1 < self.end_query)",
        "query_X1 >= 0",
    ),
    "what nobody may see only gets a weight of zero": (
        CASE,
        "softmax",
        "pl.when(jnp.logical_not(is_seen_whole(item, slots)))",
        "pl.when(item.segment < 0)",
    ),
    "blocks are not waited for": (CASE, "fetch", "            self._await_blocks(step)\n", ""),
    "both buffers are one": (CASE, "fetch", "some_ref = self.blocks(step)", "some_ref = self.blocks(0)"),
    "a step waits for one block less": (
        CASE,
        "fetch",
        "counts[ITEMS], counts[BLOCKS] = num_used, num_blocks",
        "counts[ITEMS], counts[BLOCKS] = num_used, jnp.maximum(num_blocks - 1, 0)",
    ),
    "a page of the block table is not waited for": (
        CASE,
        "fetch",
        "counts[ITEMS], counts[BLOCKS] = num_used, num_blocks",
        "counts[ITEMS], counts[BLOCKS] = jnp.maximum(num_used - 1, 0), num_blocks",
    ),
    "blocks that nobody needs are fetched": (
        WINDOW,
        "fetch",
        "first = jnp.maximum(first - position, 0)",
        "first = 0 * first",
    ),
    "neighbours of a new token are not kept": (CASE, "write", "return self.num_tokens(z) < self.group", "return z < 0"),
    "the first new token is not written": (CASE, "write", "slot == first + i", "slot == first + i + 1"),
    "decodes forget sinks": (SINKS, "decode", "if sinks is None else", "if True else"),
    "decodes go on from the one before": (CASE, "decode", "jnp.where(item.is_first, x, y)", "y"),
    "prompts forget sinks": (SINKS, "tile_state", "if sinks_ref is None:", "if True:"),
    "a window is one too wide for prompts": (
        WINDOW,
        "prefill",
        "position_1P > own_X1 - self.window",
        "position_1P >= own_X1 - self.window",
    ),
    "of queries in one tile heads keep their neighbours'": (SHARED, "decode", "row < p *", "row >= p *"),
    "decodes forget spans": (SHARED, "decode", "begun_Z[item.segment] > 0", "begun_Z[item.segment] < 0"),
    "prompts forget spans": (SHARED, "prefill", "begun_J[tile] > 0", "begun_J[tile] < 0"),
    "what rows share is read by each of them too": (SHARED, "plan", "jnp.maximum(begin_Z, own_Z)", "begin_Z"),
    "queries that share a span stand side by side": (SHARED, "prefill", "if self.position_QL is None:", "if True:"),
    "tiles read no further than their last query": (
        BOTH_WAYS,
        "plan",
        "last_Z + 1 if seen_Z is None else seen_Z",
        "last_Z + 1",
    ),
    "queries see what comes behind a run": (
        BOTH_WAYS,
        "prefill",
        "position_1P < jnp.where",
        "position_1P <= jnp.where",
    ),
    "runs are causal": (BOTH_WAYS, "prefill", "if self.end_QL is not None:", "if False:"),
    "windows begin where the end of a run is": (
        BOTH_WAYS,
        "prefill",
        "position_1P > own_X1 - self.window",
        "position_1P > self._of_rows(self.end_QL, query_X1) - 1 - self.window",
    ),
    "spans that rows share are causal": (
        FIRST,
        "spans",
        "end_YL=None if queries.end_Y is None else over_lanes(queries.end_Y)",
        "end_YL=None",
    ),
    "spans are read beyond their ends": (
        SHARED,
        "prefill",
        "(position_1P >= self.item.first) & (position_1P < self.item.end)",
        "position_1P >= 0",
    ),
    "both halves of a tile have the scores of the first": (
        HALVES,
        "prefill",
        "pl.ds(start, shape.part_rows), v_PD",
        "pl.ds(0, shape.part_rows), v_PD",
    ),
    "a sink weighs in every lane": (
        SINKS,
        "tile_state",
        "jnp.full((heads, X, L), 1 / L,",
        "jnp.full((heads, X, L), 1,",
    ),
}
QUICK = ("blocks are not waited for", "runs are causal")


@pytest.fixture(autouse=True)
def detect_races(monkeypatch):
    interpret = pltpu.InterpretParams(detect_races=True)
    monkeypatch.setitem(rpa._BACKENDS, BACKEND, TpuBackend(interpret=interpret))
    yield
    pltpu.reset_tpu_interpret_mode_state()


def apply_mutant(monkeypatch, name: str, original: str, wrong: str) -> None:
    """Replace what a module of the package defines, wherever the package uses it, by the mutant's."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    text = inspect.getsource(module)
    assert text.count(original) == 1, f"the mutant no longer applies to {name}; update it: {original!r}"
    mutant = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)  # dataclasses look their module up
    exec(compile(text.replace(original, wrong), "mutant", "exec"), mutant.__dict__)
    own = {n: x for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__}
    for user in [m for n, m in sys.modules.items() if n.startswith(PACKAGE)]:
        for attribute, defined in own.items():
            if getattr(user, attribute, None) is defined:
                monkeypatch.setattr(user, attribute, getattr(mutant, attribute))


def is_right(case: Case) -> bool:
    """Whether a step gives the oracle's output and cache, without a race and without touching what it must not."""
    step = make_step(case, jnp.float32)
    try:
        out_TNH, kv = run(case, step, jnp.float32, BACKEND)
    except Exception:
        return False
    should = packed(*after(case, step), jnp.float32, BACKEND)
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(kv.arrays, should.arrays))
    return same and error(case, out_TNH, step) <= 10 * case_tolerance(case, jnp.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [CASE, SINKS, HALVES, WINDOW, SHARED, BOTH_WAYS, FIRST])
def test_without_a_mutation_the_cases_pass(case):
    assert is_right(case)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name in QUICK)) for name in MUTANTS])
def test_a_mutant_is_noticed(monkeypatch, name):
    case, module, original, wrong = MUTANTS[name]
    apply_mutant(monkeypatch, module, original, wrong)
    if module in ("plan", "__init__"):
        monkeypatch.setattr(TpuBackend, "make_plan", staticmethod(sys.modules[PACKAGE].work.make_plan))
    assert not is_right(case)

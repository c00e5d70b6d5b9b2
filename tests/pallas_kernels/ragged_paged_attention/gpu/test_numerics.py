"""The GPU kernels, in Pallas's interpreter or on a GPU, against dense attention in float64, with all else poisoned."""

import inspect
import itertools
import re
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention import gpu
from pallas_kernels.ragged_paged_attention.cases import BOTH_WAYS_CASES, CASES, SHARED_CASES
from pallas_kernels.ragged_paged_attention.gpu import calls, items, kernels, pieces, tiles
from pallas_kernels.testing import is_simulated, make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import (
    after,
    case_tolerance,
    check_case,
    error,
    marks,
    packed,
    run,
)

CASE = {case.name: case for case in (*CASES, *SHARED_CASES, *BOTH_WAYS_CASES)}
BACKEND = "gpu-interpret" if is_simulated("gpu") else "gpu"
# Every kind of mask and layout once; the others are the same code with other sizes.
QUICK = (
    ("group of 8, keys of 192 and values of 128, block_size 128", jnp.float32),
    ("long tail of windows", jnp.bfloat16),
    ("group of 16, head_dim 72, block_size 256", jnp.bfloat16),
    ("head_dim 512", jnp.bfloat16),
    ("rows with no new token", jnp.float16),
    ("decodes and prompts in any order", jnp.bfloat16),
    ("rows that share beginnings, window, soft cap and sinks", jnp.float32),
    ("both ways, window shorter than runs", jnp.bfloat16),
)


def all_cases():
    for case, dtype in zip(CASE.values(), itertools.cycle((jnp.bfloat16, jnp.float32, jnp.float16))):
        quick = dict(QUICK).get(case.name)
        name = f"{case.name}, {jnp.dtype(quick or dtype)}"
        yield pytest.param(case, quick or dtype, id=name, marks=marks(quick is not None))


@pytest.mark.parametrize(("case", "dtype"), list(all_cases()))
def test_a_case_equals_dense_attention_and_changes_only_the_slots_of_its_new_tokens(case, dtype):
    check_case(case, dtype, BACKEND)


@pytest.mark.slow
@pytest.mark.parametrize("per_core", [pytest.param(1, marks=pytest.mark.exhaustive), 200])
def test_the_number_of_parts_changes_nothing(monkeypatch, per_core):
    few = tiles.Tiles(rows=16, slots=32, per_core=per_core, min_slots=32, warps=4, stages=1)
    monkeypatch.setattr(tiles, "default_tiles", lambda *_: few)
    case = CASE["decodes and prompts in any order"]
    step = make_step(case, jnp.float32)
    assert error(case, run(case, step, jnp.float32, BACKEND)[0], step) <= case_tolerance(case, jnp.float32)


# what is wrong: (a case that must notice, the module, its text, what the mutant has in its place)
MUTANTS = {
    "slots that nobody may see are read": (
        "window, soft cap and sinks",
        kernels,
        "needed_C if masked else None)",
        "None)",
    ),
    "queries see one position ahead": (
        "window, soft cap and sinks",
        kernels,
        "position_C[None, :] <= tile.position",
        "position_C[None, :] <= tile.position + 1",
    ),
    "the window is one too long": (
        "window, soft cap and sinks",
        kernels,
        "> tile.position - layer.window",
        ">= tile.position - layer.window",
    ),
    "older slots keep their weight": (
        "long tail of windows",
        kernels,
        "out * fade_X1 + dot(",
        "out + dot(",
    ),
    "a part's weight is forgotten in the merger": (
        "one decode",
        kernels,
        "jnp.sum(new_total_MX * weight_MX, axis=0)",
        "jnp.sum(weight_MX, axis=0)",
    ),
    "the last part is forgotten": (
        "one decode",
        kernels,
        "number_MX < num_parts",
        "number_MX < num_parts - 1",
    ),
    "parts that are loaded later are forgotten": (
        "one decode",
        kernels,
        "ceil_div(num_parts, at_a_time), add",
        "1, add",
    ),
    "every program merges the first columns": (
        "head_dim 128",
        kernels,
        "pl.program_id(2) * self.columns + ",
        "",
    ),
    "scores are not scaled": ("one decode", kernels, "layer.scale * LOG2_E", "LOG2_E"),
    "the first slots' weight is that of the last top": (
        "long tail of windows",
        kernels,
        "(top_X1 - highest_X1) * factor(layer)",
        "(top_X1 - highest_X1)",
    ),
    "what rows share is forgotten": (
        "rows that share beginnings, window, soft cap and sinks",
        kernels,
        "fact(at.BEGUN) > 0",
        "fact(at.BEGUN) < 0",
    ),
    "queries see spans that others share": (
        "rows that share beginnings, window, soft cap and sinks",
        kernels,
        "place.real & (place.position >= fact(at.FIRST_QUERY))",
        "place.real",
    ),
    "queries see what comes behind a run": (
        "both ways",
        kernels,
        "position_C[None, :] < tile.end",
        "position_C[None, :] <= tile.end",
    ),
    "runs are causal": ("both ways", kernels, "if tile.end is None", "if True"),
    "tiles read no further than their last query": (
        "both ways, window shorter than runs",
        kernels,
        "if stop is None",
        "if True",
    ),
    "spans that rows share are causal": (
        "both ways, rows that share what one of them computes",
        kernels,
        "with_end(Tile(head, token_X1, place.query_head, position_X1, mine_X1), end_ref, place.token)",
        "with_end(Tile(head, token_X1, place.query_head, position_X1, mine_X1, position_X1 + 1), None, 0)",
    ),
    "a sink is forgotten": ("window, soft cap and sinks", kernels, "if not layer.has_sinks:", "if True:"),
    # No mutant without the bounds of written blocks: the interpreter drops what lies outside of an array by itself.
}
QUICK_MUTANTS = ("parts that are loaded later are forgotten", "what rows share is forgotten")


@pytest.mark.parametrize("mutant", [pytest.param(name, marks=marks(name in QUICK_MUTANTS)) for name in MUTANTS])
def test_a_mutant_of_the_kernels_is_noticed(monkeypatch, mutant):
    name, module, original, wrong = MUTANTS[mutant]
    text = inspect.getsource(module)
    assert text.count(original) == 1, f"the mutant {mutant!r} no longer applies; update it with the kernels."
    mutated = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutated)  # dataclasses look their module up
    exec(compile(text.replace(original, wrong), "mutant", "exec"), mutated.__dict__)
    monkeypatch.setattr(calls, "kernels", mutated)
    fine = tiles.Tiles(rows=16, slots=16, per_core=20, min_slots=16, warps=4, stages=1)
    monkeypatch.setattr(tiles, "default_tiles", lambda *_: fine)
    monkeypatch.setattr(tiles, "num_cores", lambda kind: 1)  # so that parts take several iterations on a GPU too
    monkeypatch.setattr(calls, "NUMBERS_OF_A_WARP", 128)  # so that parts are merged in several goes
    case = CASE[name]
    step = make_step(case, jnp.float32)
    out_TNH, kv = run(case, step, jnp.float32, BACKEND)
    should = packed(*after(case, step), jnp.float32, BACKEND)
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(kv.arrays, should.arrays))
    assert error(case, out_TNH, step) > 10 * case_tolerance(case, jnp.float32) or not same


def test_heads_that_the_kernels_cannot_take_are_refused():
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    types = {"q_dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16}
    rpa.check("gpu", **heads, **types)
    with pytest.raises(
        ValueError, match=r"head_dim = 576; accepted are at most 512 in products of bf.*\. Use 'reference'"
    ):
        rpa.check("gpu", **heads | {"head_dim": 576}, **types)
    with pytest.raises(ValueError, match=r"head_dim = 288; accepted are at most 256 in products of float32"):
        rpa.check("gpu", **heads | {"head_dim": 288}, **types | {"kv_dtype": jnp.float32})
    with pytest.raises(ValueError, match=r"256 query heads per kv head; accepted are at most 128"):
        rpa.check("gpu", **heads | {"num_heads": 512}, **types)
    with pytest.raises(ValueError, match=r"the cache is int16; accepted are float32, bfloat16, float16, int8"):
        rpa.check("gpu", **heads, **types | {"kv_dtype": jnp.int16})


def test_a_scale_that_would_turn_scores_around_is_refused():
    case = CASE["one decode"]
    with pytest.raises(ValueError, match=r"scale = -1\.0, with which larger scores are smaller weights"):
        run(case, make_step(case, jnp.float32), jnp.float32, BACKEND, scale=-1.0)


def test_a_gpu_is_needed_and_the_interpreter_is_never_chosen_by_itself():
    assert rpa.choose_backend("auto", "gpu") == "gpu"
    assert rpa.choose_backend("auto", "cpu") in ("reference", "cpu")
    assert rpa.choose_backend("gpu-interpret", "cpu") == "gpu-interpret"
    with pytest.raises(ValueError, match=r"'gpu' cannot run on 'cpu': it needs an NVIDIA GPU; 'gpu-interpret'"):
        rpa.choose_backend("gpu", "cpu")


def test_triton_itself_takes_over_where_jax_has_no_pallas_for_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(gpu, "is_installed", lambda module: "pallas" not in module)
    monkeypatch.setattr(gpu, "version_of", lambda package: "3.10.0")
    assert rpa.choose_backend("auto", "gpu") == "gpu-triton"
    refusal = "'gpu' cannot run on 'gpu': this jax has no Pallas for Triton; 'gpu-triton' runs kernels in Triton itself"
    with pytest.raises(ValueError, match=refusal):
        rpa.choose_backend("gpu", "gpu")
    with pytest.raises(ValueError, match=r"environment variable TRITON_INTERPRET .* set it to 1\. Use 'auto'"):
        rpa.choose_backend("gpu-triton-interpret", "cpu")


def test_triton_itself_needs_its_packages_a_gpu_and_its_compiler(monkeypatch):
    with pytest.raises(ValueError, match="'gpu-triton' cannot run on 'cpu': it needs an NVIDIA GPU; 'gpu-triton-int"):
        rpa.choose_backend("gpu-triton", "cpu")
    monkeypatch.setattr(gpu, "is_installed", lambda module: module not in ("jax_triton", "triton"))
    missing = "jax_triton and triton cannot be imported; install jax-triton and triton, the extra gpu-triton"
    assert rpa.backends("gpu")["gpu-triton"] == missing
    assert rpa.backends("cpu")["gpu-triton-interpret"] == missing.replace("jax_triton and triton", "triton", 1)
    assert rpa.choose_backend("auto", "gpu") == "gpu"
    monkeypatch.setattr(gpu, "is_installed", lambda module: True)
    with monkeypatch.context() as patch:  # PyTorch's own builds of Triton have another name

        def version(package):
            raise gpu.importlib.metadata.PackageNotFoundError(package)

        patch.setattr(gpu.importlib.metadata, "version", version)
        patch.delenv("TRITON_INTERPRET", raising=False)
        assert rpa.backends("gpu")["gpu-triton"] is None
    monkeypatch.setattr(gpu, "version_of", lambda package: "3.7.1+git")
    assert rpa.backends("gpu")["gpu-triton"].startswith("triton 3.7.1+git is installed, which cannot compile its")
    monkeypatch.setattr(gpu, "version_of", lambda package: "3.8.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "has Triton interpret its kernels; unset it" in rpa.backends("gpu")["gpu-triton"]


def test_both_kinds_of_kernels_read_the_same_columns_of_the_lists_of_work():
    text = inspect.getsource(items)
    names = re.search(r"^(ROW, .*) = range", text, re.MULTILINE)[1]
    path = Path(gpu.__file__).with_name("triton_kernels.py")
    written = "".join(path.read_text(encoding="utf-8").split())  # however long lines are broken
    assert f"{names}, NUM_COLUMNS = (tl.constexpr(i) for i in range(12))".replace(" ", "") in written
    assert items.NUM_COLUMNS == 11
    assert items.NOT_SPLIT == -1


def test_gpus_before_ampere_and_those_of_others_are_refused():
    assert [gpu.device_refusal(x) for x in (None, "8.0", "9.0", "10.3", "12.0")] == [None] * 5
    for capability in ("7.5", "gfx942"):
        assert "compute capability 8.0 or more, and this one has " + capability in gpu.device_refusal(capability)


def test_a_cache_that_cannot_be_addressed_is_refused():
    for size, dtype in ((2**31, jnp.int8), (2**32 + 1, jnp.int8), (3 * 2**30, jnp.bfloat16)):
        gpu.check_size(size, dtype)
    with pytest.raises(ValueError, match=r"8 bits with 3221225472 numbers .* accepted are up to 2147483648, or more"):
        gpu.check_size(3 * 2**30, jnp.float8_e4m3fn)


def test_pieces_of_a_head_are_powers_of_two_that_cover_it():
    assert pieces.pieces(80) == [(0, 64), (64, 16)]
    for head_dim in range(1, 513):
        cut = pieces.pieces(head_dim)
        assert all(size & (size - 1) == 0 and size >= 16 for _, size in cut)
        ends = [offset + size for offset, size in cut]
        assert [offset for offset, _ in cut] == [0, *ends[:-1]]
        assert head_dim <= ends[-1] < head_dim + 16

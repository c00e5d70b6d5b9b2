"""The kernel for prompts in Mosaic GPU, in its interpreter or on Hopper, against dense attention in float64, all else
poisoned."""

import dataclasses
import inspect
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gpu_targets
from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.gpu_targets import TARGETS
from pallas_kernels.ragged_paged_attention.cases import PROMPT_CASES, ServingShape
from pallas_kernels.ragged_paged_attention.gpu import mosaic, mosaic_calls, mosaic_kernels, tiles
from pallas_kernels.ragged_paged_attention.gpu.mosaic import MosaicTiles, default_mosaic_tiles
from pallas_kernels.ragged_paged_attention.gpu.statics import LayerRule
from pallas_kernels.testing import is_simulated, layer_of, make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import case_tolerance, check_case, error, marks, run

SIMULATED = is_simulated("gpu")
BACKEND = "gpu-interpret" if SIMULATED else "gpu"
CASE = {case.name: case for case in PROMPT_CASES}
QUICK, TOO_LONG = PROMPT_CASES[0].name, "prompts, long"
TYPES = (jnp.bfloat16, jnp.bfloat16, jnp.float16, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
PROGRAMS = 3  # the last rounds of items are not full
TILES = MosaicTiles(rows=128, slots=64, per_core=8, min_slots=64, warps=12, stages=2)

on_hopper = pytest.mark.skipif(
    not SIMULATED and not jax.devices()[0].device_kind.startswith(tiles.HOPPER), reason="it needs a GPU of Hopper"
)
interpreted = pytest.mark.skipif(not SIMULATED, reason="mutants may wait for ever on a GPU")


def use_mosaic(monkeypatch, backend: str = BACKEND, tiles: MosaicTiles = TILES) -> list:
    """Have the backend's prompts taken by Mosaic's kernel; what it is launched with is in the list."""
    chosen = dataclasses.replace(rpa._BACKENDS[backend], choose_mosaic=lambda *_: tiles)
    monkeypatch.setitem(rpa._BACKENDS, backend, chosen)
    if backend == "gpu-interpret":
        monkeypatch.setattr(mosaic_calls, "num_cores", lambda kind: PROGRAMS)
    launched, attend = [], mosaic_calls.attend
    monkeypatch.setattr(mosaic_calls, "attend", lambda *args: launched.append(args) or attend(*args))
    return launched


@on_hopper
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=marks(name == QUICK or not SIMULATED))
        for name, dtype in zip(CASE, TYPES, strict=True)
        if name != TOO_LONG or not SIMULATED
    ],
)
def test_a_case_equals_dense_attention(monkeypatch, name, dtype):
    launched = use_mosaic(monkeypatch)
    check_case(CASE[name], dtype, BACKEND)
    assert len(launched) == 1


# what is wrong: (a case that must notice, the text, what the mutant has in its place)
MUTANTS = {
    "the value of a slot that nobody sees is multiplied": (
        QUICK,
        "clear_values(layer, walk, shared.v",
        "(lambda *_: 0)(layer, walk, shared.v",
    ),
    "queries see one position ahead": (QUICK, "slot_XC <= query_XC", "slot_XC <= query_XC + 1"),
    "the window is one too long": (QUICK, "slot_XC > query_XC - layer.window", "slot_XC >= query_XC - layer.window"),
    "iterations at the window's beginning are forgotten": (
        QUICK,
        "if layer.window is not None:\n        state",
        "if False:\n        state",
    ),
    "older slots keep their weight": (
        "prompts, head_dim 128",
        "(out_XH * wide(fade_X, out_XH.shape), highest_X",
        "(out_XH, highest_X",
    ),
    "the second group has the first one's positions": (
        QUICK,
        "first = fact(at.POSITION) + group * layer.queries",
        "first = fact(at.POSITION)",
    ),
    "a short tile is written as a whole": (QUICK, "@pl.when(left >= Q)", "@pl.when(left > 0)"),
    "an item of the last round is forgotten": (
        "prompts, head_dim 128",
        "self.turned(whole) < rest",
        "self.turned(whole) + 1 < rest",
    ),
    "a sink is forgotten": (QUICK, "if layer.has_sinks:", "if False:"),
    "parts have tops of scores": ("prompts, head_dim 128", "top_X * kernels.factor(layer), LOWEST", "top_X, LOWEST"),
    "every head has the first one's keys": (
        "prompts, head_dim 128",
        "layer.num_kv_heads + head) * S",
        "layer.num_kv_heads) * S",
    ),
    "a long block's first slots are read for all": (
        "prompts, blocks of 256",
        "* S + offset",
        "* S",
    ),
}


@interpreted
@pytest.mark.parametrize("mutant", [pytest.param(x, marks=marks(False)) for x in MUTANTS])
def test_a_mutant_of_the_kernel_is_noticed(monkeypatch, mutant):
    name, original, wrong = MUTANTS[mutant]
    text = inspect.getsource(mosaic_kernels)
    assert text.count(original) == 1, f"the mutant {mutant!r} no longer applies; update it with the kernel."
    mutated = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutated)  # dataclasses look their module up
    exec(compile(text.replace(original, wrong), "mutant", "exec"), mutated.__dict__)
    monkeypatch.setattr(mosaic_calls, "mosaic_kernels", mutated)
    monkeypatch.setattr(mosaic_calls, "Arrays", mutated.Arrays)
    monkeypatch.setattr(mosaic_calls, "Shared", mutated.Shared)
    monkeypatch.setattr(mosaic_calls, "Layer", mutated.Layer)
    use_mosaic(monkeypatch)
    case, step = CASE[name], make_step(CASE[name], jnp.bfloat16)
    out_TNH, _ = run(case, step, jnp.bfloat16, BACKEND)
    assert error(case, out_TNH, step) > 3 * case_tolerance(case, jnp.bfloat16)


def test_layers_that_the_kernel_cannot_take_are_refused_by_name_and_triton_takes_them(monkeypatch):
    rule = LayerRule(1.0, None, None, False, "none")
    heads = {
        "num_tokens": 512,
        "group_size": 4,
        "head_dim": 128,
        "block_size": 16,
        "shares": False,
        "kind": "NVIDIA H200",
    }
    types = {"q_dtype": jnp.dtype("bfloat16"), "kv_dtype": jnp.dtype("bfloat16")}

    any_length = default_mosaic_tiles(128)
    long_ones = dataclasses.replace(any_length, least_tokens=513)

    def refusal(rule=rule, tiles=any_length, **changes):
        return mosaic.cannot_take(tiles, rule, **heads | types | changes)

    assert refusal() is None
    assert refusal(tiles=long_ones) == "a step of 512 tokens; accepted are 513 and more"
    assert refusal(tiles=long_ones, num_tokens=513) is None
    assert refusal(block_size=256) is None
    assert refusal(kind="NVIDIA A100-SXM4-80GB") == "the device is NVIDIA A100-SXM4-80GB; accepted are those of Hopper"
    assert "q is bfloat16 and the cache int8; accepted are bfloat16, float16" in refusal(kv_dtype=jnp.dtype("int8"))
    assert refusal(head_dim=96) == "head_dim = 96; accepted are 64, 128"
    assert refusal(group_size=65) == "65 query heads per kv head; accepted are at most 64"
    assert refusal(block_size=48).startswith("block_size = 48; accepted are multiples of 8 that divide 128")
    assert refusal(shares=True) == "spans that rows share come before"
    ahead = dataclasses.replace(rule, sees_ahead=True)
    assert refusal(rule=ahead) == "tokens see what stands behind them"
    launched = use_mosaic(monkeypatch)
    shape = ServingShape("head_dim 256", 512, 64, head_dim=256)
    layer, args = layer_of(shape, BACKEND)
    jax.eval_shape(layer, *args)
    assert launched == []


def test_triton_takes_prompts_for_which_nothing_was_timed(monkeypatch, tmp_path):
    assert mosaic.choose_mosaic_tiles(4, 128, jnp.bfloat16, "NVIDIA H100 of another name") is None
    entry = {"tiles": dataclasses.asdict(default_mosaic_tiles(128)), "milliseconds": 1.0}
    key = tiles.tuned_key("prefill", 4, 128, jnp.bfloat16, "NVIDIA H200")
    (tmp_path / "tuned_mosaic.json").write_text(json.dumps({key: entry}))
    monkeypatch.setattr(mosaic, "TUNED", tmp_path / "tuned_mosaic.json")
    mosaic.tuned.cache_clear()
    try:
        assert mosaic.choose_mosaic_tiles(4, 128, jnp.bfloat16, "NVIDIA H200") == default_mosaic_tiles(128)
        assert mosaic.choose_mosaic_tiles(4, 64, jnp.bfloat16, "NVIDIA H200") is None
    finally:
        mosaic.tuned.cache_clear()


@pytest.mark.aot_gpu
@pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not()))
def test_the_kernel_compiles_for_hopper_and_outputs_take_the_place_of_queries(monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    launched = use_mosaic(monkeypatch, "gpu", default_mosaic_tiles(128))
    layer, (kv, q_TNH, *args) = layer_of(ServingShape("prompts", 2048, 64), "gpu")
    program = gpu_targets.compile_for(TARGETS["h200"], layer, kv, q_TNH, *args, donate=(0, 1))
    assert len(launched) == 1
    parts = 4 * 2 * 17 * 8 * 128 * 128  # 17 programs for each of 8 kv heads, twice as many parts of 128 x 128
    assert program.memory_analysis().temp_size_in_bytes < parts + q_TNH.size * q_TNH.dtype.itemsize
    (report,) = (path.read_text() for path in tmp_path.glob("*.ptxas"))
    assert "Compiling entry function 'paged_attend_mosaic" in report
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report


def test_a_layer_lowers_to_the_kernel_where_it_was_timed():
    layer, args = layer_of(ServingShape("prompts", 2048, 64), "gpu")
    assert gpu_targets.lower_for(TARGETS["h200"], layer, *args).count("@mosaic_gpu") == 1
    assert gpu_targets.lower_for(TARGETS["a100"], layer, *args).count("@mosaic_gpu") == 0

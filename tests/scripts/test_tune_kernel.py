"""scripts/tune_kernel.py keeps the fastest tiles for each key, and the kernels read them."""

import dataclasses
import importlib
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ragged_paged_attention.cases import serving_step
from pallas_kernels.ragged_paged_attention.gpu import mosaic_calls, tiles
from pallas_kernels.ragged_paged_attention.gpu.mosaic import MosaicTiles, default_mosaic_tiles
from pallas_kernels.timing import Chain


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """`tune(*arguments)`: what the script writes."""
    script = importlib.import_module("tune_kernel")
    output = tmp_path / "tuned.json"

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tune_kernel.py", "--interpret", "--output", str(output), *arguments])
        script.main()
        return json.loads(output.read_text(encoding="utf-8"))

    run.script, run.output = script, output
    return run


def timed_by(tune, monkeypatch, seconds_of):
    """Nothing is compiled: `seconds_of(tiles)` is what a candidate takes, or why there is no such candidate."""
    monkeypatch.setattr(tune.script, "timed", lambda choices, step, interpret: [(x, seconds_of(x)) for x in choices])


def test_candidates_that_do_not_compile_are_told_and_each_is_timed_with_its_own_tiles(tune, monkeypatch):
    asked = []

    def chain_with(step, choice, interpret):
        asked.append(choice)
        if choice.slots == 128:
            raise RuntimeError("too much shared memory")
        return Chain(lambda x, y: x + y, jnp.zeros(()), (jnp.float32(1),))

    monkeypatch.setattr(tune.script, "chain_with", chain_with)
    default = tiles.default_tiles("decode", 16, "float32", tiles.INTERPRETER)
    wide = dataclasses.replace(default, slots=128)
    found = list(tune.script.timed([default, wide, default], tune.script.TINY_STEPS[0], interpret=True))
    assert [choice for choice, _ in found] == [default, wide, default]
    assert [isinstance(seconds, RuntimeError) for _, seconds in found] == [False, True, False]
    assert set(asked) == {default, wide}


def test_a_chain_has_the_tiles_that_it_is_asked_for(tune):
    step = tune.script.TINY_STEPS[0]
    texts = set()
    for slots in (32, 64):
        choice = dataclasses.replace(tiles.default_tiles("decode", 16, "float32", tiles.INTERPRETER), slots=slots)
        chain = tune.script.chain_with(step, choice, interpret=True)
        texts.add(str(jax.make_jaxpr(chain.function)(chain.state, *chain.operands)))
    assert len(texts) == 2


def test_the_fastest_candidate_is_written_and_those_that_fail_are_passed_over(tune, monkeypatch):
    def seconds_of(choice):
        return RuntimeError("too much shared memory") if choice.slots == 128 else 1 / choice.slots

    timed_by(tune, monkeypatch, seconds_of)
    tune.output.write_text('{"another device": {"tiles": {}}}', encoding="utf-8")
    entries = tune()
    assert "another device" in entries
    ours = {key: entry for key, entry in entries.items() if key != "another device"}
    assert {key.split(", ")[1] for key in ours} == {"decode", "prefill"}
    assert all(entry["tiles"]["slots"] == 64 and entry["milliseconds"] == 1e3 / 64 for entry in ours.values())


def test_what_is_as_fast_as_the_default_does_not_replace_it(tune, monkeypatch):
    timed_by(tune, monkeypatch, lambda choice: 1 - choice.slots * 1e-5)
    for key, entry in tune().items():
        default = tiles.default_tiles(key.split(", ")[1], 16, "float32", tiles.INTERPRETER)
        assert entry["tiles"] == dataclasses.asdict(default)


@pytest.mark.parametrize(("gain", "is_taken"), [(0.9, True), (0.99, False)])
def test_prompts_for_which_mosaic_is_faster_have_an_entry_of_their_own(tune, monkeypatch, gain, is_taken):
    step = serving_step("prefill, 64", ((0, 64),), num_kv_heads=2, group_size=2, head_dim=64)
    monkeypatch.setattr(tune.script, "TINY_STEPS", [step, *tune.script.TINY_STEPS])
    is_mosaic = lambda choice: isinstance(choice, MosaicTiles)
    timed_by(tune, monkeypatch, lambda choice: gain if is_mosaic(choice) else 1.0)
    key = tiles.tuned_key("prefill", 2, 64, "bfloat16", tiles.INTERPRETER)
    written = tune.output.with_name("tuned_mosaic.json")
    written.write_text(json.dumps({key: "an older entry", "another device": {}}), encoding="utf-8")
    entry = tune()[key]
    found = json.loads(written.read_text(encoding="utf-8"))
    assert set(found) == ({"another device", key} if is_taken else {"another device"})
    assert "takes_turns" not in entry["tiles"]
    if is_taken:
        assert MosaicTiles(**found[key]["tiles"]) == default_mosaic_tiles(64)


def test_a_chain_of_mosaic_has_its_kernel(tune, monkeypatch):
    step = serving_step("prefill, 64", ((0, 64),), num_kv_heads=1, group_size=2, head_dim=64)
    launched = []
    monkeypatch.setattr(mosaic_calls, "attend", lambda *args: launched.append(args[1]) or args[6])
    chain = tune.script.chain_with(step, default_mosaic_tiles(64), interpret=True)
    jax.eval_shape(chain.function, chain.state, *chain.operands)
    assert launched == [default_mosaic_tiles(64)]


def test_the_kernels_read_what_was_written(tune, monkeypatch):
    timed_by(tune, monkeypatch, lambda choice: 1 / choice.slots)
    tune("--cases", "decode, 4")
    monkeypatch.setattr(tiles, "TUNED", tune.output)
    tiles.tuned.cache_clear()
    try:
        assert tiles.choose_tiles("decode", 2, 16, "float32", tiles.INTERPRETER).slots == 128
        assert tiles.choose_tiles("decode", 4, 16, "float32", tiles.INTERPRETER).slots == 32  # no entry: the default
    finally:
        tiles.tuned.cache_clear()


@pytest.mark.slow
@pytest.mark.exhaustive  # 50 s in the interpreter
def test_tiles_are_tuned_for_real_in_the_interpreter(tune):
    (entry,) = tune("--cases", "decode, 4").values()
    assert entry["milliseconds"] > 0
    assert entry["step"] == "decode, 4 x 64"


def test_without_a_gpu_there_is_nothing_to_tune(tune, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune_kernel.py"])
    with pytest.raises(SystemExit, match=r"nothing to tune on cpu: it needs an NVIDIA GPU.*Use --interpret"):
        tune.script.main()

"""scripts/tune_products.py times our tiles beside cuBLAS and keeps those that are faster."""

import importlib
import json

import pytest


@pytest.fixture
def script():
    return importlib.import_module("tune_products")


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_every_product_has_tiles_that_a_core_can_hold(script, bits):
    for product in script.products_of(script.MODELS["llama-8b"], bits):
        for rows in script.ROWS:
            choices = list(script.candidates(product, rows))
            assert (10 if bits == 16 else 3) < len(choices) == len(set(choices)), product
            for tiles in choices:
                height = tiles.outputs * tiles.folds * (2 if product.is_gated else 1)
                held = height * bits // 8 + 2 * max(16, rows * tiles.folds)
                assert tiles.stages * tiles.inputs * held <= 224 << 10
                assert height >= (64 if bits == 16 else 16) or not tiles.weight_first


def test_the_fastest_tiles_are_kept_where_they_are_faster_than_cublas_and_failures_are_told(
    script, monkeypatch, tmp_path, capsys
):
    product = script.products_of(script.MODELS["tiny"], 16)[1]  # o
    monkeypatch.setattr(script, "INTERPRETED", [script.Tiles(32, 32), script.Tiles(16, 32), script.Tiles(64, 32)])
    timer = script.Timer(product, lambda: 1.0, interpret=True)
    times = {8: [5.0, "no memory", "too many registers", 4.0, 4.5], 64: [5.0, 4.0, 4.95, 5.0, 6.0]}
    monkeypatch.setattr(timer, "of", lambda ways, rows: times[rows])
    entries = {"another device": {}, script.key_of(product, 64): {"tiles": "that are not ahead any more"}}
    script.tune(timer, 1e12, entries, tmp_path / "tuned.json")
    assert json.loads((tmp_path / "tuned.json").read_text()) == entries
    _, (key, entry) = sorted(entries.items(), key=lambda item: item[0] != "another device")
    assert "8 rows, 64 x 64" in key and entry["tiles"]["outputs"] == 16
    assert (entry["microseconds"], entry["cublas"]) == (4.0, 5.0)
    assert "1 failed: too many registers" in capsys.readouterr().out


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_ways_are_timed_on_the_device_at_hand_and_compared_with_the_first(script, bits):
    timer = script.Timer(script.products_of(script.MODELS["tiny"], bits)[2], lambda: 1.0, interpret=True)
    right = script.functools.partial(script.by_xla, timer.product)
    broken = lambda x, weight, added: 1 / 0
    wrong = lambda x, weight, added: right(x[::-1], weight, added)
    ours = script.functools.partial(script.by_kernel, timer.product, tiles=script.Tiles(32, 32), interpret=True)
    first, second, third, fourth = timer.of([(way, {}) for way in (right, broken, wrong, ours)], 2)
    assert first > 0 and fourth > 0
    assert second.startswith("ZeroDivisionError") and third.startswith("wrong by")

"""Figures and report from made-up results."""

import bench_offline
import pytest
from offline_bench import chart, checkpoints, report, roofline
from offline_bench.results import Results


def fake_run(engine, index, *, seconds, token=5, error=None):
    """A process that took `seconds` for each workload, its first token after a tenth of that."""
    events = [{"event": "first_token", "seconds": 10.0 - 5 * index}]
    if index == 0:
        events.append({"event": "first_minute", "per_second": 30 / seconds, "later_per_second": 20.0})
    for name in ("single", "prefill-1k", "mixed"):
        events.append(
            {
                "event": "run",
                "workload": name,
                "total_seconds": seconds,
                "first_seconds": [0.1 * seconds],
                "last_seconds": [seconds],
                "first_token_ids": [token],
                "peak_bytes": 1 << 30,
            }
        )
    return {"model": "llama-110m", "engine": engine, "round": index, "events": events, "error": error}


@pytest.fixture
def fake_results():
    sizes = {"requests": 1, "tokens_in": 100, "tokens_out": 91, "title": "a title"}
    metrics = {"single": "decode", "prefill-1k": "prefill", "mixed": "output"}
    models = {"llama-110m": {name: sizes | {"metric": metric} for name, metric in metrics.items()}}
    results = Results({"cores": 2}, "python bench", ["jaxpaged", "slow", "absent"], models, ["everything else."])
    results.roofline = [
        {"kind": "bandwidth", "dtype": "float32", "shape": "a sum", "per_second": 30e9},
        {"kind": "bandwidth", "dtype": "bfloat16", "shape": "8x1x1", "per_second": 20e9},
        {"kind": "matmul", "dtype": "bfloat16", "shape": "512x1x1", "per_second": 2e12},
        {"kind": "matmul", "dtype": "float32", "shape": "512x1x1", "per_second": 9e12},
    ]
    results.runs = [
        fake_run("jaxpaged", 0, seconds=2.0),
        fake_run("slow", 0, seconds=4.0, token=6),
        {"model": "llama-110m", "engine": "absent", "round": 0, "events": [], "error": "not installed."},
        fake_run("slow", 1, seconds=5.0, error="MemoryError: no room"),
        fake_run("jaxpaged", 1, seconds=1.0),
    ]
    return results


def test_rates_follow_the_metric_of_the_workload(fake_results):
    rates = {name: fake_results.rates("llama-110m", "jaxpaged", name) for name in ("single", "prefill-1k", "mixed")}
    assert rates["single"] == pytest.approx([90 / 1.8, 90 / 0.9])
    assert rates["prefill-1k"] == pytest.approx([100 / 0.2, 100 / 0.1])
    assert rates["mixed"] == pytest.approx([91 / 2, 91])


def test_starts_are_cold_in_the_first_round_and_warm_afterwards(fake_results):
    assert fake_results.start_seconds("llama-110m", "jaxpaged", cold=True) == 10.0
    assert fake_results.start_seconds("llama-110m", "jaxpaged", cold=False) == 5.0
    assert fake_results.start_seconds("llama-110m", "absent", cold=True) is None


def test_the_first_minute_is_that_of_the_first_round_beside_the_same_work_later(fake_results):
    assert fake_results.first_minute("llama-110m", "jaxpaged") == (15.0, 20.0)
    assert fake_results.first_minute("llama-110m", "absent") is None


def test_first_tokens_are_compared_within_a_round(fake_results):
    assert fake_results.same_first_tokens("llama-110m", "slow") == (3, 6)
    assert fake_results.same_first_tokens("llama-110m", "jaxpaged") == (6, 6)


def test_shares_are_of_the_fastest_memory_and_of_the_bfloat16_peak(fake_results):
    shape, figures = checkpoints.MODELS["llama-110m"], fake_results.roofline
    assert roofline.decode_share(shape, 100, figures) == pytest.approx(100 * shape.weight_bytes_per_step / 30e9)
    assert roofline.prefill_share(shape, 1000, figures) == pytest.approx(1000 * shape.flops_per_prefill_token / 2e12)
    assert roofline.decode_share(shape, 100, []) is None


def test_the_report_has_rates_ratios_failures_and_what_was_left_out(fake_results):
    text = report.markdown(fake_results)
    assert "| jaxpaged | 100 | 1,000 | 91.0 |" in text
    assert "| slow | 4.00 | 4.00 | 4.00 |" in text
    assert "| absent | - | - | - |" in text
    assert "| jaxpaged | 10.00 | 15.0 | 75 % | 5.00 |" in text
    assert "* Failed: absent, while it started: not installed." in text
    assert "* Failed: slow, after mixed: MemoryError: no room" in text
    assert "* everything else." in text
    assert "the slowest had 50 % of the best" in text
    assert "100 GB" not in text


def test_a_run_that_measured_nothing_still_has_a_report(fake_results):
    fake_results.runs, fake_results.roofline = [], []
    assert "Not measured." in report.markdown(fake_results)


def test_results_can_be_read_back_and_drawn(fake_results, tmp_path):
    fake_results.write(tmp_path / "results.json")
    bench_offline.main(["--report", str(tmp_path / "results.json")])
    assert (tmp_path / "report.md").read_text() == report.markdown(fake_results)
    chart.draw(Results.read(tmp_path / "results.json"), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes()[:4] == b"\x89PNG"

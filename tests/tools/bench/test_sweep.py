"""`bench sweep`: which loads, one file a run, a table and a picture, against a server that says what it is told."""

import csv
import json
import math

import pytest

from jaxpaged.entrypoints.cli import FAILURE, USAGE
from jaxpaged.tools.bench.sweep_run import load_of, reached, table, values_between
from jaxpaged.tools.pictures.load_plot import draw_load
from tests.tools.bench.conftest import answer


def result(load, rate, latency, run=0, **more):
    """A result of `bench sweep`; latencies are multiples of one."""
    concurrency, request_rate = (load, "inf") if isinstance(load, int) else (None, load)
    made = {
        "run_number": run,
        "model_id": "demo",
        "backend": "openai",
        "num_prompts": 100,
        "request_rate": request_rate,
        "max_concurrency": concurrency,
        "request_throughput": rate,
        "output_throughput": 32 * rate,
        "completed": 100,
        "failed": 0,
    }
    for name, times in (("ttft", 1.0), ("tpot", 0.1), ("e2el", 5.0)):
        for which, more_times in (("mean", 1.1), ("median", 1.0), ("p99", 2.0)):
            made[f"{which}_{name}_ms"] = latency * times * more_times
    return made | more


@pytest.fixture
def asked(scripted, tmp_path):
    """A server, and flags for it: four requests of a file."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abcd"), encoding="utf-8")
    server = scripted(lambda path, body, headers: (404, [b"{}"]) if body is None else (200, answer("x", "y")))
    flags = [
        "--base-url",
        server.url,
        "--model",
        "m",
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(path),
        "--skip-tokenizer-init",
        "--skip-chat-template",
        "--num-prompts",
        "4",
        "-o",
        str(tmp_path / "r"),
        "--experiment-name",
        "x",
    ]
    return server, flags, tmp_path / "r" / "x"


@pytest.mark.exhaustive
def test_given_loads_are_run_as_often_as_asked_and_written(asked, bench):
    server, flags, folder = asked
    status, out, err = bench("sweep", *flags, "--max-concurrencies", "2,1", "--num-runs", "2", "--goodput", "ttft:1e9")
    assert status == 0, err
    names = [f"max_concurrency={level}-run={run}.json" for level in (1, 2) for run in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "summary.csv", "sweep.png"]
    found = json.loads((folder / names[3]).read_text(encoding="utf-8"))
    assert found["run_number"] == 1 and found["max_concurrency"] == 2 and found["completed"] == 4
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["max_concurrency"] for row in rows] == ["1", "1", "2", "2"]
    assert {"mean_ttft_ms", "p99_e2el_ms", "request_goodput", "client_cpu_share"} <= set(rows[0])
    assert out.count("at a time |") == 4 and (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    salts = [body.get("cache_salt") for body in server.seen]
    assert salts[0] is None and [salts.count(salt) for salt in dict.fromkeys(salts[1:])] == [4] * 4


def test_loads_are_found_between_one_at_a_time_and_all_at_once(asked, bench):
    server, flags, folder = asked
    status, out, err = bench(
        "sweep", *flags, "--workload-var", "request_rate", "--workload-iters", "3", "--no-cache-salt"
    )
    assert status == 0, err
    loads = {path.name.rpartition("-run")[0] for path in folder.glob("*.json")}
    assert loads >= {"max_concurrency=1", "request_rate=inf"} and len(loads) == 3
    assert "1 at a time" in out.splitlines()[2] and "all at once" in out.splitlines()[-1]
    assert not any("cache_salt" in body for body in server.seen)


@pytest.mark.exhaustive
def test_a_load_that_fails_is_told_and_the_others_go_on(asked, bench):
    server, flags, _ = asked
    sent = []

    def script(path, body, headers):
        sent.append(body)
        return (404, [b"{}"]) if body is None else (503, [b"busy"]) if 3 < len(sent) < 8 else (200, answer("x"))

    server.script = script
    status, out, err = bench("sweep", *flags, "--request-rates", "inf,1000")
    assert status == FAILURE and "the server answers 503: busy" in err
    assert out.count("\n") == 4 and "all at once" in out and "1000/s" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--request-rates", "1", "--max-concurrencies", "1"], "not allowed with"),
        (["--request-rates", "1,0"], "--request-rate is 0"),
        (["--max-concurrencies", "0"], "--max-concurrency is 0"),
        (["--max-concurrencies", "2,2"], "twice"),
        (["--workload-iters", "1"], "--workload-iters is 1"),
        (["--num-runs", "0"], "--num-runs is 0"),
        (["-o", "/proc/nothing"], "/proc/nothing"),
        (["--request-rate", "1"], "--request-rates"),
    ],
)
def test_wrong_usage_is_one_line(flags, words, bench):
    status, out, err = bench("sweep", *flags)
    assert status == USAGE and words in err and err.count("\n") == 1 and out == ""


def test_results_are_never_mixed_with_older_ones(asked, bench):
    _, flags, folder = asked
    folder.mkdir(parents=True)
    (folder / "old").touch()
    status, _, err = bench("sweep", *flags, "--request-rates", "inf")
    assert status == USAGE and "is not empty" in err


def test_loads_between_are_evenly_far_apart():
    assert values_between(1.0, 9.0, 3, whole=True) == [3, 5, 7]
    assert values_between(1.0, 2.0, 5, whole=True) == [1, 2]
    assert values_between(2.0, 10.0, 3, whole=False) == [4.0, 6.0, 8.0]
    assert values_between(0.0, 0.0, 2, whole=False) == []


def test_the_load_of_a_run_is_its_rate_or_what_was_under_way():
    row = {"request_throughput": 4.0, "mean_e2el_ms": 500.0}
    assert reached(row, "request_rate") == 4.0 and reached(row, "max_concurrency") == pytest.approx(2.0)


def test_the_table_has_its_columns_below_each_other_and_rows_by_load():
    rows = [result(4, 3.0, 20.0), result(2.5, 2.0, 5.0), result("inf", 9.0, 900.0)]
    assert sorted(rows, key=load_of) == rows
    lines = table(rows, [50.0, 99.0]).splitlines()
    assert len({len(line) for line in lines}) == 1 and "p99 ms" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["4 at a time", "2.5/s", "all at once"]


# ---- the picture

MANY = [
    result(level, rate, latency, run)
    for level, rate, latency in ((1, 2.0, 5.0), (8, 9.0, 30.0), (64, 11.0, 600.0))
    for run in (0, 1)
]


def test_every_load_is_in_the_picture():
    figure = draw_load(MANY, 99.0, {"ttft": 500.0})
    throughput, ttft, tpot, e2el = figure.axes
    assert throughput.lines[0].get_ydata().tolist() == [64.0, 288.0, 352.0]
    assert [label.get_text() for label in throughput.get_xticklabels()] == ["1", "8", "64"]
    median, worst = ttft.lines[:2]
    assert median.get_xdata().tolist() == [2.0, 9.0, 11.0] and worst.get_ydata().tolist() == [10.0, 60.0, 1200.0]
    assert [text.get_text() for text in ttft.texts] == ["1", "8", "64"]
    assert ttft.lines[2].get_ydata() == [500.0, 500.0] and "limit 500 ms" in ttft.get_title(loc="left")
    assert ttft.get_yscale() == "log" and len(tpot.texts) == len(e2el.texts) == 3
    assert "demo" in figure.get_suptitle()
    beyond = draw_load(MANY, 99.0, {"ttft": 1e9}).axes[1]
    assert len(beyond.lines) == 2 and beyond.get_ylim()[1] < 1e4


def test_no_marker_is_cut_and_no_number_lies_beyond_the_axes():
    rows = [result(1, 0.01, 1.0), result(4, 2.0, 20.0), result(8, 9.0, 24.0)]
    figure = draw_load(rows, 99.0, {})
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert not any(artist.get_clip_on() for artist in [*axes.lines, *axes.collections])
        box = axes.get_window_extent()
        for text in axes.texts:
            place = text.get_window_extent()
            assert box.x0 <= place.x0 and place.x1 <= box.x1 and place.y1 <= box.y1, text.get_text()


@pytest.mark.parametrize(
    "rows", [MANY[:1], [result("inf", 1.0, 0.0)], [result(0.5, 1.0, 1.0), result("inf", 1.0, 2.0)]]
)
def test_few_loads_and_no_latency_can_be_drawn(rows, tmp_path):
    figure = draw_load(rows, 99.0, {})
    assert all(math.isfinite(limit) for axes in figure.axes for limit in axes.get_ylim())
    figure.savefig(tmp_path / "x.png")

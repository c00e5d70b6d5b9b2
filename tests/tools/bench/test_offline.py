"""`bench latency`, `throughput` and `startup` over an engine without a model, and over processes that say numbers."""

import itertools
import json
import sys

import pytest

from jaxpaged.entrypoints.cli import FAILURE, USAGE, engine, serve
from jaxpaged.tools.bench import latency, startup
from tests.engine.fake_engine import make_engine


@pytest.fixture
def made(monkeypatch):
    """Engines that commands have opened, and their options."""
    opened = []

    def open_fake(options, progress):
        progress("weights", 1, 2)
        found, executor = make_engine(max_model_len=256)
        opened.append((found, executor, dict(options)))
        return found

    monkeypatch.setattr(engine, "open_engine", open_fake)
    return opened


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "abc", "output_tokens": 3}, {"prompt": "d e", "output_tokens": 4}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "-1", "--num-prompts", "2"]


# ---- latency


def test_latency_reports_vllms_fields(bench, made, tmp_path):
    path = tmp_path / "l.json"
    status, out, err = bench(
        "latency",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--n",
        "2",
        "--num-iters",
        "5",
        "--num-iters-warmup",
        "1",
        "--output-json",
        str(path),
    )
    assert status == 0, err
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"model_id", "avg_latency", "std_latency", "latencies", "percentiles"}
    assert len(found["latencies"]) == 5 and list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert out.startswith("Avg latency: ") and "99% percentile latency: " in out
    [(_, executor, options)] = made
    assert options == {"enable_prefix_caching": False} and executor.waited and not executor.running


def test_latency_may_keep_the_prefix_cache_and_search_with_beams(bench, made):
    flags = ["--input-len", "8", "--output-len", "4", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert bench("latency", *flags, "--enable-prefix-caching", "--use-beam-search", "--n", "2")[0] == 0
    assert made[0][2]["enable_prefix_caching"] is True


def test_only_rounds_after_the_warm_up_are_measured(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(latency.time, "perf_counter", lambda: float(next(clock)))
    calls = []
    assert latency.measure(lambda: calls.append(1), 2, 3) == [1.0, 1.0, 1.0] and len(calls) == 5


def test_figures_of_latencies():
    found = latency.latency_result([1.0, 2.0, 3.0, 4.0], "m")
    assert found["avg_latency"] == 2.5 and found["std_latency"] == pytest.approx(1.25**0.5)
    assert found["percentiles"]["50"] == 2.5 and found["percentiles"]["90"] == pytest.approx(3.7)


# ---- throughput


@pytest.mark.parametrize("backend", ["vllm", "vllm-chat"])
def test_throughput_reports_vllms_fields(backend, bench, made, prompts, tmp_path):
    path = tmp_path / "t.json"
    status, out, err = bench(
        "throughput", *prompts, "--backend", backend, "--skip-chat-template", "--n", "2", "--output-json", str(path)
    )
    assert status == 0, err
    found = json.loads(path.read_text(encoding="utf-8"))
    fields = {
        "model_id",
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    }
    assert set(found) >= fields and found["num_requests"] == 2 and found["total_output_tokens"] == 2 * (3 + 4)
    assert found["total_num_tokens"] == found["total_prompt_tokens"] + 14
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    assert out.startswith("Throughput: ") and "Total num output tokens:  14" in out
    assert made[0][1].waited and made[0][2] == {"seed": 0}


def test_throughput_in_another_process_counts_the_same(bench, prompts, monkeypatch):
    from tests.entrypoints.http.async_engine import FakeAsyncEngine

    class Engine(FakeAsyncEngine):
        async def wait_for_programs(self):
            pass

    monkeypatch.setattr(serve, "open_async_engine", lambda *given: Engine(max_model_len=256))
    status, out, err = bench("throughput", *prompts, "--async-engine")
    assert status == 0, err
    assert "Total num output tokens:  7" in out


def test_a_prompt_that_the_engine_refuses_ends_the_command(bench, made, prompts):
    status, _, err = bench("throughput", *prompts, "--output-len", "400")
    assert status == USAGE and "prompt 0" in err and "Traceback" not in err


# ---- startup

SAYS = (
    "import json, sys; job = json.load(sys.stdin); print('noise');"
    "print(json.dumps({'startup_time': 2.0, 'compilation_time': 1.0, 'first_token_time': 3.0} if 'fail' not in "
    "job['options'].get('model', '') else {'error': 'there is no folder fail'}))"
)


@pytest.fixture
def starts(monkeypatch):
    """Jobs of the processes that were started, in place of engines."""
    jobs = []
    original = startup.answer_of_child

    def recording(command, job):
        jobs.append(job)
        return original([sys.executable, "-c", SAYS], job)

    monkeypatch.setattr(startup, "answer_of_child", recording)
    return jobs


def test_startup_reports_vllms_fields_and_fills_a_cache_of_its_own(bench, starts, tmp_path):
    path = tmp_path / "s.json"
    flags = ["--num-iters-cold", "2", "--num-iters-warmup", "1", "--num-iters-warm", "2", "--max-model-len", "64"]
    status, out, err = bench("startup", *flags, "--output-json", str(path))
    assert status == 0, err
    found = json.loads(path.read_text(encoding="utf-8"))
    for phase in ("cold", "warm"):
        assert found[f"avg_{phase}_startup_time"] == 2.0 and found[f"{phase}_compilation_times"] == [1.0, 1.0]
        assert found[f"{phase}_first_token_percentiles"]["99"] == 3.0
    caches = [job["options"]["compilation_cache_dir"] for job in starts]
    assert len(set(caches[:2])) == 2 and len(set(caches[2:])) == 1 and caches[2] not in caches[:2]
    assert all(job["options"]["max_model_len"] == 64 for job in starts)
    assert "COLD STARTUP\nAvg startup time:             2.00 seconds" in out and "WARM STARTUP" in out


def test_a_phase_may_be_left_out(bench, starts):
    status, out, _ = bench("startup", "--num-iters-cold", "0", "--num-iters-warm", "1")
    assert status == 0 and "COLD" not in out and len(starts) == 2


def test_an_engine_that_does_not_start_is_told(bench, starts):
    status, out, err = bench("startup", "fail")
    assert status == FAILURE and "does not start: there is no folder fail" in err and out == ""


def test_a_process_that_dies_is_told():
    with pytest.raises(Exception, match="status 3: it said nothing"):
        startup.answer_of_child([sys.executable, "-c", "raise SystemExit(3)"], {})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "nothing is measured"),
        (["startup", "--num-iters-warmup", "0"], "the first warm start would find an empty cache"),
        (["startup", "--bundle", "x"], "--bundle"),
        (["latency", "--num-iters", "0"], "--num-iters is 0"),
        (["latency", "--output-json", "/nowhere/x.json"], "/nowhere"),
        (["throughput", "--n", "0"], "--n is 0"),
        (["throughput", "--dataset-name", "custom"], "--dataset-path"),
        (["latency", "demo", "--model", "other"], "two models"),
        (["nonsense"], "unknown command 'nonsense'"),
    ],
)
def test_wrong_usage_is_one_line(command, words, bench):
    status, out, err = bench(*command)
    assert status == USAGE and words in err and err.count("\n") == 1 and out == ""

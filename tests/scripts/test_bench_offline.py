"""The offline benchmark: its workloads, checkpoints, protocol, plan and report. Nothing here measures speed."""

import json
import sys
import textwrap
from pathlib import Path

import bench_offline
import numpy as np
import pytest
import run_llama_cpp
import run_transformers
import session
from offline_bench import chart, checkpoints, peers, plan, report, roofline
from offline_bench.processes import run_process
from offline_bench.results import Results
from offline_bench.workloads import WORKLOADS, make_requests
from safetensors.numpy import load_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.engine.tokenizer import load_tokenizer

TINY = checkpoints.MODELS["tiny"]
VOCABULARY = TINY.vocab_size


# ---- workloads -------------------------------------------------------------------------------------


def test_every_round_asks_for_the_same_sizes_and_for_other_tokens():
    first, again, second = (make_requests(WORKLOADS["mixed"], VOCABULARY, index) for index in (0, 0, 1))
    assert first == again
    sizes = [[(len(r.prompt_token_ids), r.max_tokens) for r in requests] for requests in (first, second)]
    assert sizes[0] == sizes[1]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first, second))


@pytest.mark.parametrize(
    ("name", "count", "tokens_in", "tokens_out"),
    [
        ("single", 1, (128, 128), (128, 128)),
        ("prefill-1k", 1, (1024, 1024), (1, 1)),
        ("prefill-8k", 1, (8192, 8192), (1, 1)),
        ("mixed", 32, (32, 512), (64, 128)),
        ("shared", 32, (544, 544), (32, 32)),
        ("short", 256, (16, 64), (16, 32)),
        ("long", 32, (32, 8192), (64, 128)),
    ],
)
def test_workloads_have_the_sizes_that_their_titles_promise(name, count, tokens_in, tokens_out):
    requests = make_requests(WORKLOADS[name], VOCABULARY, 0)
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert len(requests) == count
    assert tokens_in[0] <= min(lengths) <= max(lengths) <= tokens_in[1]
    assert all(tokens_out[0] <= request.max_tokens <= tokens_out[1] for request in requests)
    assert all(258 <= token < VOCABULARY for request in requests for token in request.prompt_token_ids)


def test_shared_prompts_begin_alike_and_then_differ():
    requests = make_requests(WORKLOADS["shared"], VOCABULARY, 0)
    assert len({tuple(request.prompt_token_ids[:512]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids[512:]) for request in requests}) == 32


def test_scale_shrinks_tokens_and_batches_and_keeps_single_requests():
    mixed = make_requests(WORKLOADS["mixed"], VOCABULARY, 0, 0.25)
    (single,) = make_requests(WORKLOADS["single"], VOCABULARY, 0, 0.25)
    assert len(mixed) == 8
    assert max(len(request.prompt_token_ids) for request in mixed) <= 128
    assert (len(single.prompt_token_ids), single.max_tokens) == (32, 32)


# ---- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    return checkpoints.make_checkpoint(TINY, tmp_path_factory.mktemp("checkpoints"))


def test_a_checkpoint_has_every_tensor_in_bfloat16(tiny_checkpoint):
    found = load_file(tiny_checkpoint / "model.safetensors")
    assert {name: array.shape for name, array in found.items()} == dict(checkpoints.tensors(TINY))
    assert {str(array.dtype) for array in found.values()} == {"bfloat16"}
    weights = found["model.layers.0.mlp.gate_proj.weight"].astype(np.float32)
    assert abs(weights.mean()) < 0.002
    assert weights.std() == pytest.approx(checkpoints.SPREAD, rel=0.1)
    assert (found["model.norm.weight"] == 1).all()
    assert sum(array.size for array in found.values()) == TINY.num_parameters


def test_the_tokenizer_has_a_text_for_every_id(tiny_checkpoint):
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.decode(tokenizer.encode("Ünï!", add_special_tokens=False)) == "Ünï!"
    assert tokenizer.decode([300, 301]) == " word300 word301"


def test_jaxpaged_completes_prompts_with_a_checkpoint(tiny_checkpoint):
    (request,) = make_requests(WORKLOADS["single"], VOCABULARY, 0, 0.05)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(model=str(tiny_checkpoint), max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate({"prompt_token_ids": request.prompt_token_ids}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_a_checkpoint_is_written_once_and_again_when_it_is_another_or_unfinished(tiny_checkpoint):
    weights = tiny_checkpoint / "model.safetensors"
    before = weights.stat().st_mtime_ns
    checkpoints.make_checkpoint(TINY, tiny_checkpoint.parent)
    assert weights.stat().st_mtime_ns == before
    (tiny_checkpoint / checkpoints.MARKER).unlink()
    checkpoints.make_checkpoint(TINY, tiny_checkpoint.parent)
    assert weights.stat().st_mtime_ns != before


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="Make room"):
        checkpoints.make_checkpoint(TINY, tmp_path)
    assert not (tmp_path / "tiny" / "model.safetensors").exists()


def test_shapes_count_what_they_are_made_of():
    llama, qwen = checkpoints.MODELS["llama-110m"], checkpoints.MODELS["qwen3-0.6b"]
    assert llama.num_parameters == pytest.approx(110e6, rel=0.01)
    assert qwen.num_parameters == pytest.approx(0.596e9, rel=0.01)
    assert checkpoints.MODELS["llama-8b"].num_parameters == pytest.approx(8.03e9, rel=0.001)
    norms = sum(shape[0] for _, shape in checkpoints.tensors(qwen) if len(shape) == 1)
    assert qwen.weight_bytes_per_step == 2 * (qwen.num_parameters - norms)


# ---- the protocol ----------------------------------------------------------------------------------

ENGINE = """
    import sys
    sys.path.insert(0, {folder!r})
    from session import Session
    class Engine:
        versions = {{"fake": "1"}}
        def settle(self): pass
        def complete(self, requests, watch, shared_prefix):
            print("noise on standard output")
            for index, request in enumerate(requests):
                {body}
                for _ in range(request["max_tokens"]):
                    watch.add(index, [7])
    Session().run(Engine())
    {farewell}
"""
JOB = {
    "threads": 1,
    "warm_up": [{"prompt_token_ids": [1], "max_tokens": 1}],
    "workloads": [
        {"name": name, "shared_prefix": 0, "requests": [{"prompt_token_ids": [index], "max_tokens": 3}]}
        for index, name in enumerate(("one", "two"))
    ],
}


def run_fake(tmp_path, body="pass", farewell="", timeout=60.0):
    program = tmp_path / "engine.py"
    folder = str(Path(session.__file__).parent)
    program.write_text(textwrap.dedent(ENGINE.format(folder=folder, body=body, farewell=farewell)))
    return run_process([sys.executable, str(program)], JOB, tmp_path / "log", timeout, {})


def test_an_engine_says_when_it_is_ready_and_what_each_workload_took(tmp_path):
    outcome = run_fake(tmp_path)
    assert outcome.error is None
    assert [event["event"] for event in outcome.events] == ["ready", "first_token", "settled", "run", "run", "end"]
    run = outcome.events[3]
    assert run["workload"] == "one"
    assert 0 < run["first_seconds"][0] <= run["last_seconds"][0] <= run["total_seconds"]
    assert run["first_token_ids"] == [7]
    assert outcome.events[-1]["peak_bytes"] > 1 << 20
    assert "noise" in (tmp_path / "log").read_text()


def test_a_workload_that_fails_does_not_stop_the_next(tmp_path):
    outcome = run_fake(tmp_path, body="if request['prompt_token_ids'] == [0]: raise ValueError('no such thing')")
    failed, run = outcome.events[3:5]
    assert failed["error"] == "ValueError: no such thing"
    assert run["workload"] == "two"
    assert outcome.error is None


def test_too_few_tokens_are_a_failure(tmp_path):
    outcome = run_fake(tmp_path, body="request = dict(request, max_tokens=2)")
    assert "got 2 tokens instead of 3" in outcome.events[3]["error"]


def test_a_crash_gives_the_last_error_line(tmp_path):
    body = "assert request['prompt_token_ids'] == [1] or sys.exit('MemoryError: no room')"
    outcome = run_fake(tmp_path, body=body)
    assert outcome.error == "MemoryError: no room"
    assert outcome.events[-1]["event"] == "settled"


def test_a_hanging_engine_is_stopped(tmp_path):
    outcome = run_fake(tmp_path, body="__import__('time').sleep(60)", timeout=1.0)
    assert outcome.error == "stopped after 1 s."


def test_an_engine_that_dies_before_its_job_is_reported(tmp_path):
    outcome = run_process([sys.executable, "-c", "import no_such_engine"], JOB, tmp_path / "log", 60.0, {})
    assert outcome.error == "ModuleNotFoundError: No module named 'no_such_engine'"


# ---- the plan --------------------------------------------------------------------------------------


def test_the_default_leaves_the_slow_things_out_and_says_so(tmp_path):
    made = plan.make_plan(["qwen3-0.6b"], None, ["transformers"], [""], tmp_path)
    ours, peer = made.engines
    assert "mixed" not in made.workloads["qwen3-0.6b"]
    assert made.names(ours, "qwen3-0.6b", 1) == ("single", "prefill-1k", "shared")
    assert made.names(peer, "qwen3-0.6b", 0) == ("single", "prefill-1k")
    assert made.names(peer, "qwen3-0.6b", 1) == ()
    assert "mixed" in made.left_out[0]
    assert "--setup-peers transformers" in peer.missing


def test_what_is_asked_for_runs_in_every_round(tmp_path):
    made = plan.make_plan(["qwen3-0.6b"], ["long"], ["transformers"], ["--max-num-seqs 8", ""], tmp_path)
    assert [made.names(engine, "qwen3-0.6b", 1) for engine in made.engines] == [("long",)] * 3
    assert made.engines[0].flags == ("--max-num-seqs", "8")
    assert made.left_out == ()


def test_an_8b_model_never_runs_by_default():
    assert "llama-8b" not in plan_models([])
    assert plan_models(["--models", "llama-8b"]) == ["llama-8b"]


def plan_models(words):
    return list(bench_offline.plan_of(bench_offline.parse_arguments(words)).workloads)


@pytest.mark.parametrize("words", [["--scale", "0"], ["--scale", "2"], ["--repeat", "0"], ["--threads", "0"]])
def test_figures_out_of_range_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench_offline.parse_arguments(words)
    assert "must be" in capsys.readouterr().err


# ---- the engines' own arithmetic -------------------------------------------------------------------


def test_static_batches_keep_a_long_prompt_away_from_short_ones():
    requests = [{"prompt_token_ids": [0] * length} for length in (8192, *range(32, 512, 15))]
    found = run_transformers.batches(requests)
    assert sorted(index for batch in found for index in batch) == list(range(len(requests)))
    assert max(len(batch) for batch in found) <= run_transformers.MOST_ROWS
    padded = [len(batch) * max(len(requests[index]["prompt_token_ids"]) for index in batch) for batch in found]
    assert max(padded) <= run_transformers.MOST_PADDED_TOKENS
    assert sum(padded) < 2 * sum(len(request["prompt_token_ids"]) for request in requests)


class FakeLlama:
    """The calls of llama.cpp's interface that a run needs; the token of a row is its position."""

    def __init__(self):
        self.copied, self.removed, self.steps = [], [], []

    def llama_get_memory(self, context):
        return None

    def llama_decode(self, context, batch):
        self.positions = list(batch.pos[: batch.n_tokens])
        self.steps.append([batch.seq_id[row][0] for row in range(batch.n_tokens)])
        return 0

    def llama_sampler_sample(self, sampler, context, row):
        return self.positions[row]

    def llama_memory_seq_cp(self, memory, source, target, begin, end):
        self.copied.append((source, target, begin, end))

    def llama_memory_seq_rm(self, memory, slot, begin, end):
        self.removed.append(slot)


def run_llama(requests, shared_prefix, num_slots):
    size = run_llama_cpp.BATCH
    batch = type("Batch", (), {"token": [0] * size, "pos": [0] * size, "n_seq_id": [0] * size,
                               "seq_id": [[0] for _ in range(size)], "logits": [0] * size})()  # fmt: skip
    lib, watch = FakeLlama(), session.Watch(len(requests))
    engine = type("Engine", (), {"lib": lib, "sampler": None})()
    run_llama_cpp.Run(engine, None, batch, requests, watch, num_slots, shared_prefix).run()
    return lib, watch


def test_llama_cpp_runs_more_requests_than_sequences_and_fills_its_batches():
    requests = [{"prompt_token_ids": [1] * length, "max_tokens": 3} for length in (700, 20, 30, 40, 50)]
    lib, watch = run_llama(requests, 0, 2)
    assert watch.num_tokens == [3] * 5
    assert watch.first_token_ids == [699, 19, 29, 39, 49]
    assert len(lib.steps[0]) == run_llama_cpp.BATCH
    assert sum(map(len, lib.steps)) == sum(length + 2 for length in (700, 20, 30, 40, 50))


def test_llama_cpp_computes_a_common_beginning_once():
    requests = [{"prompt_token_ids": [1] * 110, "max_tokens": 2} for _ in range(4)]
    lib, watch = run_llama(requests, 100, 3)
    assert watch.num_tokens == [2] * 4
    assert watch.first_token_ids == [109] * 4
    assert len(lib.copied) == 3
    assert sum(map(len, lib.steps)) == 100 + 4 * (10 + 1)


# ---- the report ------------------------------------------------------------------------------------


def fake_run(engine, index, *, seconds, token=5, error=None):
    """A process that took `seconds` for each workload, its first token after a tenth of that."""
    events = [{"event": "first_token", "seconds": 10.0 - 5 * index}]
    for name in ("single", "prefill-1k", "mixed"):
        events.append({
            "event": "run", "workload": name, "total_seconds": seconds, "first_seconds": [0.1 * seconds],
            "last_seconds": [seconds], "first_token_ids": [token], "peak_bytes": 1 << 30,
        })  # fmt: skip
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
    assert "| jaxpaged | 10.00 | 5.00 |" in text
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


# ---- environments ----------------------------------------------------------------------------------


def test_every_peer_has_its_program_and_its_environment():
    for peer in peers.PEERS.values():
        assert (plan.ENGINES / peer.script).exists()
        assert peer.environment in peers.ENVIRONMENTS


def test_no_fitting_python_is_a_sentence_on_what_to_do():
    with pytest.raises(peers.SetupError, match="uv python install 3.99"):
        peers.find_python(("3.99",))


def test_a_failed_installation_names_the_error_and_the_log(tmp_path):
    with open(tmp_path / "install.log", "w") as log, pytest.raises(peers.SetupError, match=r"ERROR: no such wheel"):
        peers.run_step([sys.executable, "-c", "import sys; sys.exit('ERROR: no such wheel')"], log)


# ---- all of it -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_run_goes_from_end_to_end(tmp_path, capsys):
    words = ["--models", "tiny", "--workloads", "single", "shared", "--peers", "none", "--repeat", "1"]
    flags = "--max-num-seqs 8 --max-num-batched-tokens 16"
    folders = ["--out", str(tmp_path / "out"), "--checkpoints-dir", str(tmp_path / "models")]
    assert bench_offline.main([*words, "--scale", "0.05", "--jaxpaged", flags, *folders]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["error"] for run in results["runs"]] == [None]
    assert "* Failed" not in capsys.readouterr().out
    assert results["roofline"]

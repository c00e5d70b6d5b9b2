"""Bundles: the same tokens without a compilation, and a refusal for every one that is stale or damaged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.build import resolve_model
from jaxpaged.errors import CapacityError, ConfigError, UsageError
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.worker.programs import bundles
from pallas_kernels import backends
from pallas_kernels.few_rows_matmul.cpu import has_blocks
from pallas_kernels.llvm import calls
from pallas_kernels.llvm.machine import this_machine, why_not
from tests.core.simulation import ForcedLengths
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.draft_heads import write_eagle3

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "max_model_len": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 16,
    "compilation_cache_dir": "off",
    "dtype": "float32",
    "max_logprobs": 2,
    "num_scheduler_steps": 3,
}
ONE_STEP = {"num_scheduler_steps": 1}  # fewer programs: those of runs are in the first bundle
BACKEND_COMPILE, TRACE = "/jax/core/compile/backend_compile_duration", "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiled(model, tmp_path_factory):
    """(A bundle of the tiny model, the answers of the engine that wrote it)."""
    folder = tmp_path_factory.mktemp("bundle")
    config, executor = start(model)
    executor.worker.save_bundle(folder)
    assert len(executor.worker.programs.seconds) == executor.worker.stats()["programs"]
    expected = answers(config, executor)
    executor.shutdown()
    return folder, expected


@pytest.fixture(scope="module")
def bundle(compiled):
    """Tests that change it take a copy."""
    return compiled[0]


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "copy")


def start(model, **changes):
    folder, functions, decoder, config = resolve_model(
        EngineConfig.from_options(**{"model": str(model), **OPTIONS, **changes})
    )
    return config, UniProcExecutor(config, functions, decoder, folder)


def answers(config, executor, lengths=None):
    """Tokens of a plain, a penalised and a log probability request: every kind of program runs."""
    executor.worker.programs.wait_all(on_demand=True)
    scheduler = Scheduler(config.scheduler, executor.kv_cache_config, max_model_len=32, enable_prefix_caching=True)
    scheduler.draft_lengths = lengths or scheduler.draft_lengths
    logprobs = {"seed": 4, "logprobs": 2, "prompt_logprobs": 1}
    kinds = ({"temperature": 0.0}, {"seed": 3, "repetition_penalty": 1.3}, logprobs)
    for i, options in enumerate(kinds):
        params = SamplingParams(**{"seed": 0, **options}, max_tokens=6, ignore_eos=True)
        scheduler.add_request(EngineCoreRequest(str(i), list(prompt_of("llama"))[:12], params, arrival_time=float(i)))
    found = {}
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule(executor.max_decode_steps())
        for output in scheduler.update_from_output(scheduled, executor.execute_model(scheduled).result()):
            found.setdefault(output.request_id, []).append((output.new_token_ids, output.new_logprobs))
    return found


def tokens_of(found):
    """Request -> its tokens."""
    return {request: [token for tokens, _ in steps for token in tokens] for request, steps in found.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_bundle_holds_what_drafts_too(model, method, tmp_path):
    """The model drafts for itself, and is always right; the head is random."""
    drafts = model if method == "draft_model" else write_eagle3(tmp_path / "head")
    drafting = {"method": method, "model": str(drafts), "num_speculative_tokens": 2}
    config, executor = start(model, speculative_config=drafting)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    executor.worker.save_bundle(bundle)
    expected = answers(config, executor, ForcedLengths(lambda: 2))
    executor.shutdown()
    config, executor = start(model, speculative_config=drafting, bundle=str(bundle))
    try:
        lengths = ForcedLengths(lambda: 2)
        assert answers(config, executor, lengths) == expected and lengths.num_drafts > 0
        assert lengths.num_accepted > 0 or method == "eagle3"
        assert not executor.worker.programs.seconds, "a program was compiled"
    finally:
        executor.shutdown()


def test_an_engine_from_a_bundle_compiles_nothing_and_gives_the_same_tokens(model, compiled):
    bundle, expected = compiled
    config, loaded = start(model, bundle=str(bundle))
    events = []
    listener = lambda event, duration, **_: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        found = answers(config, loaded)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
        loaded.shutdown()
    assert found == expected
    assert BACKEND_COMPILE not in events and TRACE not in events
    assert loaded.worker.programs.seconds == {}
    stats = loaded.worker.stats()
    assert stats["programs_from_bundle"] == stats["programs_ready"] == stats["programs"]


WITH_KERNELS = {**ONE_STEP, "dtype": "bfloat16", "block_size": 16}
OPS = ("few_rows_matmul", "ragged_paged_attention", "rms_norm", "top_k")
ELSEWHERE = """
import sys
from tests.worker.programs.test_bundles import WITH_KERNELS, answers, start, tokens_of
config, executor = start(sys.argv[1], bundle=sys.argv[2], **WITH_KERNELS)
print(tokens_of(answers(config, executor)), executor.worker.programs.seconds)
executor.shutdown()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_programs_that_call_kernels_find_them_in_another_process_and_are_refused_without_them(tmp_path, monkeypatch):
    (tmp_path / "bundle").mkdir()
    model = write_checkpoint("qwen3", tmp_path / "model")  # whose heads attention's kernel takes
    config, executor = start(model, **WITH_KERNELS)
    executor.worker.save_bundle(tmp_path / "bundle")
    expected = tokens_of(answers(config, executor))
    executor.shutdown()
    kernels = bundles.Bundle(tmp_path / "bundle").manifest.kernels
    ops = {op: [name.split(".")[2:-1] for name in sorted(kernels) if f".{op}." in name] for op in OPS}
    # Log probabilities of prompts have blocks of rows.
    blocks = ["float32", "words"] if has_blocks("bfloat16", this_machine()) else []
    assert ops["few_rows_matmul"] == [["bfloat16", form] for form in [*"1248", *blocks]]
    attention = ["joined", "planned", "singles", "tiles", "written"]
    assert [name[0] for name in ops["ragged_paged_attention"]] == attention
    assert ops["rms_norm"] == [["bfloat16", "factors", "kept"]]
    assert ops["top_k"] == [["2"], ["223"]]  # log probabilities, and candidates: the whole of this vocabulary
    command = [sys.executable, "-c", ELSEWHERE, str(model), str(tmp_path / "bundle")]
    process = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300)
    assert process.stdout.strip() == f"{expected} {{}}", process.stderr
    monkeypatch.setattr(backends, "why_not", lambda: "llvmlite is not there")
    with pytest.raises(ConfigError, match=r"sample_buckets is \(1, 2, 4, 8\) there and \(2, 8\) here"):
        start(model, bundle=str(tmp_path / "bundle"), **WITH_KERNELS)
    monkeypatch.setattr(bundles.Bundle, "check", lambda *_: None)  # as if the fingerprint had not seen it
    monkeypatch.setattr(calls, "why_not", lambda: "llvmlite is not there")
    with pytest.raises(ConfigError, match="there is no kernel pallas_kernels.*: llvmlite is not there"):
        start(model, bundle=str(tmp_path / "bundle"), **WITH_KERNELS)


@pytest.mark.exhaustive
def test_a_bundle_of_a_sharded_engine_loads_onto_the_same_mesh(model, tmp_path):
    config, executor = start(model, tensor_parallel_size=2, **ONE_STEP)
    executor.worker.save_bundle(tmp_path)
    expected = answers(config, executor)
    executor.shutdown()
    config, executor = start(model, tensor_parallel_size=2, **ONE_STEP, bundle=str(tmp_path))
    assert answers(config, executor) == expected
    assert executor.worker.programs.seconds == {}
    executor.shutdown()


def test_donated_arguments_stay_donated(model, bundle):
    config, executor = start(model, bundle=str(bundle))
    before = executor.worker.device.state.kv[0].arrays[0]
    answers(config, executor)
    assert before.is_deleted()
    executor.shutdown()


@pytest.mark.parametrize(
    ("option", "there", "here"),
    [
        ("max_num_seqs", "4", "3"),
        ("max_logprobs", "2", "1"),
        ("logprobs_mode", "raw_logprobs", "raw_logits"),
        ("dtype", "float32", "bfloat16"),
        ("block_size", "8", "16"),
        ("kv_cache_dtype", "float32", "bfloat16"),
        ("max_model_len", "32", "24"),
        ("tensor_parallel_size", "1", "2"),
        ("quantization", "None", "int8"),
        ("num_scheduler_steps", "3", "2"),
    ],
)
def test_an_option_that_shapes_programs_is_named_with_both_values(model, bundle, option, there, here):
    value = int(here) if here.isdigit() else here
    with pytest.raises(ConfigError, match=f"stale: (options|model|device).*{there} there and .*{here} here") as refusal:
        start(model, bundle=str(bundle), **{option: value})
    assert "jaxpaged compile" in str(refusal.value)


def test_other_token_buckets_are_refused(model, bundle):
    changed = {"token_buckets": (8, 16), "max_num_batched_tokens": 16}
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 8 there and 16 here"):
        start(model, bundle=str(bundle), **changed)
    with pytest.raises(ConfigError, match=r"token_buckets is \(8,\) there and \(4, 8\) here"):
        start(model, bundle=str(bundle), token_buckets=(4, 8))


def test_another_number_of_kv_blocks_is_refused_and_none_takes_the_bundles(model, bundle):
    with pytest.raises(ConfigError, match="16 there and num_gpu_blocks_override is 20 here"):
        start(model, bundle=str(bundle), num_gpu_blocks_override=20)
    with pytest.raises(CapacityError, match="compiled for 16 KV blocks, .* kv_cache_memory_bytes gives 1000"):
        start(model, bundle=str(bundle), num_gpu_blocks_override=None, kv_cache_memory_bytes=1000)
    _, executor = start(model, bundle=str(bundle), num_gpu_blocks_override=None)
    assert executor.kv_cache_config.num_blocks == (16,)
    executor.shutdown()


def test_another_model_is_refused_by_the_field_that_differs(model, bundle, tmp_path):
    other = write_checkpoint("llama", tmp_path / "other")
    hf = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**hf, "rms_norm_eps": 1e-3}))
    with pytest.raises(ConfigError, match=r"model.norm_eps is 1e-05 there and 0.001 here"):
        start(other, bundle=str(bundle))


@pytest.mark.parametrize(
    "field",
    [
        "versions.jax",
        "versions.jaxlib",
        "device.kind",
        "device.runtime",
        "device.mesh",
        "parameters",
        "source.jaxpaged/worker/step/functions.py",
        "source.jaxpaged/models/llama.py",
        "jax.xla_flags",
    ],
)
def test_every_field_of_the_fingerprint_counts(model, copy, field):
    path = copy / bundles.FINGERPRINT
    head = json.loads(path.read_text())
    assert field in head["fingerprint"]
    head["fingerprint"][field] = "foreign"
    path.write_text(json.dumps(head))
    with pytest.raises(ConfigError, match=f"stale: {field} is foreign there and .* here"):
        start(model, bundle=str(copy))


def test_a_cpu_with_other_instructions_is_refused_with_those_that_differ(model, copy):
    path = copy / bundles.FINGERPRINT
    head = json.loads(path.read_text())
    head["fingerprint"]["device.cpu_features"].append("avx4096")
    path.write_text(json.dumps(head))
    with pytest.raises(ConfigError, match="cpu_features has avx4096 there and nothing more here"):
        start(model, bundle=str(copy))


@pytest.mark.parametrize("file", ["forward-8.xla", "zeros.xla", bundles.PROGRAMS, bundles.FINGERPRINT])
def test_a_truncated_file_is_refused_at_the_start(model, copy, file):
    data = (copy / file).read_bytes()
    (copy / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=f"{file} is damaged.*jaxpaged compile"):
        start(model, bundle=str(copy))


def test_a_flipped_bit_is_refused_at_the_start(model, copy):
    data = bytearray((copy / "sample-8.xla").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "sample-8.xla").write_bytes(data)
    with pytest.raises(ConfigError, match="sample-8.xla is damaged"):
        start(model, bundle=str(copy))


@pytest.mark.parametrize("file", ["forward-8.xla", bundles.PROGRAMS, bundles.FINGERPRINT])
def test_a_missing_file_says_what_to_run(model, copy, file):
    (copy / file).unlink()
    with pytest.raises(ConfigError, match=f"{file}.*jaxpaged compile"):
        start(model, bundle=str(copy))


def test_a_folder_that_is_no_bundle_or_of_another_format_is_refused(model, copy, tmp_path):
    with pytest.raises(ConfigError, match="is no bundle, or was not finished"):
        start(model, bundle=str(tmp_path / "nowhere"))
    head = json.loads((copy / bundles.FINGERPRINT).read_text())
    (copy / bundles.FINGERPRINT).write_text(json.dumps({**head, "format": 99}))
    with pytest.raises(ConfigError, match=f"has format 99; this version reads {bundles.FORMAT}"):
        start(model, bundle=str(copy))


def test_a_disk_that_fills_while_a_bundle_is_written_leaves_no_bundle(model, bundle, tmp_path, monkeypatch):
    _, executor = start(model, bundle=str(bundle))
    programs = {key: executor.worker.programs[key] for key in list(executor.worker.programs.builders)[:1]}
    executor.shutdown()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles, "store", lambda program, node_types: (b"code", programs_record(bundle)))
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(UsageError, match=r"cannot write .* \(4 bytes\): No space left on device"):
        bundles.save_bundle(tmp_path, programs, {}, 16, (), lambda *_: None)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="was not finished"):
        bundles.Bundle(tmp_path)


def programs_record(bundle):
    return bundles.Bundle(bundle).manifest.programs[0].record

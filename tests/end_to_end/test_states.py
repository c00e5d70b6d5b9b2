"""Models with recurrent states, through whole engines: transformers' tokens, from snapshots and without."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.kv_store.page import SNAPSHOT, decode_header
from jaxpaged.messages import EngineCoreRequest
from tests.end_to_end.test_kv_connectors import EXAMPLE, connector_of, patient
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

# Prompts of 40 tokens come in chunks, answers in runs of steps.
OPTIONS = {
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "num_scheduler_steps": 4,
}


def test_snapshots_are_where_prompts_end_and_part_and_what_nobody_owns_may_be_nan(tmp_path):
    """Each later request stands beside others, begins behind another's snapshot, and gives transformers' tokens."""
    golden, prompt = golden_of("lfm2")["greedy"], prompt_of("lfm2")
    options = EngineConfig.from_options(
        **OPTIONS, model=str(write_checkpoint("lfm2", tmp_path)), num_gpu_blocks_override=64, dtype="float32"
    )
    folder, model, decoder, config = resolve_model(options)
    executor = UniProcExecutor(config, model, decoder, folder)
    device = executor.worker.device
    device.state.kv = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), device.state.kv)
    core = EngineCore(config, executor)

    def serve(**prompts):
        tokens, hits = {}, {}
        for name, ids in prompts.items():
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True)
            core.add_request(EngineCoreRequest(name, ids, params, arrival_time=0.0))
        while core.has_work():
            for output in core.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                hits[output.request_id] = output.num_cached_tokens
            core._scheduler.check_integrity()
        return tokens, hits

    tokens, hits = serve(first=prompt, short=prompt[5:17])
    assert tokens["first"] == golden and hits == {"first": 0, "short": 0}
    tokens, hits = serve(again=prompt, other=[*prompt[:27], 7, 8, 9])
    assert tokens["again"] == golden and hits == {"again": 32, "other": 0}, "two ways part where nothing is kept yet"
    tokens, hits = serve(third=[*prompt[:26], 9, 9, 9, 9], turn=[*prompt, *golden, 5], again=prompt)
    assert hits == {"third": 24, "turn": 48, "again": 32}, "where they part, behind an answer, and a prompt"
    assert tokens["again"] == golden
    alone, others = tokens, {"third": [*prompt[:26], 9, 9, 9, 9], "turn": [*prompt, *golden, 5]}
    core.reset_prefix_cache()
    tokens, hits = serve(**others)
    assert set(hits.values()) == {0} and tokens == {name: alone[name] for name in others}
    core.shutdown()


def answers(llm, *prompts, **params):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs[0].num_cached_tokens


SPLIT = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2, "num_scheduler_steps": 1}
RANKS = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfm2_moe", {"num_gpu_blocks_override": 14}),
        ("lfm2_moe", STAGES),
        pytest.param(
            "lfm2",
            {**STAGES, "tensor_parallel_size": 2, "num_gpu_blocks_override": 14},
            marks=pytest.mark.exhaustive,
        ),
        (
            "lfm2",
            {**SPLIT, "num_gpu_blocks_override": 14, "recurrence_backend": "tests.layers.test_recurrence:BACKEND"},
        ),
        ("lfm2_moe", RANKS),
    ],
)
def test_states_go_with_stages_ranks_and_split_contexts(name, options, tmp_path):
    """Chunks, cached beginnings, so few blocks that requests are preempted; log probabilities; and after sleeping."""
    golden, prompt, folder = golden_of(name)["greedy"], prompt_of(name), write_checkpoint(name, tmp_path)
    with LLM(**OPTIONS | options, model=str(folder), skip_tokenizer_init=True, compilation_cache_dir="off") as llm:
        assert answers(llm, prompt) == ([golden], 0)
        assert answers(llm, *[prompt] * 4) == ([golden] * 4, 32)
        assert llm.stats().number("num_preemptions") > 0 or "num_gpu_blocks_override" not in options
        assert answers(llm, prompt, prompt[:9], logprobs=1, prompt_logprobs=1)[0][0] == golden
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, prompt) == ([golden], 0)
        assert llm.stats().number("recompiles") == 0


def logprobs_of(llm, prompt):
    """(tokens, their log probabilities, how many tokens were cached) of a greedy answer."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (answer,) = output.outputs
    each = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)]
    return list(answer.token_ids), each, output.num_cached_tokens


def test_tiers_keep_snapshots_with_keys_and_values_and_what_is_damaged_is_computed(tmp_path):
    """From host memory after the device has forgotten, from a disk in the next engine, and without some files."""
    golden, prompt = golden_of("lfm2")["greedy"], prompt_of("lfm2")
    model, folder = write_checkpoint("lfm2", tmp_path / "model"), tmp_path / "pages"
    options = {**OPTIONS, "model": str(model), "skip_tokenizer_init": True, "kv_offload": f"host=64M,disk={folder}:64M"}
    with LLM(**options) as llm:
        patient(llm)
        tokens, expected, cached = logprobs_of(llm, prompt)
        assert (tokens, cached) == (golden, 0)
        _, on_device, cached = logprobs_of(llm, prompt)
        assert cached == 32
        assert llm.reset_prefix_cache()
        assert logprobs_of(llm, prompt) == (golden, on_device, 32), "host memory"
        assert logprobs_of(llm, [*prompt, *golden[:9], 5])[2] == 48, "the next turn of a chat"
        with pytest.raises(UsageError, match="this model has recurrent states besides. Keep prompts in a disk tier"):
            llm.save_prefix({"prompt_token_ids": prompt}, tmp_path / "prefix")
        assert llm.stats().number("recompiles") == 0
    options["kv_offload"] = f"disk={folder}:64M"
    with LLM(**options) as llm:
        patient(llm)
        assert logprobs_of(llm, prompt) == (golden, on_device, 32), "a second engine"
    snapshots = sorted(
        path for path in folder.rglob("*.safetensors") if decode_header(path.read_bytes())[0].dtype == SNAPSHOT
    )
    assert snapshots
    for path in snapshots:
        damaged = bytearray(path.read_bytes())
        damaged[-5] ^= 1
        path.write_bytes(damaged)
    with LLM(**options) as llm:
        patient(llm)
        assert logprobs_of(llm, prompt) == (golden, expected, 0), "damaged snapshots"
        assert llm.llm_engine._core.executor.worker.stats()["kv_offload_pages_lost"] == 1
    with LLM(**options) as llm:
        patient(llm)
        assert logprobs_of(llm, prompt) == (golden, on_device, 32), "the one that was damaged is written again"
    for path in folder.rglob("*.safetensors"):
        if decode_header(path.read_bytes())[0].dtype == SNAPSHOT:
            path.unlink()
    with LLM(**options) as llm:
        patient(llm)
        assert logprobs_of(llm, prompt) == (golden, expected, 0), "missing snapshots"


@pytest.mark.slow
def test_another_engine_and_a_strangers_connector_get_snapshots(tmp_path):
    golden, prompt = golden_of("lfm2")["greedy"], {"prompt_token_ids": prompt_of("lfm2")}
    model = write_checkpoint("lfm2", tmp_path / "model")
    options = {**OPTIONS, "model": str(model), "skip_tokenizer_init": True, "compilation_cache_dir": "off"}
    more = {"kv_role": "kv_consumer", "tensor_parallel_size": 2}
    with LLM(**options, kv_role="kv_producer") as producer, LLM(**options, **more) as consumer:
        params = {"temperature": 0.0, "ignore_eos": True}
        asked = {"kv_transfer_params": {"do_remote_decode": True}}
        (result,) = producer.generate([prompt], SamplingParams(**params, max_tokens=1, extra_args=asked))
        said = {"kv_transfer_params": result.kv_transfer_params}
        (result,) = consumer.generate([prompt], SamplingParams(**params, max_tokens=12, extra_args=said))
        assert (list(result.outputs[0].token_ids), result.num_cached_tokens) == (golden, 32)
        stats = consumer.llm_engine._core.executor.worker.stats()
        assert stats["kv_offload_pages_lost"] == stats["recompiles"] == 0
    transfer = {"kv_role": "kv_both", **connector_of(EXAMPLE, tmp_path / "pages")}
    for number in range(2):
        with LLM(**options, kv_transfer_config=transfer) as llm:
            patient(llm)
            assert answers(llm, prompt["prompt_token_ids"]) == ([golden], 32 * number)


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("host=64M,pages=int8", "has pages=int8, but this model caches latents or recurrent states"),
        ("host=64M,page_tokens=16", "this model has recurrent states, whose snapshots lie at the ends of blocks"),
        ("lmcache=lm://localhost:1?chunk_size=64", "LMCache's chunks are shared for models whose layers all have keys"),
    ],
)
def test_what_tiers_cannot_do_with_states_is_refused_before_a_weight_is_read(offload, said, tmp_path):
    options = {**OPTIONS, "model": str(write_checkpoint("lfm2", tmp_path)), "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=said):
        LLM(**options, kv_offload=offload)

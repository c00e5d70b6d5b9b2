"""Every architecture through scheduler and runner: transformers' greedy tokens, on one device and on several.

The goldens are those of `scripts/update_golden.py`. Nothing may be compiled outside of the program table.
"""

import pytest

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.build import with_draft_model
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.sampling_params import SamplingParams
from tests.core.simulation import any_length
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.draft_heads import write_eagle3
from tests.models.paged import golden_of

NAMES = (
    "llama",
    "mistral_window",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "glm4_moe",
    "olmo3",
    "smollm3",
    "cohere",
    "gpt_oss",
    "deepseek_v3",
    "llama4",
    "lfm2_moe",
    "gemma4",
)
# They have nothing that one of those has not.
OTHERS = (
    "lfm2",
    "qwen3_moe",
    "glm4",
    "olmo2",
    "granite",
    "seed_oss",
    "exaone4",
    "deepseek_v2",
    "arcee",
    "ernie4_5",
    "ernie4_5_moe",
    "cohere2",
    "hy_v3",
    "glm4_moe_lite",
    "ministral3",
    "minimax_m2",
    "mimo_v2",
    "mistral4",
    "apertus",
    "gemma4_moe",
    "muse_glimmer",
    "laguna",
)
ON_ONE_DEVICE = ("qwen2_moe", "lfm2_moe")
# What is split as in these, or in eight by `models/test_golden.py`, is exhaustive. `test_expert_balance.py` splits a
# gpt_oss in four, `test_context_parallel.py` a deepseek_v3 and windows.
ON_FOUR_DEVICES = (
    "llama",
    "olmo3",
    "cohere",
    "lfm2_moe",
    "apertus",
    "mistral4",
)
WITH_EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "llama4",
    "lfm2_moe",
)
SPREAD = ("glm4_moe",)
# One bucket that the prompt of 40 tokens does not fit: it takes three chunks.
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 64,
}


def start(folder, num_devices, **options):
    hf = load_hf_config(folder)
    model = model_for(hf)
    decoder = model.config_from_hf(hf)
    facts = ModelFacts(
        decoder.max_position_embeddings,
        decoder.dtype,
        decoder.num_heads,
        decoder.vocab_size,
        has_experts=decoder.experts is not None,
    )
    given = EngineConfig.from_options(**OPTIONS, **options, tensor_parallel_size=num_devices)
    config, model = given.resolve(facts, "cpu"), with_draft_model(given, model, decoder, folder)
    executor = UniProcExecutor(config, model, decoder, folder)
    scheduler = Scheduler(
        config.scheduler,
        executor.kv_cache_config,
        max_model_len=64,
        enable_prefix_caching=True,
        num_drafts=config.speculative.num_drafts,
    )
    return scheduler, executor


def generate(scheduler, executor, prompts, max_tokens):
    """Greedy tokens of every prompt, two steps in flight as the engine core keeps them."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=i, ignore_eos=True)
        scheduler.add_request(EngineCoreRequest(str(i), list(prompt), params, arrival_time=float(i)))
    tokens, in_flight = {}, []
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        if scheduled.request_ids:
            in_flight.append((scheduled, executor.execute_model(scheduled)))
        if len(in_flight) == 2 or not scheduled.request_ids:
            scheduled, pending = in_flight.pop(0)
            for output in scheduler.update_from_output(scheduled, pending.result()):
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return [tokens[str(i)] for i in range(len(prompts))]


# The others are exhaustive: a verification knows nothing of the model.
DRAFTED = (
    ("deepseek_v3", "ngram"),
    ("lfm2_moe", "ngram"),
)


def drafting(method, name, tmp_path):
    """What drafts for a model; another model has another shape, so other pools and groups, unless it is the same."""
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    if method == "eagle3":
        folder = write_eagle3(tmp_path / "head", name, has_embeddings=True, norm_before_residual=True)
        return {"method": method, "num_speculative_tokens": 3, "model": str(folder), "quantization": "int8"}
    drafts = {"llama": "gemma3", "gemma3": "llama"}.get(name, name)
    (tmp_path / "draft").mkdir()
    folder = write_checkpoint(drafts, tmp_path / "draft")
    return {"method": method, "num_speculative_tokens": 3, "model": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "num_devices"),
    [
        pytest.param(name, *drafter, marks=() if (name, drafter[0]) in DRAFTED else pytest.mark.exhaustive)
        for name in NAMES
        for drafter in (("ngram", 1), ("draft_model", 2), ("eagle3", 2))
    ],
)
def test_greedy_tokens_are_those_of_transformers_where_tokens_are_drafted(name, method, num_devices, tmp_path):
    folder = write_checkpoint(name, tmp_path)
    golden, prompt = golden_of(name)["greedy"], prompt_of(name)
    scheduler, executor = start(folder, num_devices, speculative_config=drafting(method, name, tmp_path))
    scheduler.draft_lengths = any_length(3)
    try:
        first, *_, last = generate(scheduler, executor, [prompt, prompt[5:17], [7, 8, 9] * 4, prompt], len(golden))
        assert first == last == golden
        assert scheduler.draft_lengths.num_drafts > 0
        assert executor.worker.stats()["recompiles"] == 0
    finally:
        executor.shutdown()


def alone_and_split():
    """(name, devices, whether whole experts are spread over them). That one device computes the same numbers is what
    `models/test_golden.py` asks."""
    for name in (*NAMES, *OTHERS):
        for num_devices, names in ((1, ON_ONE_DEVICE), (4, ON_FOUR_DEVICES)):
            yield pytest.param(name, num_devices, False, marks=() if name in names else pytest.mark.exhaustive)
    for name in WITH_EXPERTS:
        yield pytest.param(name, 4, True, marks=() if name in SPREAD else pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices", "spreads_experts"), list(alone_and_split()))
def test_greedy_tokens_are_those_of_transformers_without_any_recompile(name, num_devices, spreads_experts, tmp_path):
    folder = write_checkpoint(name, tmp_path)
    golden, prompt = golden_of(name)["greedy"], prompt_of(name)
    scheduler, executor = start(folder, num_devices, enable_expert_parallel=spreads_experts)
    try:
        others = [prompt[5:17], prompt[20:23], prompt[:39]]
        first, *_, last = generate(scheduler, executor, [prompt, *others, prompt], len(golden))
        assert first == golden
        assert last == golden
        assert executor.worker.stats()["recompiles"] == 0
    finally:
        executor.shutdown()

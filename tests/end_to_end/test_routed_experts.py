"""`enable_return_routed_experts`: which experts tokens went to, whatever the steps were in which they were computed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import ConfigError, RequestError
from tests.models.checkpoints import prompt_of, write_checkpoint

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "routed_experts.json").read_text(encoding="utf-8"))
DRAW = SamplingParams(max_tokens=12, seed=2, ignore_eos=True, detokenize=False)


def engine(name, folder, **options):
    """Prompts are cut, several decode steps are one program, and two long requests do not fit the cache."""
    defaults = {
        "enable_return_routed_experts": True,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "token_buckets": (2, 16),
        "block_size": 8,
        "num_gpu_blocks_override": 13,
        "num_scheduler_steps": 4,
        "skip_tokenizer_init": True,
    }
    return LLM(str(write_checkpoint(name, folder)), **defaults | options)


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v3"])
def named(request, tmp_path_factory):
    llm = engine(request.param, tmp_path_factory.mktemp(request.param))
    yield request.param, llm
    llm.shutdown()


def of(llm, token_ids, params=DRAW):
    [output] = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    return output


def by_number(experts):
    return np.sort(experts, axis=2)


def check_all(llm, token_ids, output):
    """The experts are those of a prompt that holds prompt and answer, but the last token."""
    known = [*token_ids, *output.token_ids[:-1]]
    afresh = SamplingParams(max_tokens=1, seed=2, skip_reading_prefix_cache=True, detokenize=False)
    again = of(llm, known, afresh)
    assert again.num_cached_tokens == 0 and output.routed_experts.shape[0] == len(known)
    np.testing.assert_array_equal(by_number(again.outputs[0].routed_experts), by_number(output.routed_experts))


def test_experts_are_those_of_transformers_computed_or_cached(named):
    name, llm = named
    prompt, golden = prompt_of(name), np.array(GOLDEN[name])
    for num_cached in (0, 32):
        output = of(llm, prompt)
        assert output.num_cached_tokens == num_cached
        experts = output.outputs[0].routed_experts
        assert experts.dtype == np.int16 and experts.shape == (40 + 11, *golden.shape[1:])
        np.testing.assert_array_equal(by_number(experts[:40]), golden)
    check_all(llm, prompt, output.outputs[0])


def test_experts_after_a_preemption_beside_another_request(named):
    name, llm = named
    prompts = [prompt_of(name), prompt_of(name)[::-1]]
    long = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], long, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs)
    for prompt, output in zip(prompts, outputs):
        check_all(llm, prompt, output.outputs[0])


def test_streams_have_them_at_the_end_and_from_the_token_that_was_asked_for(named):
    name, llm = named
    prompt = prompt_of(name)
    whole = of(llm, prompt).outputs[0].routed_experts
    late = SamplingParams(max_tokens=12, seed=2, ignore_eos=True, detokenize=False, routed_experts_prompt_start=37)
    *others, last = llm.stream({"prompt_token_ids": prompt}, late)
    assert others and all(chunk.routed_experts is None for chunk in others)
    np.testing.assert_array_equal(last.routed_experts, whole[37:])
    late.routed_experts_prompt_start = 40
    with pytest.raises(RequestError, match="is 40, but the prompt has 40 tokens"):
        of(llm, prompt, late)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama", {}, "the model has no experts"),
        ("mixtral", {"pipeline_parallel_size": 2}, "each stage knows its own layers alone"),
        ("mixtral", {"kv_offload": "host=1M"}, "keeps keys and values of tokens without their experts"),
    ],
)
def test_engines_that_could_not_say_it_do_not_start(tmp_path, name, options, said):
    with pytest.raises(ConfigError, match=f"enable_return_routed_experts was asked for, but .*{said}"):
        engine(name, tmp_path, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4, "enable_expert_parallel": True},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
        {"enable_prefix_caching": False, "num_scheduler_steps": 1, "async_scheduling": False},
        {"tensor_parallel_size": 4, "enable_expert_parallel": True, "enable_eplb": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_experts_are_the_same_however_the_engine_computes(tmp_path, options):
    llm = engine("mixtral", tmp_path, num_gpu_blocks_override=40, **options)
    prompts = [prompt_of("mixtral"), prompt_of("mixtral")[:9] * 3]
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], DRAW, use_tqdm=False)
    np.testing.assert_array_equal(by_number(outputs[0].outputs[0].routed_experts[:40]), np.array(GOLDEN["mixtral"]))
    for prompt, output in zip(prompts, outputs):
        check_all(llm, prompt, output.outputs[0])
    llm.shutdown()

"""Stages of a pipeline, through whole engines: transformers' tokens, whatever stage a layer is on."""

import json
import re

import numpy as np
import pytest

from jaxpaged import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from jaxpaged.errors import ConfigError
from jaxpaged.worker.programs import stages
from tests.engine.small_tokenizer import make_backend
from tests.models import pooling_checkpoints
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.paged import GOLDEN, golden_of

# Prompts of 40 tokens come in chunks.
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "compilation_cache_dir": "off",
}


def answers(llm, *prompts, **params):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **params)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs[0].num_cached_tokens


def test_stages_give_the_tokens_of_whole_models(tmp_path):
    """Chunks, a cached beginning, so few blocks that requests are preempted; log probabilities; and after sleeping."""
    golden, prompt, folder = golden_of("llama")["greedy"], prompt_of("llama"), write_checkpoint("llama", tmp_path)
    with LLM(**OPTIONS, model=str(folder), pipeline_parallel_size=2, num_gpu_blocks_override=14) as llm:
        assert answers(llm, prompt) == ([golden], 0)
        assert answers(llm, *[prompt] * 4) == ([golden] * 4, 32)
        assert llm.stats().number("num_preemptions") > 0
        assert answers(llm, prompt, prompt[:9], logprobs=1, prompt_logprobs=1)[0][0] == golden
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, prompt) == ([golden], 0)
        assert llm.stats().number("recompiles") == 0
        with pytest.raises(ConfigError, match="pipeline_parallel_size is 2, and dense_forward takes whole models"):
            llm.dense_model()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma2", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("deepseek_v3", {"pipeline_parallel_size": 3, "tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_stages_go_with_windows_experts_and_several_devices_each(name, options, tmp_path):
    golden, prompt, folder = golden_of(name)["greedy"], prompt_of(name), write_checkpoint(name, tmp_path)
    with LLM(**OPTIONS, **options, model=str(folder), num_gpu_blocks_override=64) as llm:
        (first, beside, last), _ = answers(llm, prompt, prompt[5:17], prompt)
        assert first == last == golden
        assert answers(llm, prompt[5:17]) == ([beside], 8)
        assert llm.stats().number("recompiles") == 0


def test_a_grammar_binds_a_request_and_no_other(tmp_path):
    """Its masks come between the two programs of a step, from all tokens before."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "vocab_size": 300}))
    make_backend().save(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    bound = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"))
    options = {**OPTIONS, "skip_tokenizer_init": False, "load_format": "dummy", "num_gpu_blocks_override": 64}
    with LLM(str(tmp_path), **options, pipeline_parallel_size=2) as llm:
        (alone,) = llm.generate(["the cat"], params, use_tqdm=False)
        free, kept = llm.generate(["the cat", "the dog"], [params, bound], use_tqdm=False)
        assert free.outputs[0].token_ids == alone.outputs[0].token_ids
        assert kept.error is None and re.fullmatch("[ab]{9}", kept.outputs[0].text)
        assert llm.stats().number("recompiles") == 0


@pytest.mark.parametrize(
    ("name", "pooling_type"),
    [("llama_embed", "MEAN"), pytest.param("qwen3_embed", "LAST", marks=pytest.mark.exhaustive)],
)
def test_stages_pool(name, pooling_type, tmp_path):
    golden = [each[pooling_type] for each in json.loads((GOLDEN / "pooling.json").read_text())[name]]
    options = {"pipeline_parallel_size": 2, "pooler_config": {"pooling_type": pooling_type}}
    options |= {"num_gpu_blocks_override": 64, "skip_tokenizer_init": False}
    with LLM(str(pooling_checkpoints.write(name, tmp_path)), **{**OPTIONS, **options}) as llm:
        outputs = llm.encode(pooling_checkpoints.prompts(name), PoolingParams(use_activation=False), use_tqdm=False)
        np.testing.assert_allclose([output.outputs.data for output in outputs], golden, rtol=2e-4, atol=2e-4)


def test_what_stages_need_is_said_with_the_numbers(tmp_path):
    folder = str(write_checkpoint("llama", tmp_path))
    for options, words in [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size is 3, but the model has 2 layers"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 8}, "is 16, but there are only 8 cpu devices"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LLM(**OPTIONS, model=folder, **options)


@pytest.mark.parametrize("num_requests", [2, 1])
def test_the_first_stage_needs_nothing_of_the_step_before_if_that_has_other_requests(
    num_requests, tmp_path, monkeypatch
):
    """Whether tokens that the last stage draws in one step go into the next one, in the middle of an answer."""
    find, needs = stages.StagedRows.tokens_for, []

    def tokens_for(rows, whose):
        needs.append((found := find(rows, whose)) is rows.drawn[-1])
        return found

    monkeypatch.setattr(stages.StagedRows, "tokens_for", tokens_for)
    prompts = [prompt_of("llama")[: 4 + i] for i in range(num_requests)]
    folder = str(write_checkpoint("llama", tmp_path))
    with LLM(**OPTIONS, model=folder, pipeline_parallel_size=2, num_gpu_blocks_override=64) as llm:
        answers(llm, *prompts)
    assert needs[4:9] == [num_requests == 1] * 5

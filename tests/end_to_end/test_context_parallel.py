"""Contexts split over devices, through whole engines: transformers' tokens, whoever holds which of a context."""

import pytest

from jaxpaged import LLM, SamplingParams
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.draft_heads import write_eagle3
from tests.models.paged import golden_of

# Prompts of 40 tokens come in chunks, answers in runs of steps.
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "num_scheduler_steps": 4,
    "compilation_cache_dir": "off",
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def answers(llm, *prompts):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs[0].num_cached_tokens


@pytest.mark.slow
def test_parts_of_contexts_give_the_tokens_of_whole_ones_and_leave_whole_pages(tmp_path):
    """So few blocks that requests are preempted; then pages of two devices' parts, read by an engine of one device."""
    golden, prompt, folder = golden_of("llama")["greedy"], prompt_of("llama"), tmp_path / "model"
    options = {
        **OPTIONS,
        "model": str(write_checkpoint("llama", folder)),
        "num_gpu_blocks_override": 14,
        "kv_offload": f"disk={tmp_path}/kv:64M",
    }
    with LLM(**options, tensor_parallel_size=4, decode_context_parallel_size=2) as llm:
        assert answers(llm, prompt) == ([golden], 0)
        assert answers(llm, *[prompt] * 4) == ([golden] * 4, 32)
        assert llm.stats().number("num_preemptions") > 0
        assert llm.stats().number("recompiles") == 0
    with LLM(**options) as llm:
        assert answers(llm, prompt) == ([golden], 32)


@pytest.mark.slow
def test_layers_with_windows_and_a_head_that_drafts_go_with_split_ones(tmp_path):
    golden, prompt = golden_of("gemma2")["greedy"], prompt_of("gemma2")
    head = write_eagle3(tmp_path / "head", "gemma2", has_embeddings=True, norm_before_residual=True)
    options = {**OPTIONS, "model": str(write_checkpoint("gemma2", tmp_path / "model")), "num_gpu_blocks_override": 64}
    drafts = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head)}
    split = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "speculative_config": drafts}
    with LLM(**options, **split) as llm:
        (first, _, last), _ = answers(llm, prompt, prompt[5:17], prompt)
        assert first == last == golden
        assert llm.stats().number("recompiles") == 0


@pytest.mark.slow
def test_parts_of_latents_give_the_tokens_of_whole_ones(tmp_path):
    """Experts are whole on a device; drafts are verified several at a time."""
    golden, prompt = golden_of("deepseek_v3")["greedy"], prompt_of("deepseek_v3")
    options = {**OPTIONS, "model": str(write_checkpoint("deepseek_v3", tmp_path)), "enable_expert_parallel": True}
    split = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "num_gpu_blocks_override": 64}
    with LLM(**options, **split, speculative_config=DRAFTS) as llm:
        (first, beside, last), _ = answers(llm, prompt, prompt[5:17], prompt)
        assert first == last == golden
        assert answers(llm, prompt[5:17]) == ([beside], 8)
        assert llm.stats().number("recompiles") == 0

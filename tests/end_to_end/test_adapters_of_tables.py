"""Adapters of embeddings and of the output head that PEFT wrote, against the logits of PEFT's own models."""

import json

import pytest

from jaxpaged import LLM, LoRARequest, SamplingParams
from jaxpaged.worker.programs.declare import BASE_KINDS
from tests.models.adapted import GOLDEN, write_base, write_other
from tests.models.checkpoints import prompt_of

TABLES = ("all-linear", "embed_tokens", "lm_head")
NUM_TOKENS = 8
OPTIONS = {
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 8,
    "lora_target_modules": TABLES,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 48,
    "dtype": "float32",
    "max_logprobs": 32,
}
ENGINES = {
    "tables": {"num_scheduler_steps": 4},  # one table for both, and each has an adapter of its own
    "dora": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    "rslora_patterns": {"tensor_parallel_size": 2},  # the head alone, of one table for both
}
LIGHTER = "rslora_patterns"
"""The engine that is asked for its programs of steps without adapters too."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, logprobs=32, prompt_logprobs=32, detokenize=False)


def generate(llm, prompts, params, adapters):
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)


@pytest.mark.parametrize("name", ["tables", pytest.param("dora", marks=pytest.mark.exhaustive), "rslora_patterns"])
def test_logits_are_those_of_peft_and_tokens_follow_from_them(name, tmp_path):
    golden = json.loads((GOLDEN / name / "logits.json").read_text())
    prompt, adapter = prompt_of(golden["checkpoint"]), LoRARequest(name, 1, str(GOLDEN / name))
    llm = LLM(str(write_base(golden["checkpoint"], tmp_path / "base")), **OPTIONS, **ENGINES[name])
    try:
        check(llm, golden, prompt, adapter, LoRARequest("other", 2, write_other(tmp_path / "other", name)))
        expected = generate(llm, [prompt], GREEDY, None)[0].outputs[0].token_ids
        if name == LIGHTER:
            llm.collective_rpc(compile_lighter)
            llm.collective_rpc(without_the_head)
        assert generate(llm, [prompt], GREEDY, None)[0].outputs[0].token_ids == expected
        assert llm.llm_engine.executor_stats()["recompiles"] == 0
    finally:
        llm.shutdown()


def compile_lighter(worker):
    """The programs of steps without adapters that greedy requests take."""
    for key in worker.programs.builders:
        if key.kind in BASE_KINDS and "full" not in key.kind:
            worker.programs[key]


def without_the_head(worker):
    """Take the head's stacks from programs that draw: what calls one that needs them fails."""
    worker.device.head_for = lambda key: worker.device.head


def check(llm, golden, prompt, adapter, second):
    (plain,) = generate(llm, [prompt], SCORED, None)
    generate(llm, [prompt], SCORED, [second])  # it has the first slot
    scored, beside = generate(llm, [prompt, prompt], SCORED, [adapter, None])
    lines = [*scored.prompt_logprobs[1:], scored.outputs[0].logprobs[0]]
    for position, top in golden["top"].items():
        line = lines[int(position)]
        found = [line[token].logprob - line[top["ids"][0]].logprob for token in top["ids"]]
        assert found == pytest.approx([logit - top["logits"][0] for logit in top["logits"]], abs=5e-4), position
    of = lambda output: [sorted((t, e.logprob) for t, e in line.items()) for line in output.prompt_logprobs[1:]]
    for one, other in zip(of(plain), of(beside)):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-4)
    texts = generate(llm, [prompt, prompt], GREEDY, [adapter, second])
    drawn = [output.outputs[0].token_ids for output in texts]
    assert drawn[0] != drawn[1]
    whole = generate(llm, [[*prompt, *tokens] for tokens in drawn], SCORED, [adapter, second])
    for tokens, output in zip(drawn, whole):  # what was drawn is what the scores of prompts like best
        assert [max(line, key=lambda t: line[t].logprob) for line in output.prompt_logprobs[-NUM_TOKENS:]] == tokens

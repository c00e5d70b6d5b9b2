"""Adapters of every kind that PEFT wrote, against its own models' numbers, where two processes compute as one model."""

import asyncio
import json

import numpy as np
import pytest

from jaxpaged import AsyncLLM, LoRARequest, PoolingParams, SamplingParams
from jaxpaged.config import EngineConfig
from tests.end_to_end.test_adapters_of_towers import features_of
from tests.models.adapted import GOLDEN, token_ids_of, write_base, write_other
from tests.models.seeing_checkpoints import SEEING, prompts_of

OPTIONS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "token_buckets": (128,),
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 128,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_scheduler_steps": 1,
}
POOLS = {"runner": "pooling"}
SEES = {"enable_tower_connector_lora": True, "encoder_cache_size": 512, "max_model_len": 96}
TABLES = {"lora_target_modules": ("all-linear", "embed_tokens", "lm_head")}
MOVES = {"enable_eplb": True, "eplb_config": {"step_interval": 4, "num_redundant_experts": 2}}
CASES = [
    ("latents", {}),
    ("classifier", POOLS),
    ("head_of_roberta", POOLS),
    ("head_of_modernbert", POOLS),
    ("tower", SEES),
    ("tower_dora", SEES),
    ("tables", TABLES),
    ("dora", TABLES),
    ("alternating", {}),
    ("all_linear", {}),
    ("all_linear", {"enable_expert_parallel": True, **MOVES}),
]
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, prompt_logprobs=8, logprobs=8)
RAW = PoolingParams(use_activation=False)


async def found_of(llm, prompt, request_id, adapter):
    """The scores of a classifier, or the log probabilities of what is likely behind each token."""
    if llm.config.model.runner == "pooling":
        [output] = [each async for each in llm.encode(prompt, RAW, request_id, lora_request=adapter)]
        return output.outputs.data
    *_, output = [each async for each in llm.generate(prompt, SCORED, request_id, lora_request=adapter)]
    lines = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [{token: each.logprob for token, each in line.items()} for line in lines]


def check(found, golden):
    """Log probabilities are the logits that PEFT's model gave, up to the shift of a softmax."""
    if "labels" in golden:
        np.testing.assert_allclose(found, golden["labels"], rtol=2e-4, atol=2e-4)
        return
    for position, top in golden["top"].items():
        own, theirs = found[int(position)], dict(zip(top["ids"], top["logits"], strict=True))
        shifts = [own[each] - theirs[each] for each in theirs.keys() & own.keys()]
        assert len(shifts) >= 6 and max(shifts) - min(shifts) < 5e-4, position


async def live(llm, golden, prompt, adapters):
    """There is one slot, and one place in host memory: each adapter is read again and again."""
    for turn in range(3):
        asked = [None, *adapters, adapters[0]]
        found = await asyncio.gather(*(found_of(llm, prompt, f"{turn} {i}", each) for i, each in enumerate(asked)))
        base, own, other, again = found
        check(own, golden)
        check(again, golden)
        for wrong in (base, other):
            with pytest.raises(AssertionError):
                check(wrong, golden)
        if turn == 0:
            await llm.sleep(level=1)
            await llm.wake_up()
    stats = await llm.executor_stats()
    assert stats["recompiles"] == 0 and stats.get("expert_rebalancings") != 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "options"), CASES)
def test_two_processes_compute_with_an_adapter_what_peft_does(name, options, tmp_path):
    golden = json.loads((GOLDEN / name / "logits.json").read_text())
    checkpoint = golden["checkpoint"]
    prompt = (
        {"prompt_token_ids": list(token_ids_of(checkpoint))}
        if checkpoint not in SEEING
        else {"prompt_token_ids": list(prompts_of(checkpoint)[0]), "mm_features": features_of(checkpoint)}
    )
    own, other = LoRARequest("own", 1, str(GOLDEN / name)), LoRARequest("other", 2, write_other(tmp_path / "b", name))
    folder = write_base(checkpoint, tmp_path / "base")
    llm = AsyncLLM.from_config(EngineConfig.from_options(model=str(folder), **OPTIONS | options))
    try:
        asyncio.run(live(llm, golden, prompt, [own, other]))
    finally:
        llm.shutdown()

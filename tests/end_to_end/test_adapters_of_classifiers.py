"""Adapters of classifiers, language models and encoders, that PEFT wrote, against what PEFT's own models say."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, LoRARequest
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import CheckpointError, ConflictError
from jaxpaged.pooling import PoolingParams
from tests.models.adapted import GOLDEN, token_ids_of, write_base, write_other

OPTIONS = {
    "runner": "pooling",
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "token_buckets": (128,),
    "max_model_len": 64,
    "dtype": "float32",
}
GOLDENS = ["classifier", "head_of_roberta", "head_of_modernbert"]
WEIGHTS = "adapter_model.safetensors"
RAW = PoolingParams(use_activation=False)


def scores(llm, prompts, adapters):
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.classify(prompts, pooling_params=RAW, lora_request=adapters, use_tqdm=False)
    return np.array([output.outputs.probs for output in outputs])


@pytest.mark.parametrize("name", GOLDENS)
def test_scores_are_those_of_peft_whatever_shares_the_step(name, tmp_path):
    golden = json.loads((GOLDEN / name / "logits.json").read_text())
    prompt = token_ids_of(golden["checkpoint"])
    devices = {"tensor_parallel_size": 2} if name == "head_of_roberta" else {}
    rounded = {"quantization": "int8"} if name == "classifier" else {}
    base = write_base(golden["checkpoint"], tmp_path / "base")
    first, second = LoRARequest("a", 1, str(GOLDEN / name)), LoRARequest("b", 2, write_other(tmp_path / "b", name))
    llm = LLM(str(base), **OPTIONS, **devices, **rounded)
    try:
        plain, other = scores(llm, [prompt], None), scores(llm, [prompt], second)
        mixed = scores(llm, [prompt] * 4, [None, first, second, first])
        error = 0.1 if rounded else 2e-4
        np.testing.assert_allclose(mixed[1], golden["labels"], rtol=error, atol=error)
        np.testing.assert_allclose(mixed, [plain[0], mixed[1], other[0], mixed[1]], atol=1e-4)
        assert abs(plain[0] - other[0]).max() > 0.01 and abs(plain[0] - mixed[1]).max() > 0.01
        assert main(["merge", str(base), str(GOLDEN / name), "-o", str(tmp_path / "merged")]) == 0
        if name == "head_of_modernbert":
            check_updates(llm)
            with pytest.raises(CheckpointError, match=r"head\.norm\.bias"):
                llm.add_lora(LoRARequest("c", 3, write_wrong(tmp_path / "c", name)))
        assert llm.llm_engine.executor_stats()["recompiles"] == 0
    finally:
        llm.shutdown()
    if name == "head_of_modernbert":
        llm = LLM(str(tmp_path / "merged"), **{**OPTIONS, "enable_lora": False, "max_loras": 1})
        np.testing.assert_allclose(scores(llm, [prompt], None)[0], golden["labels"], rtol=2e-4, atol=2e-4)
        llm.shutdown()


def test_vectors_of_an_encoder_without_a_head_are_those_of_peft(tmp_path):
    golden = json.loads((GOLDEN / "embeds" / "logits.json").read_text())
    prompt = {"prompt_token_ids": token_ids_of(golden["checkpoint"])}
    pooler = {"pooling_type": "MEAN"}
    with LLM(str(write_base(golden["checkpoint"], tmp_path / "base")), **OPTIONS, pooler_config=pooler) as llm:
        adapters = [None, LoRARequest("a", 1, str(GOLDEN / "embeds"))]
        plain, own = (np.array(each.outputs.embedding) for each in llm.embed([prompt] * 2, lora_request=adapters))
        expected = np.array(golden["labels"])
        np.testing.assert_allclose(own, expected / np.linalg.norm(expected), atol=2e-5)
        assert abs(plain - own).max() > 0.01


def write_wrong(folder, name):
    """A vector that modules_to_save does not name."""
    path = write_other(folder, name)
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "base_model.model.head.norm.bias": np.zeros(64, np.float32)}, folder / WEIGHTS)
    return path


def check_updates(llm):
    """Factors of a classifier are added to the checkpoint's weights."""
    with pytest.raises(ConflictError, match="factors of a classifier"):
        llm.start_weight_update()

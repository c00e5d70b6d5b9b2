"""Pooling through the whole engine: what transformers computes, whatever the chunks, the batch and the cache.

The goldens are those of `scripts/update_golden.py pooling`. Nothing may be compiled outside of the program table.
"""

import json

import numpy as np
import pytest

from jaxpaged import LLM, PoolingParams
from jaxpaged.errors import ConfigError, RequestError
from tests.models.paged import GOLDEN
from tests.models.pooling_checkpoints import prompts, write

# The longest prompt has 40 tokens: it takes three chunks.
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 64,
}


def golden_of(name, key):
    return [np.array(each[key], np.float32) for each in json.loads((GOLDEN / "pooling.json").read_text())[name]]


def encode(llm, prompts, **params):
    outputs = llm.encode(prompts, PoolingParams(**params), use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [output.outputs.data for output in outputs]


def normalized(vector):
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("name", "pooling_type"),
    [
        ("llama_embed", "MEAN"),
        pytest.param("llama_embed", "LAST", marks=pytest.mark.exhaustive),
        pytest.param("llama_embed", "CLS", marks=pytest.mark.slow),
        pytest.param("qwen3_embed", "LAST", marks=pytest.mark.slow),
        pytest.param("gemma3_embed", "MEAN", marks=pytest.mark.slow),
    ],
)
def test_embeddings_are_those_of_transformers_alone_and_in_a_batch(name, pooling_type, tmp_path):
    golden, given = golden_of(name, pooling_type), prompts(name)
    with LLM(str(write(name, tmp_path)), pooler_config={"pooling_type": pooling_type}, **OPTIONS) as llm:
        llm.wait_for_programs()
        raw = encode(llm, given, use_activation=False)
        np.testing.assert_allclose(raw, golden, rtol=2e-4, atol=2e-4)
        together = encode(llm, [*given, *reversed(given)])
        np.testing.assert_allclose(together[:3], [normalized(vector) for vector in golden], rtol=2e-4, atol=5e-5)
        np.testing.assert_allclose(together[:2:-1], together[:3], rtol=1e-5, atol=1e-6)
        alone = [encode(llm, [prompt])[0] for prompt in given]
        np.testing.assert_allclose(alone, together[:3], rtol=1e-5, atol=1e-6)
        cut = llm.embed(given, use_tqdm=False, pooling_params=PoolingParams(dimensions=8)) if name[0] == "l" else []
        for output, vector in zip(cut, golden):
            np.testing.assert_allclose(output.outputs.embedding, normalized(vector[:8]), rtol=2e-4, atol=5e-5)
        assert llm.llm_engine.executor_stats()["recompiles"] == 0
        with pytest.raises(ConfigError, match="the engine pools"):
            llm.dense_model()


@pytest.mark.slow
def test_a_classifier_gives_the_probabilities_of_transformers(tmp_path):
    golden, given = golden_of("qwen2_classify", "logits"), prompts("qwen2_classify")
    with LLM(str(write("qwen2_classify", tmp_path)), **OPTIONS) as llm:
        np.testing.assert_allclose(encode(llm, given, use_activation=False), golden, rtol=2e-4, atol=2e-4)
        for output, logits in zip(llm.classify(given, use_tqdm=False), golden):
            powers = np.exp(logits)
            np.testing.assert_allclose(output.outputs.probs, powers / powers.sum(), rtol=5e-4)
        with pytest.raises(RequestError, match="3 labels"):
            llm.score("w5", "w6")
        with pytest.raises(RequestError, match="was started for pooling"):
            llm.generate("w5")


def test_a_cross_encoder_scores_pairs_of_texts(tmp_path):
    [golden, *_], [ids, *_] = golden_of("llama_score", "logits"), prompts("llama_score")
    words = [f"w{i}" for i in ids]
    first, second = " ".join(words[:13]), " ".join(words[13:])
    with LLM(str(write("llama_score", tmp_path)), **OPTIONS) as llm:
        outputs = llm.score(first, [second, "w9 w10", second], use_tqdm=False)
    scores = [output.outputs.score for output in outputs]
    assert scores[0] == scores[2] == pytest.approx(1 / (1 + np.exp(-golden[0])), rel=1e-3)
    assert outputs[0].prompt_token_ids == ids and scores[1] != scores[0]


@pytest.mark.parametrize(
    ("name", "pooling_type"),
    [
        ("llama_embed", "MEAN"),
        pytest.param("qwen3_embed", "LAST", marks=pytest.mark.slow),
        pytest.param("qwen2_classify", "LAST", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_split_over_devices_gives_what_one_device_gives(name, pooling_type, tmp_path):
    key = "logits" if name.endswith("classify") else pooling_type
    options = {**OPTIONS, "pooler_config": {"pooling_type": pooling_type}, "tensor_parallel_size": 2}
    with LLM(str(write(name, tmp_path)), **options) as llm:
        found = encode(llm, prompts(name), use_activation=False)
        assert llm.llm_engine.executor_stats()["recompiles"] == 0
    np.testing.assert_allclose(found, golden_of(name, key), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("qwen2_classify", 2), pytest.param("llama_embed", 1, marks=pytest.mark.exhaustive)],
)
def test_eight_bit_weights_change_the_result_by_their_rounding_only(name, num_devices, tmp_path):
    key = "logits" if name.endswith("classify") else "LAST"
    with LLM(str(write(name, tmp_path)), quantization="int8", tensor_parallel_size=num_devices, **OPTIONS) as llm:
        found = np.array(encode(llm, prompts(name), use_activation=False))
    exact = np.array(golden_of(name, key))
    cosines = (found * exact).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosines.min() > 0.999
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.05  # a weight is off by 1/254 of its row's largest, two layers add up

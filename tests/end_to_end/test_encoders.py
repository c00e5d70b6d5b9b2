"""Encoders through the whole engine: what transformers computes, alone, in a batch and on several devices.

The goldens are those of `scripts/update_golden.py encoders`. Nothing may be compiled outside of the program table.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged import LLM, PoolingParams
from jaxpaged.errors import RequestError
from jaxpaged.params.gguf_folder.folder import make_folder
from jaxpaged.serving.pooling import PoolRequest, read_inputs
from tests.models.encoder_checkpoints import CHECKPOINTS, PAIRS, TEXTS, tokens_of, write
from tests.models.paged import GOLDEN
from tests.params.gguf_folder.test_encoders import likeliest_words, write_xlm_roberta

OPTIONS = {"max_num_seqs": 4, "token_buckets": (64,), "block_size": 8}


def golden_of(name, key):
    return np.array([each[key] for each in json.loads((GOLDEN / "encoders.json").read_text())[name]], np.float32)


def encode(llm, prompts):
    outputs = llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return np.array([output.outputs.data for output in outputs])


@pytest.mark.parametrize(
    ("name", "key", "num_devices"),
    [
        ("bert_embed", "MEAN", 1),
        ("xlm_roberta_embed", "CLS", 2),
        ("modernbert_embed", "CLS", 1),
        ("modernbert_classify", "logits", 2),
    ],
)
def test_vectors_are_those_of_transformers_alone_and_in_a_batch(name, key, num_devices, tmp_path):
    golden, pooler = golden_of(name, key), {"pooling_type": key} if key == "MEAN" else {}
    options = {**OPTIONS, "tensor_parallel_size": num_devices, "pooler_config": pooler}
    with LLM(str(write(name, tmp_path)), **options) as llm:
        together = encode(llm, [*TEXTS, *reversed(TEXTS)])
        np.testing.assert_allclose(together, [*golden, *reversed(golden)], rtol=2e-4, atol=2e-4)
        alone = [encode(llm, [text])[0] for text in TEXTS]
        np.testing.assert_allclose(alone, together[:3], rtol=1e-5, atol=1e-6)
        assert llm.llm_engine.executor_stats()["recompiles"] == 0


def write_file(name, folder):
    """A reranker as a GGUF file."""
    facts = likeliest_words(CHECKPOINTS[name]["vocab_size"]) | {"bert.pooling_type": 4}
    return make_folder(write_xlm_roberta(folder, name, **facts), folder / "cache")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("bert_score", write),
        ("xlm_roberta_score", write),
        pytest.param("xlm_roberta_score", write_file, marks=pytest.mark.exhaustive),
    ],
)
def test_a_reranker_reads_pairs_as_transformers_does(name, written, tmp_path):
    golden = golden_of(name, "logits")[:, 0]
    with LLM(str(written(name, tmp_path)), dtype="float32", **OPTIONS) as llm:
        outputs = llm.score(PAIRS[0][0], [second for _, second in PAIRS], use_tqdm=False)
        served = SimpleNamespace(engine=SimpleNamespace(input_processor=llm.llm_engine.input_processor))
        prompts = [prompt.for_engine() for prompt in read_inputs(served, PAIRS, PoolRequest(field="documents"))]
        np.testing.assert_allclose(encode(llm, prompts)[:, 0], golden, rtol=2e-4, atol=2e-4)
        with pytest.raises(RequestError, match="67 tokens"):
            llm.classify(" ".join(["w5"] * 65), use_tqdm=False)
    scores = [output.outputs.score for output in outputs]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-golden)), rtol=1e-3)
    assert outputs[1].prompt_token_ids == tokens_of(CHECKPOINTS[name], *PAIRS[1])[0]


def test_int8_weights_change_the_result_by_their_rounding_only(tmp_path):
    golden = golden_of("xlm_roberta_score", "logits")
    with LLM(str(write("xlm_roberta_score", tmp_path)), quantization="int8", **OPTIONS) as llm:
        found = encode(llm, [{"prompt_token_ids": tokens_of(CHECKPOINTS["xlm_roberta_score"], *p)[0]} for p in PAIRS])
    assert 0 < np.abs(found - golden).max() < 0.1 * np.abs(golden).max()

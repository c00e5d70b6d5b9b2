"""Models whose weights are joined give what they gave, on one device and on several."""

import re

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.models import joined
from jaxpaged.models.joined import joined_params, joined_shapes
from jaxpaged.params.quantized import QuantizedArray
from jaxpaged.worker.programs.compiled import CompileCounter
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import PagedModel, golden_of


@pytest.mark.parametrize(
    ("name", "num_shards"),
    [("qwen2", 1), ("llama_mqa_bias_tied", 8), ("gemma3", 8), ("gpt_oss", 1), ("phi3_partial", 1), ("qwen2_moe", 2)],
)
def test_logits_are_those_of_transformers(name, num_shards, tmp_path):
    golden, model = golden_of(name), PagedModel(write_checkpoint(name, tmp_path), num_shards)
    apart = jax.tree.leaves(model.params.layers[0].self_attn.q_proj)
    shapes = joined_shapes(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model.params)
    )
    model.params = joined_params(lambda: model.params)
    assert all(part.is_deleted() for part in apart)
    attention = model.params.layers[0].self_attn
    assert attention.q_proj is attention.k_proj is attention.v_proj is None
    assert attention.qkv_proj.weight.sharding.shard_shape(attention.qkv_proj.weight.shape)[0] * num_shards == len(
        attention.qkv_proj.weight
    )
    described = lambda x: (x.shape, x.dtype, x.sharding)
    assert jax.tree.map(described, model.params) == jax.tree.map(described, shapes)
    moves = re.findall(r" (all-gather|all-to-all|collective-permute)", model.program.as_text())
    assert not moves, "devices have whole groups of heads, and gates with what they multiply"
    logits = model.logits(prompt_of(name))
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=2e-3)
    for position, top in golden["top"].items():
        np.testing.assert_allclose(logits[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=1e-4)


def test_weights_of_8_bits_have_their_scales_joined_too(tmp_path):
    write_checkpoint("qwen3_bias", tmp_path)
    apart, model = (PagedModel(tmp_path, 2, quantization="int8") for _ in range(2))
    model.params = joined_params(lambda: model.params)
    up_proj = model.params.layers[0].mlp.gate_up_proj.weight
    assert isinstance(up_proj, QuantizedArray) and up_proj.scales.shape == up_proj.shape[:2]
    expected, logits = (each.logits(prompt_of("qwen3_bias")) for each in (apart, model))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_an_engine_joins_what_it_loads_and_what_it_loads_again(tmp_path, monkeypatch):
    monkeypatch.setattr(joined, "PLATFORMS", ("cpu",))
    write_checkpoint("qwen3", tmp_path)
    options = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True, "token_buckets": (16,)}
    llm = LLM(str(tmp_path), enable_sleep_mode=True, **options)
    prompt, params = (
        {"prompt_token_ids": prompt_of("qwen3")},
        SamplingParams(temperature=0, max_tokens=4, detokenize=False),
    )
    asked = lambda: llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    expected = golden_of("qwen3")["greedy"][:4]
    assert asked() == expected
    with CompileCounter() as counter:
        llm.sleep(level=2)
        llm.wake_up()
        assert counter.count == 0
    assert asked() == expected
    assert llm.apply_model(lambda params: params.layers[0].self_attn.q_proj) == [None]
    llm.shutdown()

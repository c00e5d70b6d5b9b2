"""Whole texts without a cache: the logits of transformers, whatever lies beside a text in its row, and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError
from jaxpaged.models.dense_forward import DenseModel
from jaxpaged.models.registry import model_for
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.encoder_checkpoints import BERT
from tests.models.paged import NAMES, PagedModel, golden_of, max_model_len_of

HERE = ("gemma2", "gemma4", "deepseek_v3", "lfm2_moe")
"""Windows and caps, shared caches, latents with experts, states with experts."""
OTHERS = tuple(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES if name not in HERE)


@pytest.mark.parametrize("name", [*HERE, *OTHERS])
def test_logits_are_those_of_transformers_wherever_a_text_lies(name, tmp_path):
    paged, prompt = PagedModel(write_checkpoint(name, tmp_path), max_model_len=max_model_len_of(name)), prompt_of(name)
    dense = DenseModel(paged.model, dataclasses.replace(paged.config, matmul_backend="cpu"), paged.mesh)
    rows_RC = np.array([[*prompt, *prompt[:5]], [*prompt[5::-1], *prompt[1:]]], np.int32)
    segments_RC = np.array([[7] * len(prompt) + [2] * 5, [0] * 6 + [1] * (len(prompt) - 1)], np.int32)
    logits_RCV = np.asarray(jax.jit(dense.logits)(paged.params, rows_RC, segments_RC))
    text_TV, beside_TV = np.split(logits_RCV[0, :, : paged.config.vocab_size], [len(prompt)])
    golden = golden_of(name)
    for position, top in golden["top"].items():
        np.testing.assert_allclose(text_TV[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(text_TV.sum(axis=1), golden["sums"], rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(beside_TV, text_TV[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("gemma2", 1),
        ("lfm2_moe", 4),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("gpt_oss", 1), ("deepseek_v3", 2))),
    ],
)
def test_gradients_are_those_of_differences(name, devices, tmp_path):
    """Also where whole experts lie on several devices."""
    paged = PagedModel(write_checkpoint(name, tmp_path), num_shards=devices, spreads_experts=devices > 1)
    dense = DenseModel(paged.model, paged.config, paged.mesh)
    tokens_RC, segments_RC = np.array([prompt_of(name)[:8]]), np.array([[1] * 5 + [2] * 3])
    total = jax.jit(lambda params: jnp.sum(dense.logprobs(params, tokens_RC, segments_RC)))
    logprobs_RC = np.asarray(jax.jit(dense.logprobs)(paged.params, tokens_RC, segments_RC))
    assert (logprobs_RC[0] < 0).tolist() == [False, *[True] * 4, False, *[True] * 2]
    gradient = jax.jit(jax.grad(total))(paged.params)
    norm = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient))
    moved = lambda step: jax.tree.map(lambda array, slope: array + step * slope, paged.params, gradient)
    step = 1e-2 / norm
    change = float(total(moved(step))) - float(total(moved(-step)))
    assert change == pytest.approx(2 * step * norm, rel=0.02)


def test_what_is_not_taken_is_named():
    texts = np.zeros((1, 2), np.int32), np.ones((1, 2), np.int32)
    model = model_for(CONFIGS["mixtral"])
    dense = DenseModel(model, model.config_from_hf(CONFIGS["mixtral"]), make_mesh(1, ranks=2))
    with pytest.raises(ConfigError, match="2 data-parallel ranks have the experts together"):
        dense.logits(None, *texts)
    encoder = model_for(BERT)
    with pytest.raises(ConfigError, match="is an encoder"):
        DenseModel(encoder, encoder.config_from_hf(BERT), make_mesh(1)).logits(None, *texts)

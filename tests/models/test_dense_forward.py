"""Whole texts without a cache: the logits of transformers, whatever lies beside a text in its row, and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.models.dense_forward import DenseModel
from jaxpaged.models.registry import model_for
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.paged import PagedModel, golden_of


@pytest.mark.parametrize("name", ["gemma2", "gemma4", "mistral_window", "cohere2"])
def test_logits_are_those_of_transformers_wherever_a_text_lies(name, tmp_path):
    paged, prompt = PagedModel(write_checkpoint(name, tmp_path)), prompt_of(name)
    dense = DenseModel(paged.model, dataclasses.replace(paged.config, matmul_backend="cpu"))
    rows_RC = np.array([[*prompt, *prompt[:5]], [*prompt[5::-1], *prompt[1:]]], np.int32)
    segments_RC = np.array([[7] * len(prompt) + [2] * 5, [0] * 6 + [1] * (len(prompt) - 1)], np.int32)
    logits_RCV = np.asarray(jax.jit(dense.logits)(paged.params, rows_RC, segments_RC))
    text_TV, beside_TV = np.split(logits_RCV[0, :, : paged.config.vocab_size], [len(prompt)])
    golden = golden_of(name)
    for position, top in golden["top"].items():
        np.testing.assert_allclose(text_TV[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(text_TV.sum(axis=1), golden["sums"], rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(beside_TV, text_TV[:5], rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_differences(tmp_path):
    paged, prompt = PagedModel(write_checkpoint("gemma2", tmp_path)), prompt_of("gemma2")[:8]
    dense = DenseModel(paged.model, paged.config)
    tokens_RC, segments_RC = np.array([prompt]), np.array([[1] * 5 + [2] * 3])
    total = jax.jit(lambda params: jnp.sum(dense.logprobs(params, tokens_RC, segments_RC)))
    logprobs_RC = np.asarray(jax.jit(dense.logprobs)(paged.params, tokens_RC, segments_RC))
    assert (logprobs_RC[0] < 0).tolist() == [False, *[True] * 4, False, *[True] * 2]
    gradient = jax.jit(jax.grad(total))(paged.params)
    norm = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient))
    moved = lambda step: jax.tree.map(lambda array, slope: array + step * slope, paged.params, gradient)
    step = 1e-2 / norm
    change = float(total(moved(step))) - float(total(moved(-step)))
    assert change == pytest.approx(2 * step * norm, rel=0.02)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "lfm2"])
def test_other_models_are_refused(name):
    model = model_for(CONFIGS[name])
    dense = DenseModel(model, model.config_from_hf(CONFIGS[name]))
    with pytest.raises(ConfigError, match="dense_forward takes"):
        dense.logits(None, np.zeros((1, 2), np.int32), np.ones((1, 2), np.int32))

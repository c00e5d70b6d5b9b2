"""A trainer's model of an engine: its log probabilities are the engine's, before an update and behind it."""

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams, logprob_difference
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.draft_heads import write_eagle3

OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "num_gpu_blocks_override": 32,
    "num_scheduler_steps": 1,
}
SAMPLED = SamplingParams(max_tokens=12, seed=1, logprobs=0, ignore_eos=True)
DEVICES = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "options", "drafts"),
    [
        ("deepseek_v3", DEVICES, False),
        pytest.param("lfm2_moe", DEVICES, False, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", {}, False, marks=pytest.mark.exhaustive),
        pytest.param("gemma2", {}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_engine_and_trainer_agree_before_an_update_and_behind_it(name, options, drafts, tmp_path):
    """Of experts on two devices, latents, states, sinks, and beside a head that drafts: below 3e-5."""
    if drafts:
        head = str(write_eagle3(tmp_path / "head", name, has_embeddings=True, norm_before_residual=True))
        options = {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2, "model": head}}
    with LLM(str(write_checkpoint(name, tmp_path / "model")), **OPTIONS, **options) as llm:
        dense = llm.dense_model()
        logprobs = jax.jit(dense.logprobs)
        slope = jax.jit(jax.grad(lambda *texts: dense.logprobs(*texts).mean()))

        def apart(params):
            [output] = llm.generate([{"prompt_token_ids": prompt_of(name)}], SAMPLED, use_tqdm=False)
            answer = output.outputs[0]
            drawn = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids)]
            texts = np.array([[*output.prompt_token_ids, *answer.token_ids]]), np.ones((1, 52), np.int32)
            trained = np.asarray(logprobs(params, *texts))[0, -len(drawn) :]
            return texts, np.array(drawn), logprob_difference(drawn, trained).largest

        params = llm.apply_model(lambda params: params)[0]
        texts, before, largest = apart(params)
        assert largest < 3e-5
        decoder = params.decoder if drafts else params
        learnt = jax.tree.map(lambda p, slope: p + 0.3 * slope, decoder, slope(decoder, *texts))
        llm.update_weights(params.replace(decoder=learnt) if drafts else learnt, "step 1")
        _, behind, largest = apart(learnt)
        assert largest < 3e-5 and np.abs(behind - before).max() > 1e-3

"""Two-turn chats with the embedded model, as people hold them: what the cache keeps of the first answer is right."""

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams

COUNTRIES = ("Kenya", "Portugal", "Japan", "Peru", "Egypt", "Cuba")
QUESTIONS = [f"What is the capital of {country}?" for country in COUNTRIES]
QUESTIONS += [f"What is {a} + {b}?" for a, b in ((27, 45), (11, 13), (60, 8), (35, 36), (19, 70), (52, 21))]
OPTIONS = {"max_num_seqs": 12, "max_num_batched_tokens": 128, "max_model_len": 256, "block_size": 4}


@pytest.mark.slow
def test_second_turns_after_a_stop_token_have_the_log_probabilities_of_a_fresh_computation():
    """In float32, where rounding does not hide what is wrong. Blocks of 4 slots, so that stop tokens complete some."""
    with LLM(dtype="float32", token_buckets=(12, 128), **OPTIONS) as llm:
        llm.wait_for_programs()  # only then do steps become runs
        first = llm.chat(
            [[{"role": "user", "content": text}] for text in QUESTIONS], SamplingParams(temperature=0, max_tokens=60)
        )
        stopped = [output for output in first if output.outputs[0].finish_reason == "stop"]
        prompts = [
            {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids, *output.prompt_token_ids[1:]]}
            for output in stopped
        ]
        ends = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in stopped]
        assert len(stopped) == len(QUESTIONS) and any(end % 4 == 0 for end in ends)
        cached, fresh = (
            llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=4, logprobs=5, skip_reading_prefix_cache=skips)
            )
            for skips in (False, True)
        )
    for with_cache, without, end in zip(cached, fresh, ends):
        assert with_cache.num_cached_tokens >= (end - 1) // 4 * 4 and without.num_cached_tokens == 0
        assert with_cache.outputs[0].token_ids == without.outputs[0].token_ids
        for seen, right in zip(with_cache.outputs[0].logprobs, without.outputs[0].logprobs):
            ids = sorted(seen.keys() & right.keys())
            np.testing.assert_allclose([seen[i].logprob for i in ids], [right[i].logprob for i in ids], atol=2e-3)

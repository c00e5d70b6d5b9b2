"""The embedded model gives the right answers however its requests are cut, cached, preempted or batched."""

import math
import re

import jax.numpy as jnp
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.sampling.noise import exponential_noise, position_keys

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Thailand": "Bangkok",
}


def ask(llm, questions, params=GREEDY):
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [output.outputs[0].text.strip() for output in outputs]


def capital_questions(count):
    countries = list(CAPITALS)
    asked = [countries[i % len(countries)] for i in range(count)]
    return [f"What is the capital of {country}?" for country in asked], [CAPITALS[country] for country in asked]


def long_prompt(code_word, num_sentences):
    """A long text with one code word near its beginning."""
    who = ["The old baker", "A small bird", "My neighbour", "The grey cat", "Our teacher", "A tired farmer", "The fox"]
    does = ["walked to", "looked at", "waited near", "sang behind", "went past"]
    where = ["the river", "the market", "a green hill", "the bridge", "the quiet garden", "the old house"]
    text = [f"{who[i % 7]} {does[i % 5]} {where[i % 6]}." for i in range(num_sentences)]
    text.insert(5, f"The code word is {code_word}.")
    return " ".join(text) + " What is the code word?"


def test_it_answers_every_kind_of_question(llm):
    questions, words = capital_questions(4)
    answers = ask(llm, [*questions, "What is 27 + 45?", "Spell the word banana.", "Count from 3 to 9."])
    for word, answer in zip(words, answers[:4], strict=True):
        assert word in answer
    assert re.search(r"\b72\b", answers[4])
    assert "b-a-n-a-n-a" in answers[5]
    assert re.findall(r"\d+", answers[6]) == [str(i) for i in range(3, 10)]


def test_a_batch_of_64_gives_the_right_answers(llm):
    questions, words = capital_questions(64)
    answers = ask(llm, questions)
    wrong = [(word, answer) for word, answer in zip(words, answers, strict=True) if word not in answer]
    assert not wrong


def test_an_answer_is_the_same_alone_and_in_a_batch(llm):
    questions, _ = capital_questions(8)
    together = ask(llm, questions)
    assert [ask(llm, [question])[0] for question in questions] == together


def test_a_code_word_is_found_far_back_in_a_prompt_that_takes_many_chunks(llm):
    words = ["green-owl", "KQ-2093", "river-88"]
    conversations = [[{"role": "user", "content": long_prompt(word, 200)}] for word in words]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert all(len(output.prompt_token_ids) > 2000 for output in outputs)
    assert [output.outputs[0].text for output in outputs] == [f"The code word is {word}." for word in words]


def test_a_prefix_hit_changes_nothing_but_the_work(llm):
    prompt = [{"role": "user", "content": long_prompt("river-88", 60)}]
    llm.reset_prefix_cache()
    first, second = (llm.chat(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > len(second.prompt_token_ids) - 32
    assert first.outputs[0].text == second.outputs[0].text
    assert "river-88" in second.outputs[0].text


@pytest.mark.slow
def test_preemption_and_recomputation_give_the_right_answers():
    questions, words = capital_questions(24)
    small = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (8, 64),
        "max_model_len": 96,
        "block_size": 4,
    }
    with LLM("demo", num_gpu_blocks_override=150, enable_prefix_caching=False, **small) as llm:
        answers = ask(llm, questions, SamplingParams(temperature=0.0, max_tokens=24))
        assert llm.llm_engine.metrics.stats.num_preemptions > 0
    assert [word in answer for word, answer in zip(words, answers, strict=True)] == [True] * len(words)


CLOSE = 0.1
"""Scores of two tokens, either of which may win in another batch: there bfloat16 is rounded in another order, which
moves a logit by up to 0.03."""


def draws_by_seed(result, seed):
    """Whether every token of an answer is the draw of its seed and position from its candidates, as far as bfloat16 can
    tell which that is."""
    [sequence] = result.outputs
    drawn = zip(sequence.token_ids, sequence.logprobs, strict=True)
    for place, (token, candidates) in enumerate(drawn, len(result.prompt_token_ids)):
        ids = list(candidates)
        key_12 = position_keys(jnp.asarray([[seed, 0]], jnp.uint32), jnp.asarray([place]))
        noise = exponential_noise(key_12, jnp.asarray([ids]))[0].tolist()
        scores = {each: candidates[each].logprob - math.log(amount) for each, amount in zip(ids, noise)}
        if max(scores.values()) - scores[token] >= CLOSE:
            return False
    return True


def test_a_seed_draws_the_same_tokens_alone_and_in_company(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16, top_k=5, logprobs=5)
    [alone] = llm.generate("Once upon a time", params, use_tqdm=False)
    others = [f"The capital of {country} is" for country in CAPITALS]
    crowd = llm.generate(["Once upon a time", *others], params, use_tqdm=False)
    assert all(draws_by_seed(each, 11) for each in (alone, *crowd)) and not draws_by_seed(alone, 12)

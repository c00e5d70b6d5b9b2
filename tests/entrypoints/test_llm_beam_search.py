import itertools

import numpy as np
import pytest

from jaxpaged.entrypoints.beam_search import beam_search
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams

EOS, VOCAB = 0, 6


def logprobs_after(token_ids):
    """A fixed random distribution for every prefix."""
    logits = np.random.default_rng(list(token_ids)).normal(size=VOCAB)
    return logits - np.log(np.exp(logits).sum())


def complete(prompts, params):
    """One token per prompt, as an engine would, with the most likely candidates."""
    assert params.max_tokens == 1
    outputs = []
    for prompt in prompts:
        logprobs = logprobs_after(prompt["prompt_token_ids"])
        top = np.argsort(-logprobs)[: params.logprobs].tolist()
        candidates = {token: Logprob(float(logprobs[token]), rank) for rank, token in enumerate(top, start=1)}
        completion = CompletionOutput(0, "", top[:1], None, [candidates], "length")
        outputs.append(RequestOutput("", None, prompt["prompt_token_ids"], None, [completion], True))
    return outputs


def search(prompt, *, max_model_len=100, run=complete, **params):
    params, prompts = BeamSearchParams(**params), [{"prompt_token_ids": prompt}]
    decode = lambda ids: " ".join(map(str, ids))
    return beam_search(run, prompts, params, max_model_len=max_model_len, eos_token_ids=[EOS], decode=decode)[0]


def all_sequences(prompt, max_tokens, ignore_eos=False):
    """Every way to go on: (tokens, total log probability)."""
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ended = not ignore_eos and tokens[-1] == EOS
            if (length == max_tokens or ended) and (ignore_eos or EOS not in tokens[:-1]):
                total = sum(logprobs_after([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens))
                yield list(tokens), total


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_beam_as_wide_as_the_tree_finds_the_best_sequences(length_penalty, ignore_eos):
    prompt = [3, 4]
    output = search(prompt, beam_width=VOCAB**2, max_tokens=3, length_penalty=length_penalty, ignore_eos=ignore_eos)
    score = lambda sequence: sequence[1] / len(sequence[0]) ** length_penalty
    ranked = sorted(all_sequences(prompt, 3, ignore_eos), key=score, reverse=True)
    assert [s.tokens[2:] for s in output.sequences] == [tokens for tokens, _ in ranked[: VOCAB**2]]
    assert output.sequences[0].cum_logprob == pytest.approx(ranked[0][1])


def test_a_beam_of_one_takes_the_most_likely_token_that_does_not_end():
    tokens = [3]
    for _ in range(4):
        logprobs = logprobs_after(tokens)
        logprobs[EOS] = -np.inf
        tokens.append(int(np.argmax(logprobs)))
    output = search([3], beam_width=1, max_tokens=4, ignore_eos=False, length_penalty=-10.0)
    assert output.sequences[0].tokens in (tokens, [*tokens[:-1], EOS]) or output.sequences[0].tokens[-1] == EOS
    assert len(output.sequences) == 1


def test_the_ending_token_has_no_text_unless_asked_for():
    for keep in (False, True):
        output = search([3], beam_width=5, max_tokens=2, include_stop_str_in_output=keep)
        ended = next(s for s in output.sequences if s.finish_reason == "stop")
        shown = ended.tokens if keep else ended.tokens[:-1]
        assert (ended.text, ended.tokens[-1]) == (" ".join(map(str, shown)), EOS)


def test_beams_end_with_the_context():
    output = search([3] * 8, beam_width=2, max_tokens=50, max_model_len=10, ignore_eos=True)
    assert [(len(s.tokens), s.finish_reason) for s in output.sequences] == [(10, "length")] * 2


def test_every_generated_token_has_its_candidates():
    best = search([3], beam_width=2, max_tokens=3, ignore_eos=True).sequences[0]
    assert len(best.logprobs) == 3
    chosen = [candidates[token].logprob for candidates, token in zip(best.logprobs, best.tokens[1:], strict=True)]
    assert sum(chosen) == pytest.approx(best.cum_logprob)


def test_searches_share_a_batch_and_one_that_fails_leaves_the_others():
    batches = []

    def run(prompts, params):
        batches.append(len(prompts))
        outputs = complete(prompts, params)
        for output in outputs:
            if output.prompt_token_ids[0] == 5:
                output.error = "no"
        return outputs

    prompts = [{"prompt_token_ids": [start], "cache_salt": "s"} for start in (3, 5)]
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    good, bad = beam_search(run, prompts, params, max_model_len=99, eos_token_ids=[EOS], decode=str)
    assert batches == [2, 2, 2]
    assert len(good.sequences) == 2
    assert (bad.sequences, bad.error) == ([], "no")

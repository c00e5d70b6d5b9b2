import itertools

import numpy as np
import pytest

from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams
from jaxpaged.serving.beam_search import BeamSearch, one_token

EOS, VOCAB = 0, 6


def logprobs_after(token_ids):
    """A fixed random distribution for every prefix."""
    logits = np.random.default_rng(list(token_ids)).normal(size=VOCAB)
    return logits - np.log(np.exp(logits).sum())


def complete(prompts, params):
    """One token per prompt, as an engine would, with the most likely candidates."""
    assert params.max_tokens == 1
    outputs = []
    for token_ids in prompts:
        logprobs = logprobs_after(token_ids)
        top = np.argsort(-logprobs)[: params.logprobs].tolist()
        candidates = {token: Logprob(float(logprobs[token]), rank) for rank, token in enumerate(top, start=1)}
        completion = CompletionOutput(0, "", top[:1], None, [candidates], "length")
        outputs.append(RequestOutput("", None, token_ids, None, [completion], True))
    return outputs


def search_all(prompts, params, *, max_model_len=100, run=complete):
    search = BeamSearch(prompts, params, max_model_len, [EOS])
    while step := search.next_step():
        search.advance(run([tokens for _, tokens in step], one_token(params)))
    return search.results()


def search(prompt, *, max_model_len=100, run=complete, **params):
    [output] = search_all([prompt], BeamSearchParams(**params), max_model_len=max_model_len, run=run)
    return output


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


def test_the_ending_token_is_the_last_one_of_its_sequence():
    output = search([3], beam_width=5, max_tokens=2)
    ended = [s for s in output.sequences if s.finish_reason == "stop"]
    assert ended and all(s.tokens[-1] == EOS and EOS not in s.tokens[:-1] for s in ended)


def test_a_token_that_was_drawn_is_no_candidate_unless_it_is_likely():
    def draw_the_least_likely(prompts, params):
        outputs = complete(prompts, params)
        for output in outputs:
            candidates = output.outputs[0].logprobs[0]
            logprobs = logprobs_after(output.prompt_token_ids)
            least = int(np.argmin(logprobs))
            drawn = {least: Logprob(float(logprobs[least]), VOCAB)}
            output.outputs[0].logprobs = [drawn | candidates]
        return outputs

    options = {"beam_width": 2, "max_tokens": 4, "length_penalty": 5.0}
    drawn, plain = search([3], run=draw_the_least_likely, **options), search([3], **options)
    assert [s.tokens for s in drawn.sequences] == [s.tokens for s in plain.sequences]


def test_an_abort_ends_the_search_with_what_it_had():
    steps = iter([None, None, "abort"])

    def run(prompts, params):
        outputs = complete(prompts, params)
        if next(steps) is not None:
            for output in outputs:
                output.outputs = [CompletionOutput(0, "", [], None, [], "abort")]
        return outputs

    output = search([3], beam_width=2, max_tokens=9, ignore_eos=True, run=run)
    assert [(len(s.tokens), s.finish_reason) for s in output.sequences] == [(3, "abort")] * 2


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

    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    good, bad = search_all([[3], [5]], params, run=run)
    assert batches == [2, 2, 2]
    assert len(good.sequences) == 2
    assert (bad.sequences, bad.error) == ([], "no")

"""`LLM.score_tokens`: what was drawn gets the bits that it was drawn with, whatever is cached or taken away."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.entrypoints.scored_tokens import ScoredTokens, logprobs_of
from jaxpaged.errors import EngineError, RequestError, UsageError
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from tests.models.checkpoints import write_checkpoint

LONGEST = 48
OPTIONS = {
    "dtype": "float32",
    "max_model_len": LONGEST,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (4, 16),
    "block_size": 4,
    "num_gpu_blocks_override": 20,  # so few that requests are preempted
    "num_scheduler_steps": 1,
    "skip_tokenizer_init": True,
    "max_logprobs": 2,
}
PROMPTS = [{"prompt_token_ids": [3, *range(20, 20 + length), 7]} for length in (0, 9, 9, 21)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    llm = LLM(str(write_checkpoint("llama", tmp_path_factory.mktemp("llama"))), deterministic=True, **OPTIONS)
    yield llm
    llm.shutdown()


def drawn(llm, **params):
    """Tokens and their log probabilities, of each prompt."""
    params = SamplingParams(**{"max_tokens": 99, "logprobs": 0, "seed": 3, "ignore_eos": True} | params)
    answers = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    logprobs = [[line[token].logprob for line, token in zip(each.logprobs, each.token_ids)] for each in answers]
    return [each.token_ids for each in answers], [np.array(each, np.float32) for each in logprobs]


def counted(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def test_drawn_and_scored_are_the_same_bits_cached_or_not_preempted_or_not(llm):
    before = counted(llm, "vllm:num_preemptions")
    tokens, logprobs = drawn(llm)
    assert counted(llm, "vllm:num_preemptions") > before
    assert [len(each) for each in tokens] == [LONGEST - len(each["prompt_token_ids"]) for each in PROMPTS]
    for is_cached in (False, True):
        if not is_cached:
            llm.reset_prefix_cache()
        before = counted(llm, "vllm:prefix_cache_hits")
        scored = llm.score_tokens(PROMPTS, tokens, use_tqdm=False)
        assert all(each.dtype == np.float32 for each in scored)
        assert all(map(np.array_equal, scored, logprobs)), "up to the end of the context"
        assert counted(llm, "vllm:prefix_cache_hits") - before >= (20 if is_cached else 4)
    for num_tokens in (1, 2, 5):
        first = [np.array(each[:num_tokens]) for each in tokens]
        assert all(map(np.array_equal, llm.score_tokens(PROMPTS, first), [each[:num_tokens] for each in logprobs]))
    alone = llm.score_tokens(PROMPTS[3], tokens[3:])
    assert np.array_equal(alone[0], logprobs[3])
    limited, shaped = drawn(llm, top_k=2, temperature=0.7, max_tokens=9)
    assert all(map(np.array_equal, llm.score_tokens(PROMPTS, limited), shaped)), "raw ones are before temperature"


def test_empty_completions_get_empty_arrays_and_no_request(llm):
    scored = llm.score_tokens(PROMPTS[:2], [[], [5, 6]])
    assert [each.shape for each in scored] == [(0,), (2,)]
    assert llm.score_tokens([], []) == []


def test_a_prompt_has_log_probabilities_from_a_token_on_and_caches_have_what_is_before(llm):
    prompt, whole = PROMPTS[3], {"prompt_logprobs": 1, "max_tokens": 1, "temperature": 0.0, "detokenize": False}
    [all_of_it] = llm.generate(prompt, SamplingParams(**whole), use_tqdm=False)
    for start, num_cached in ((0, 0), (1, 0), (10, 8), (13, 12), (23, 20), (99, 20)):
        [output] = llm.generate(prompt, SamplingParams(**whole, prompt_logprob_start=start), use_tqdm=False)
        assert output.prompt_logprobs == [None] * min(start, 23) + all_of_it.prompt_logprobs[start:]
        assert output.num_cached_tokens == num_cached


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ("ab", "must be lists of token ids"),
        (7, "must be lists of token ids"),
        ([[5]], "1 completions of 2 prompts"),
        ([[5], "a"], "completion 1: completions is 'a'"),
        ([[5], [-1]], "completion 1: completions contains -1"),
        ([[5], [10**6]], "completion 1: completions"),
        ([[5], np.zeros(1, np.float32)], "completion 1: completions contains 0.0"),
        ([[5], [6] * LONGEST], "prompt 1: .*tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is_computed(llm, completions, message):
    with pytest.raises(RequestError, match=message):
        llm.score_tokens(PROMPTS[:2], completions)
    assert not llm.llm_engine.has_unfinished_requests()


def test_what_fails_or_is_no_number_is_an_error():
    def output(logprob, error=None):
        answer = CompletionOutput(0, "", [5], None, [{5: Logprob(logprob)}], "length")
        return RequestOutput("r", None, [1], None, [answer], finished=True, error=error)

    assert logprobs_of(output(-1.5), [5], "it") == [-1.5]
    with pytest.raises(EngineError, match="completion 3: token 0 .*NaN"):
        logprobs_of(output(float("nan")), [5], "completion 3")
    with pytest.raises(EngineError, match="completion 3: no room"):
        logprobs_of(output(0.0, "no room"), [5], "completion 3")


def test_logits_are_no_log_probabilities():
    engine = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logits"))
    with pytest.raises(UsageError, match="raw_logits"):
        ScoredTokens(engine, [], [])

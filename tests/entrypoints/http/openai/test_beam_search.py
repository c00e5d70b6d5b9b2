"""Beam search over HTTP: the sequences that `LLM.beam_search` finds, and what it cannot be combined with."""

import asyncio

import numpy as np
import pytest

from jaxpaged.entrypoints.llm import LLM
from jaxpaged.sampling_params import BeamSearchParams
from tests.engine.fake_engine import FakeExecutor, make_engine
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
BEAMS = {"prompt": "the cat", "use_beam_search": True, "n": 3, "max_tokens": 4, "temperature": 0}
CHAT = {name: value for name, value in BEAMS.items() if name != "prompt"}
CHAT["messages"] = [{"role": "user", "content": "the cat"}]
EVERY = TOKENIZER.vocab_size


def pathless(token_ids):
    """A fixed random distribution for every prefix, over pieces of words, in which ending is likely."""
    logits = np.random.default_rng([len(token_ids), token_ids[-1]]).normal(size=EVERY)
    logits[:261] -= 10  # bytes
    logits[TOKENIZER.eos_token_id] += 12
    return logits - np.log(np.exp(logits).sum())


def executor():
    made = FakeExecutor(pathless, EVERY)
    made.longest_run = 1
    return made


def found(prompt, **params):
    """What `LLM` finds: (generated ids, total log probability) of every sequence."""
    llm = LLM.from_engine(make_engine(executor())[0])
    [output] = llm.beam_search(prompt, BeamSearchParams(**params))
    start = len(TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"])
    return [(sequence.tokens[start:], sequence.finish_reason) for sequence in output.sequences]


@pytest.mark.parametrize("length_penalty", [1.0, -2.0, 3.0])
def test_a_completion_gives_the_best_sequences_best_first(ask, length_penalty):
    body = {**BEAMS, "length_penalty": length_penalty, "return_token_ids": True}
    answer = ask("/v1/completions", body, executor=executor()).json
    expected = found("the cat", beam_width=3, max_tokens=4, length_penalty=length_penalty)
    assert [(c["token_ids"], c["finish_reason"]) for c in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, (token_ids, reason) in zip(answer["choices"], expected):
        assert choice["text"] == TOKENIZER.decode(token_ids[:-1] if reason == "stop" else token_ids)
    num_prompt, num_found = len(TOKENIZER.encode("the cat")), sum(len(ids) for ids, _ in expected)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (num_prompt, num_found)


def test_several_prompts_are_searched_together(ask):
    prompts = [TOKENIZER.encode(text) for text in ("the cat", "sun")]
    answer = ask("/v1/completions", {**BEAMS, "prompt": prompts, "return_token_ids": True}, executor=executor()).json
    expected = [each for ids in prompts for each in found({"prompt_token_ids": ids}, beam_width=3, max_tokens=4)]
    assert [(c["token_ids"], c["finish_reason"]) for c in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))


def test_a_chat_has_n_answers(ask):
    answer = ask("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, executor=executor()).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        assert choice["finish_reason"] in ("stop", "length") and entries
        assert all(1 <= len(entry["top_logprobs"]) <= 2 for entry in entries)
        assert all(entry["logprob"] <= 0 for entry in entries)


def test_a_chat_without_a_limit_fills_the_context(ask):
    body = {**CHAT, "n": 1, "max_tokens": None, "ignore_eos": True}
    usage = ask("/v1/chat/completions", body, executor=executor()).json["usage"]
    assert usage["total_tokens"] == 64


def test_log_probabilities_begin_with_the_token_that_was_chosen(ask):
    answer = ask("/v1/completions", {**BEAMS, "logprobs": 1, "ignore_eos": True, "n": 2}, executor=executor()).json
    totals = []
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 4
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"])
        totals.append(sum(logprobs["token_logprobs"]))
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"stream": True}, "stream"),
        ({"stop": ["a"]}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"n": 11}, "n"),
        ({"n": 0}, "n"),
        ({"n": 20_000}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"length_penalty": -1e308}, "length_penalty"),
        ({"logprobs": 50}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": [7] * 80}, "prompt"),
        ({"use_beam_search": False, "length_penalty": 2, "temperature": 1}, "length_penalty"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
    ],
)
def test_what_beams_cannot_honour_is_refused_by_its_name(ask, more, parameter):
    answer = ask("/v1/completions", {**BEAMS, **more})
    assert (answer.status, answer.error["param"]) == (400, parameter), answer.body
    assert parameter in answer.error["message"]


def test_forced_calls_are_refused_in_chats(ask):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer = ask("/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


def test_neutral_values_and_a_seed_are_fine(ask):
    neutral = {"top_p": 1, "top_k": -1, "presence_penalty": 0, "stop": [], "logit_bias": {}, "seed": 5, "echo": True}
    answer = ask("/v1/completions", {**BEAMS, **neutral}, executor=executor())
    assert answer.status == 200
    assert all(choice["text"].startswith("the cat") for choice in answer.json["choices"])


def test_a_search_ends_when_its_client_leaves_and_counts_as_one_request(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        asking = asyncio.ensure_future(server.client.post("/v1/completions", BEAMS, leave_after=0))
        await asyncio.sleep(0.01)
        under_way = (await server.client.get("/load")).json
        await asking
        return under_way, server.engine.engine.has_unfinished_requests()

    assert serving(scenario, executor=executor()) == ({"server_load": 1}, False)


def test_an_aborted_search_gives_what_it_found(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        asking = asyncio.ensure_future(server.client.post("/v1/completions", BEAMS))
        await asyncio.sleep(0.01)
        await server.admin.post("/abort_all_requests")
        server.engine.go_on.set()
        return await asking

    answer = serving(scenario, executor=executor())
    assert answer.status == 200 and {c["finish_reason"] for c in answer.json["choices"]} == {"abort"}


def test_all_steps_go_to_the_core_that_suits_the_prompt(serving):
    async def scenario(server):
        assert (await server.client.post("/v1/completions", BEAMS)).status == 200
        await server.client.post("/v1/completions", {"prompt": "sun", "max_tokens": 1})
        return server.engine.ranks

    *of_beams, of_another = serving(scenario, executor=executor())
    assert set(of_beams) == {3} and len(of_beams) > 3 and of_another is None

"""`/v1/completions`, against the engine's own results and against OpenAI's shapes."""

import pytest

from jaxpaged.engine.output.token_texts import texts_of
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPT = "the cat sat"
GREEDY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}


def counted(prompt_ids, count):
    """What the fake model says: every token is the last one plus 1, and round again."""
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(5 + (ids[-1] + 1 - 5) % (TOKENIZER.vocab_size - 5))
    return ids[len(prompt_ids) :]


EXPECTED_IDS = counted(TOKENIZER.encode(PROMPT), 4)
EXPECTED = TOKENIZER.decode(EXPECTED_IDS)


def streamed_text(answer, index=0):
    chunks = [chunk for chunk in answer.events[:-1] if chunk["choices"]]
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_a_completion_has_the_models_text_and_counts_its_tokens(ask):
    answer = ask("/v1/completions", GREEDY)
    [choice] = answer.json["choices"]
    assert choice["text"] == EXPECTED and choice["finish_reason"] == "length" and choice["stop_reason"] is None
    assert answer.json["object"] == "text_completion" and answer.json["id"].startswith("cmpl-")
    assert answer.json["model"] == "fake"
    num_prompt = len(TOKENIZER.encode(PROMPT))
    assert answer.json["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": None,
    }


def test_without_max_tokens_there_are_16(ask):
    assert ask("/v1/completions", {"prompt": PROMPT}).json["usage"]["completion_tokens"] == 16
    assert ask("/v1/completions", {"prompt": PROMPT, "max_tokens": None}).json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [TOKENIZER.encode(PROMPT), [TOKENIZER.encode(PROMPT)], [PROMPT]])
def test_ids_and_lists_of_one_are_prompts_too(ask, prompt):
    answer = ask("/v1/completions", {**GREEDY, "prompt": prompt})
    assert [choice["text"] for choice in answer.json["choices"]] == [EXPECTED]


def test_special_tokens_can_be_left_out(ask):
    answer = ask("/v1/completions", {**GREEDY, "add_special_tokens": False, "return_token_ids": True})
    assert answer.json["choices"][0]["prompt_token_ids"] == TOKENIZER.encode(PROMPT, add_special_tokens=False)


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-2, None)), ("right", slice(0, 2))])
def test_prompts_are_truncated_on_either_side(ask, side, kept):
    body = {**GREEDY, "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    answer = ask("/v1/completions", body)
    assert answer.json["choices"][0]["prompt_token_ids"] == TOKENIZER.encode(PROMPT)[kept]
    assert answer.json["usage"]["prompt_tokens"] == 2


def test_a_text_far_too_long_can_be_truncated_to_what_fits(ask):
    answer = ask("/v1/completions", {"prompt": "x" * 9000, "truncate_prompt_tokens": -1})
    assert answer.json["usage"] == answer.json["usage"] | {"prompt_tokens": 63, "completion_tokens": 1}


def test_several_prompts_give_n_choices_each_in_order(ask):
    body = {"prompt": ["the cat", "a dog", "sun"], "n": 2, "max_tokens": 3, "seed": 5, "return_token_ids": True}
    choices = ask("/v1/completions", body).json["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    prompts = [TOKENIZER.encode(prompt) for prompt in body["prompt"]]
    assert [choice["prompt_token_ids"] for choice in choices] == [p for p in prompts for _ in range(2)]
    assert all(len(choice["token_ids"]) == 3 for choice in choices)
    again = ask("/v1/completions", body).json["choices"]
    assert [c["text"] for c in again] == [c["text"] for c in choices], "the same seed gives the same text"


def test_several_prompts_stream_each_under_its_own_index(ask):
    body = {"prompt": ["the cat", "a dog", "sun"], "n": 2, "max_tokens": 3, "seed": 5}
    whole = ask("/v1/completions", body).json["choices"]
    streamed = ask("/v1/completions", {**body, "stream": True})
    assert [streamed_text(streamed, i) for i in range(6)] == [choice["text"] for choice in whole]
    ends = [c["index"] for chunk in streamed.events[:-1] for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == list(range(6))


def test_a_stream_gives_the_text_piece_by_piece_and_ends_with_done(ask):
    answer = ask("/v1/completions", {**GREEDY, "stream": True})
    *chunks, done = answer.events
    assert answer.headers["content-type"].startswith("text/event-stream") and done == "[DONE]"
    assert streamed_text(answer) == EXPECTED and len(chunks) == 4
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert "stop_reason" in chunks[-1]["choices"][0] and "stop_reason" not in chunks[0]["choices"][0]


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(ask):
    answer = ask("/v1/completions", {**GREEDY, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, _ = answer.events
    num_prompt = len(TOKENIZER.encode(PROMPT))
    assert usage["choices"] == [] and all("usage" not in chunk for chunk in chunks)
    assert usage["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 4, "total_tokens": num_prompt + 4}


def test_continuous_usage_grows_with_every_chunk_and_needs_the_last_one(ask):
    both = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask("/v1/completions", {**GREEDY, "stream": True, "stream_options": both})
    assert [chunk["usage"]["completion_tokens"] for chunk in answer.events[:-1]] == [1, 2, 3, 4, 4]
    alone = {"continuous_usage_stats": True}
    answer = ask("/v1/completions", {**GREEDY, "stream": True, "stream_options": alone})
    assert all("usage" not in chunk for chunk in answer.events[:-1])


def test_the_server_can_force_usage(ask):
    answer = ask("/v1/completions", {**GREEDY, "stream": True}, options={"enable_force_include_usage": True})
    assert all("usage" in chunk for chunk in answer.events[:-1]) and answer.events[-2]["choices"] == []


def test_cached_tokens_are_reported_only_where_the_operator_allows_it(serving):
    async def scenario(server):
        await server.client.post("/v1/completions", {**GREEDY, "prompt": [7] * 20})
        return await server.client.post("/v1/completions", {**GREEDY, "prompt": [7] * 20})

    assert serving(scenario).json["usage"]["prompt_tokens_details"] is None
    details = serving(scenario, options={"enable_prompt_tokens_details": True}).json["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 16}


def test_a_stop_string_ends_the_text_and_is_named(ask):
    stop = EXPECTED[-3:]
    answer = ask("/v1/completions", {**GREEDY, "max_tokens": 20, "stop": stop})
    [choice] = answer.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == EXPECTED[: EXPECTED.index(stop)]
    kept = ask("/v1/completions", {**GREEDY, "max_tokens": 20, "stop": [stop], "include_stop_str_in_output": True})
    assert kept.json["choices"][0]["text"].endswith(stop)


def test_a_stop_token_ends_the_text_and_is_named_by_its_id(ask):
    answer = ask("/v1/completions", {**GREEDY, "max_tokens": 20, "stop_token_ids": [EXPECTED_IDS[2]]})
    [choice] = answer.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", EXPECTED_IDS[2])


def test_echo_puts_the_prompt_before_the_text(ask):
    answer = ask("/v1/completions", {**GREEDY, "echo": True})
    assert answer.json["choices"][0]["text"] == PROMPT + EXPECTED
    assert streamed_text(ask("/v1/completions", {**GREEDY, "echo": True, "stream": True})) == PROMPT + EXPECTED


def test_echo_turns_ids_into_text(ask):
    ids = TOKENIZER.encode(PROMPT, add_special_tokens=False)
    assert ask("/v1/completions", {**GREEDY, "prompt": ids, "echo": True}).json["choices"][0]["text"].startswith(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_new_tokens_is_the_prompt_alone(ask, stream):
    body = {**GREEDY, "echo": True, "max_tokens": 0, "stream": stream}
    if stream:
        answer = ask("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        text, usage = streamed_text(answer), answer.events[-2]["usage"]
    else:
        answer = ask("/v1/completions", body)
        text, usage = answer.json["choices"][0]["text"], answer.json["usage"]
    assert text == PROMPT and usage["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt_as_evaluation_tools_need_it(ask, stream):
    ids = TOKENIZER.encode(PROMPT)
    body = {**GREEDY, "prompt": ids, "echo": True, "logprobs": 1, "stream": stream}
    answer = ask("/v1/completions", body)
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in answer.events[:-1]]
        logprobs = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    else:
        logprobs = answer.json["choices"][0]["logprobs"]
    first, *tokens = texts_of(TOKENIZER, [*ids, *EXPECTED_IDS])
    assert logprobs["tokens"] == [first, *tokens] and first == "<bos>", "which is no part of the text"
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, *(sum(map(len, tokens[:i])) for i in range(len(tokens)))]


def test_logprobs_lists_up_to_one_more_than_asked_for(ask):
    logprobs = ask("/v1/completions", {**GREEDY, "temperature": 1, "seed": 3, "logprobs": 2}).json["choices"][0][
        "logprobs"
    ]
    for token, value, tops in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert tops[token] == value and 2 <= len(tops) <= 3


def test_tokens_can_be_shown_as_ids(ask):
    body = {**GREEDY, "logprobs": 0, "return_tokens_as_token_ids": True}
    logprobs = ask("/v1/completions", body).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in EXPECTED_IDS]
    assert [list(tops) for tops in logprobs["top_logprobs"]] == [[f"token_id:{i}"] for i in EXPECTED_IDS]


def test_prompt_logprobs_have_a_null_first_and_then_the_prompts_tokens(ask):
    ids = TOKENIZER.encode(PROMPT)
    positions = ask("/v1/completions", {**GREEDY, "prompt_logprobs": 2}).json["choices"][0]["prompt_logprobs"]
    assert positions[0] is None and len(positions) == len(ids)
    for token_id, position in zip(ids[1:], positions[1:]):
        own = position[str(token_id)]
        assert own["decoded_token"] == TOKENIZER.decode([token_id]) and own["rank"] >= 1 and own["logprob"] <= 0


def test_token_ids_are_returned_when_asked_for(ask):
    answer = ask("/v1/completions", {**GREEDY, "stream": True, "return_token_ids": True})
    choices = [chunk["choices"][0] for chunk in answer.events[:-1]]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == EXPECTED_IDS
    assert choices[0]["prompt_token_ids"] == TOKENIZER.encode(PROMPT)
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


def test_every_sampling_parameter_reaches_the_engine(serving):
    body = {
        "prompt": PROMPT,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "temperature": 0.75,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "stop": ["x"],
        "stop_token_ids": [9],
        "bad_words": ["dog"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 3,
        "min_tokens": 2,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"8": -5},
        "allowed_token_ids": [7, 8, 10, 11],
        "vllm_xargs": {"mine": [1, "two"]},
    }

    async def scenario(server):
        answer = await server.client.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        return server.engine.seen[0][1]

    params = serving(scenario)
    renamed = {"prompt": None, "logit_bias": {8: -5.0}}
    for name, value in body.items():
        if name == "vllm_xargs":
            assert params.extra_args == value
        elif renamed.get(name, value) is not None:
            assert getattr(params, name) == renamed.get(name, value), name


def test_the_models_own_defaults_fill_what_a_request_leaves_open(serving):
    from jaxpaged.engine.input.generation_config import GenerationDefaults

    async def scenario(server):
        await server.client.post("/v1/completions", {"prompt": PROMPT, "top_k": 3})
        return server.engine.seen[0][1]

    params = serving(scenario, defaults=GenerationDefaults({"temperature": 0.5, "top_k": 9, "max_tokens": 2}))
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 16)


def test_priority_goes_to_an_engine_that_has_priorities(ask):
    assert ask("/v1/completions", {**GREEDY, "priority": 3}, scheduling_policy="priority").status == 200

"""`POST /v1/chat/completions/batch`: a choice for every conversation."""

import asyncio

import pytest

PATH, ONE = "/v1/chat/completions/batch", "/v1/chat/completions"
TEXTS = ["the cat", "a", "the dog sat on the mat"]
CONVERSATIONS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = {"temperature": 0, "max_tokens": 6}


def test_each_choice_is_what_its_conversation_gets_by_itself(serving):
    async def scenario(server):
        batch = await server.client.post(PATH, {**GREEDY, "messages": CONVERSATIONS, "logprobs": True})
        alone = [
            await server.client.post(ONE, {**GREEDY, "messages": each, "logprobs": True}) for each in CONVERSATIONS
        ]
        return batch, [answer.json for answer in alone]

    batch, alone = serving(scenario, options={"enable_prompt_tokens_details": True})
    assert batch.status == 200, batch.body
    choices = batch.json["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]
    assert [{**each, "index": 0} for each in choices] == [answer["choices"][0] for answer in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch.json["usage"][name] == sum(answer["usage"][name] for answer in alone)
    assert batch.json["object"] == "chat.completion" and batch.json["id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [CONVERSATIONS[0], [{"role": "king", "content": "a"}]]}, "messages[1][0].role"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": 5}]]}, "messages[1][0].content"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "x" * 80}]]}, "messages[1]"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]"),
        ({"messages": [CONVERSATIONS[0]] * 1025}, "messages"),
        ({"messages": CONVERSATIONS, "n": 2}, "n"),
        ({"messages": CONVERSATIONS, "stream": True}, "stream"),
        ({"messages": CONVERSATIONS, "use_beam_search": True}, "use_beam_search"),
        ({"messages": CONVERSATIONS, "return_token_ids": True}, "return_token_ids"),
        ({"messages": CONVERSATIONS, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": CONVERSATIONS, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": CONVERSATIONS, "temperature": 5}, "temperature"),
        ({"messages": CONVERSATIONS, "lora_request": {"a": 1}}, "lora_request"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(ask, body, field):
    answer = ask(PATH, {**GREEDY, **body})
    assert (answer.status, answer.error["param"]) == (400, field), answer.body
    assert field in answer.error["message"]


def test_all_end_when_the_client_leaves_or_aborts(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        await server.client.post(PATH, {**GREEDY, "messages": CONVERSATIONS}, leave_after=0)
        left = len(server.engine.aborted)
        asking = asyncio.ensure_future(server.client.post(PATH, {"messages": CONVERSATIONS}, x_request_id="x"))
        await asyncio.sleep(0.05)
        aborted = await server.client.post("/abort_requests", {"request_ids": ["chatcmpl-x"]})
        server.engine.go_on.set()
        return left, aborted.json, [each["finish_reason"] for each in (await asking).json["choices"]]

    assert serving(scenario) == (3, {"num_aborted": 3}, ["abort"] * 3)


def test_a_failure_ends_them_all_with_its_status(serving):
    async def scenario(server):
        server.engine.executor.fail_at = {0: "result"}
        answer = await server.client.post(PATH, {**GREEDY, "messages": CONVERSATIONS})
        while server.engine.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        return answer

    answer = serving(scenario)
    assert answer.status in (500, 503) and answer.error["message"]

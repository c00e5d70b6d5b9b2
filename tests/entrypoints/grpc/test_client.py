"""`jaxpaged.client` against the server, and against one that fails on demand."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from jaxpaged.client import AsyncClient, Client, ClientError
from jaxpaged.client import calls as client_calls
from jaxpaged.client.messages import generate_request
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.proto.jaxpaged_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from tests.entrypoints.grpc.conftest import Gate

GREEDY = {"max_tokens": 5, "temperature": 0}


def target_of(server):
    return f"127.0.0.1:{server.listener.ports[0]}"


async def sync_client(server, function, **settings):
    """What `function(client)` gives, in a thread."""

    def run():
        with Client(target_of(server), **settings) as client:
            return function(client)

    return await asyncio.to_thread(run)


def test_both_clients_say_the_same(serving):
    async def scenario(server):
        def use(client):
            texts = [each.sequences[0].text for each in client.generate("ab", **GREEDY) if each.sequences]
            return "".join(texts), client.answer("ab", **GREEDY), client.tokenize("ab"), client.model_info()

        text, answer, tokens, model = await sync_client(server, use)
        async with AsyncClient(target_of(server)) as client:
            streamed = [each async for each in client.generate("ab", **GREEDY)]
            again = await client.answer("ab", **GREEDY)
            assert await client.tokenize("ab") == tokens
            assert await client.model_info() == model
            assert (await client.detokenize(tokens.token_ids)).text.endswith("ab")
            assert (await client.server_info()).num_requests == 0
        assert "".join(each.text for response in streamed for each in response.sequences) == text == answer.text
        assert (again.text, again.token_ids, again.finish_reason) == (answer.text, answer.token_ids, "length")
        assert answer.usage.completion_tokens == 5

    serving(scenario)


def test_a_chat_with_tools_and_a_shape_arrives_whole():
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    request = generate_request(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        ],
        {
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"enable_thinking": False},
            "stop": "x",
            "temperature": 0.5,
            "structured_outputs": {"json": schema},
            "truncation_side": "right",
            "priority": 2,
        },
    )
    assert [message.role for message in request.chat.messages] == ["user", "assistant", "tool"]
    assert request.chat.messages[1].tool_calls[0].name == "weather"
    assert request.chat.messages[2].tool_call_id == "1"
    assert request.chat.tools[0].parameters["properties"]["city"]["maxLength"] == 9  # for servers of before
    assert json.loads(request.chat.tools[0].parameters_json) == schema
    assert request.chat.chat_template_kwargs["enable_thinking"] is False
    assert json.loads(request.sampling_params.structured_outputs.json) == schema
    assert list(request.sampling_params.stop) == ["x"]
    assert (request.priority, request.truncation_side) == (2, pb.TRUNCATION_SIDE_RIGHT)


@pytest.mark.parametrize("values", [{"temprature": 1}, {"temperature": "hot"}, {"tools": []}])
def test_a_wrong_name_or_type_is_a_type_error(values):
    with pytest.raises(TypeError):
        generate_request("text", values)


def test_an_error_has_code_field_and_message(serving):
    async def scenario(server):
        def use(client):
            with pytest.raises(ClientError) as caught:
                list(client.generate("ab", top_p=7))
            return caught.value

        return await sync_client(server, use)

    error = serving(scenario)
    assert (error.code, error.field) == ("INVALID_ARGUMENT", "sampling_params.top_p")
    assert "top_p is 7" in error.message


def test_closing_the_generator_ends_the_request(serving):
    async def scenario(server):
        def use(client):
            responses = client.generate("ab", max_tokens=50, temperature=0)
            next(responses)
            responses.close()

        server.engine.go_on = Gate(1)
        await sync_client(server, use)
        while not server.engine.aborted:
            await asyncio.sleep(0.01)
        server.engine.go_on.set()
        while len(server.service.traffic) or server.engine.engine.has_unfinished_requests():
            await asyncio.sleep(0.01)
        return list(server.engine.aborted)

    assert len(serving(scenario)) == 1


def test_keys_are_sent(serving):
    async def scenario(server):
        answer = await sync_client(server, lambda client: client.answer("ab", **GREEDY), api_key="secret")
        assert answer.text
        with pytest.raises(ClientError, match="UNAUTHENTICATED"):
            await sync_client(server, lambda client: client.model_info())

    serving(scenario, keys=["secret"])


class Flaky(InferenceServicer):
    """Fails as `script` says: how many responses come before a status, or None for a good end."""

    def __init__(self, script):
        self.script = list(script)
        self.calls = 0

    def Generate(self, request, context):
        self.calls += 1
        num_responses, status = self.script.pop(0)
        for number in range(num_responses):
            yield pb.GenerateResponse(sequences=[pb.SequenceDelta(text=str(number))])
        if status is not None:
            context.abort(status, "not now")


UNAVAILABLE, INTERNAL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("script", "texts", "code", "calls"),
    [
        ([(0, UNAVAILABLE), (0, UNAVAILABLE), (2, None)], "01", None, 3),  # nothing came: tried again
        ([(1, UNAVAILABLE), (2, None)], "0", "UNAVAILABLE", 1),  # something came: never again
        ([(0, INTERNAL), (2, None)], "", "INTERNAL", 1),  # another try would not help
        ([(0, UNAVAILABLE)] * 4, "", "UNAVAILABLE", 4),  # three more tries and no more
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_what_has_not_begun_is_tried_again(monkeypatch, script, texts, code, calls, kind):
    monkeypatch.setattr(client_calls, "wait_before", lambda attempt, error: 0)
    servicer, server = Flaky(script), grpc.server(ThreadPoolExecutor(2))
    add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    received = []

    def sync():
        with Client(f"127.0.0.1:{port}") as client:
            received.extend(each.sequences[0].text for each in client.generate("a"))

    async def through_asyncio():
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            async for each in client.generate("a"):
                received.append(each.sequences[0].text)

    try:
        run = sync if kind == "sync" else lambda: asyncio.run(through_asyncio())
        if code is None:
            run()
        else:
            with pytest.raises(ClientError) as caught:
                run()
            assert caught.value.code == code
    finally:
        server.stop(None)
    assert ("".join(received), servicer.calls) == (texts, calls)

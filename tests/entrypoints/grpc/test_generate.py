"""`Generate`: what comes in and goes out, and that it is what HTTP gives."""

import asyncio
import json

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from jaxpaged.client.messages import generate_request
from jaxpaged.entrypoints.grpc.requests import generate_request as read_request
from jaxpaged.entrypoints.grpc.responses import Responses
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.kv_store.transfer_params import PARAMS, RemoteSource, answer_params
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.sampling_params import FILLED_IN, SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.errors import ServingError
from tests.engine.small_tokenizer import make_tokenizer
from tests.entrypoints.grpc.conftest import Gate
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.saying_model import saying


async def everything(call):
    return [message async for message in call]


def text_of(responses, index=0):
    return "".join(each.text for response in responses for each in response.sequences if each.index == index)


def ids_of(responses, index=0):
    return [i for response in responses for each in response.sequences if each.index == index for i in each.token_ids]


def details_of(error):
    """The google.rpc details of an error."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    kinds = [error_details_pb2.BadRequest, error_details_pb2.RetryInfo]
    found = []
    for detail in status.details:
        kind = next(kind for kind in kinds if detail.Is(kind.DESCRIPTOR))
        found.append(kind())
        detail.Unpack(found[-1])
    return found


def refused(serving, request, **settings):
    async def scenario(server):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await everything(server.stub.Generate(request))
        return caught.value

    return serving(scenario, **settings)


def test_a_text_is_continued_in_deltas_as_over_http(serving):
    async def scenario(server):
        request = pb.GenerateRequest(text="ab", sampling_params=pb.SamplingParams(max_tokens=6, temperature=0))
        responses = await everything(server.stub.Generate(request))
        body = {"prompt": "ab", "max_tokens": 6, "temperature": 0}
        over_http = await Client(create_app(server.service)).post("/v1/completions", body)
        return responses, over_http.json

    responses, over_http = serving(scenario)
    assert len(responses) > 1
    assert text_of(responses) == over_http["choices"][0]["text"]
    assert responses[-1].sequences[0].finish_reason == "length"
    assert responses[-1].usage.prompt_tokens == over_http["usage"]["prompt_tokens"]
    assert responses[-1].usage.completion_tokens == 6 == len(ids_of(responses))
    assert not any(response.HasField("usage") for response in responses[:-1])
    assert len({response.request_id for response in responses}) == 1


def test_final_only_gives_one_response_with_prompt_ids_and_log_probabilities(serving):
    async def scenario(server):
        params = pb.SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[6, 7, 8]),
            sampling_params=params,
            final_only=True,
            request_id="mine",
            return_prompt_token_ids=True,
        )
        return await everything(server.stub.Generate(request))

    [response] = serving(scenario)
    assert response.request_id == "mine"
    assert list(response.prompt_token_ids.ids) == [6, 7, 8]
    sequence = response.sequences[0]
    assert list(sequence.token_ids) == [9, 10, 11, 12]
    assert [len(position.candidates) for position in sequence.logprobs] == [2] * 4
    assert [position.candidates[0].rank for position in sequence.logprobs] == [1] * 4
    assert sequence.logprobs[0].candidates[0].token_id == 9
    assert [len(position.candidates) for position in response.prompt_logprobs] == [0, 1, 1]


def test_several_sequences_come_with_their_index_and_a_seed_decides_them(serving):
    async def scenario(server):
        params = pb.SamplingParams(n=3, max_tokens=5, temperature=1, seed=11)
        request = pb.GenerateRequest(text="ab", sampling_params=params)
        first, second = [await everything(server.stub.Generate(request)) for _ in range(2)]
        return first, second

    first, second = serving(scenario)
    ids = [ids_of(first, index) for index in range(3)]
    assert ids == [ids_of(second, index) for index in range(3)]
    assert len({tuple(each) for each in ids}) > 1
    assert first[-1].usage.completion_tokens == 15


def test_a_stop_text_is_named(serving):
    async def scenario(server):
        full = await everything(
            server.stub.Generate(pb.GenerateRequest(text="ab", sampling_params=pb.SamplingParams(temperature=0)))
        )
        stop = text_of(full)[2:4]
        params = pb.SamplingParams(temperature=0, stop=[stop])
        return stop, await everything(server.stub.Generate(pb.GenerateRequest(text="ab", sampling_params=params)))

    stop, responses = serving(scenario)
    assert responses[-1].sequences[0].finish_reason == "stop"
    assert responses[-1].sequences[0].stop_text == stop


def test_a_chat_is_answered_as_over_http(serving):
    async def scenario(server):
        message = {"role": "user", "content": "hello"}
        chat = pb.Chat(messages=[pb.ChatMessage(**message)])
        request = pb.GenerateRequest(chat=chat, sampling_params=pb.SamplingParams(max_tokens=5, temperature=0))
        responses = await everything(server.stub.Generate(request))
        body = {"messages": [message], "max_tokens": 5, "temperature": 0}
        over_http = await Client(create_app(server.service)).post("/v1/chat/completions", body)
        return responses, over_http.json

    responses, over_http = serving(scenario)
    assert text_of(responses) == over_http["choices"][0]["message"]["content"]
    assert responses[-1].usage.prompt_tokens == over_http["usage"]["prompt_tokens"]


ORDERED = {
    "type": "object",
    "properties": {name: {"type": "string", "enum": ["yes", "no"]} for name in ("zeta", "alpha", "mid", "b", "a", "k")},
    "required": ["zeta", "a"],
    "additionalProperties": False,
}
LIMITED = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 9007199254740993},
        "x": {"const": 2.0},
        "default": {"$ref": "#/$defs/d"},
    },
    "required": ["id", "x"],
    "$defs": {"d": {"enum": [None, True, 1e300, "ü", {"b": 1, "a": 2}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "ordered", "description": "sorts", "parameters": ORDERED}},
    {"type": "function", "function": {"name": "limited", "parameters": LIMITED}},
    {"type": "function", "function": {"name": "nothing"}},
]
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}{{ messages[-1].content }}"


@pytest.mark.parametrize("choice", ["auto", "required", "ordered", "limited"])
def test_a_chat_with_tools_is_answered_as_over_http(serving, choice):
    """Before, the properties came in another order, and whole numbers above 2^53 were others."""

    async def scenario(server):
        messages = [{"role": "user", "content": "hello"}]
        values = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 150, "temperature": 0}
        asked = generate_request(messages, {**values, "return_prompt_token_ids": True})
        responses = await everything(server.stub.Generate(asked))
        named = choice not in ("auto", "required")
        over = {"tool_choice": {"type": "function", "function": {"name": choice}}} if named else {}
        body = {**values, **over, "messages": messages, "return_token_ids": True}
        over_http = await Client(create_app(server.service)).post("/v1/chat/completions", body)
        assert over_http.status == 200, over_http.body
        return responses, over_http.json

    responses, over_http = serving(scenario, options={"tool_call_parser": "hermes"}, chat=WITH_TOOLS, **saying("no"))
    [over_http_choice] = over_http["choices"]
    assert ids_of(responses) == over_http_choice["token_ids"]
    assert list(responses[0].prompt_token_ids.ids) == over_http["prompt_token_ids"]
    pieces = [call for response in responses for each in response.sequences for call in each.tool_calls]
    calls = over_http_choice["message"].get("tool_calls", [])
    assert "".join(each.arguments for each in pieces) == "".join(each["function"]["arguments"] for each in calls)
    assert [each.name for each in pieces if each.name] == [each["function"]["name"] for each in calls]


def test_clients_of_before_send_schemas_as_structs():
    tool = pb.Tool(name="f")
    json_format.ParseDict({"properties": {"a": {"type": "integer"}}}, tool.parameters)
    request = read_request(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[tool])))
    assert request.prompt.template["tools"][0]["function"]["parameters"] == {"properties": {"a": {"type": "integer"}}}
    tool.parameters_json = '{"properties": {"b": {}}}'
    request = read_request(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[tool])))
    assert request.prompt.template["tools"][0]["function"]["parameters"] == {"properties": {"b": {}}}


@pytest.mark.parametrize("text", ["{", "[1]", "7", "[" * 100_000, '{"a": NaN}'])
def test_parameters_that_are_no_schema_are_refused_by_their_name(serving, text):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(name="f", parameters_json=text)])
    error = refused(serving, pb.GenerateRequest(chat=chat))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "parameters" in error.details()


def test_parts_of_a_character_have_their_bytes(serving):
    async def scenario(server):
        params = pb.SamplingParams(temperature=0, max_tokens=20, logprobs=1)
        return await everything(server.stub.Generate(pb.GenerateRequest(text="the", sampling_params=params)))

    responses = serving(scenario, **saying("a😀"))
    tokens = [line.candidates[0] for response in responses for each in response.sequences for line in each.logprobs]
    assert [each.token for each in tokens[:5]] == ["a", "", "", "", "😀"]
    assert [each.token_bytes for each in tokens[:5]] == [b"", b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_every_sampling_field_reaches_the_request():
    """Set one after another: a field that nobody reads would change nothing."""
    values = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "stop": ["x"],
        "stop_token_ids": [7],
        "bad_words": ["y"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 2,
        "prompt_logprob_start": 3,
        "trace_decode_token_ids": [3, 4],
        "routed_experts_prompt_start": 1,
        "logprob_token_ids": [3],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {5: 1.0},
        "allowed_token_ids": [5],
        "structured_outputs": pb.StructuredOutputs(regex="a+"),
        "thinking_token_budget": 3,
        "extra_args": {"key": "value"},
        "stream_interval": 4,
    }
    fields = pb.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(values) == set(fields)
    known = {*SamplingParams.__struct_fields__} - {"output_kind", "detokenize", "skip_reading_prefix_cache"}
    known -= {*FILLED_IN}
    assert set(fields) == known, "a sampling parameter is missing here"
    plain = read_request(pb.GenerateRequest(text="a", final_only=True))
    for name, value in values.items():
        asked = {"prompt_logprobs": 1} if name == "prompt_logprob_start" else {}
        params = pb.SamplingParams(**{name: value} | asked)
        changed = read_request(pb.GenerateRequest(text="a", final_only=True, sampling_params=params))
        assert changed != plain, name


def test_what_another_engine_lends_goes_from_an_answer_into_the_next_request_as_it_is():
    lent = answer_params(RemoteSource("127.0.0.1", 7, "lease", 32), "engine", [[1, 2], []], 12.5)
    completion = CompletionOutput(0, "a", [5], None, None, "length")
    output = RequestOutput("r", "a", [5], None, [completion], finished=True, kv_transfer_params=lent)
    responses = Responses("r", None, make_tokenizer(), with_prompt=False, with_cached_tokens=False)
    response = pb.GenerateResponse.FromString(responses.of(output))
    said = response.kv_transfer_params
    for prompt in ("text", [{"role": "user", "content": "text"}]):
        for params in (said, json_format.MessageToDict(said)):
            got = read_request(generate_request(prompt, {"kv_transfer_params": params})).params.extra_args[PARAMS]
            assert json.dumps(got, sort_keys=True) == json.dumps(lent, sort_keys=True), "7 is not 7.0 here"
    ask = generate_request("text", {"kv_transfer_params": {"do_remote_decode": True}})
    with pytest.raises(ServingError, match="final_only"):
        read_request(ask)
    ask.final_only = True
    assert read_request(ask).params.extra_args[PARAMS] == {"do_remote_decode": True}


@pytest.mark.parametrize(
    "shape",
    [
        {"regex": "[ab]{3}"},
        {"json": '{"type": "object"}'},
        {"choice": pb.Choices(texts=["yes", "no"])},
        {"json_object": True},
        {"grammar": 'start: "a"'},
    ],
)
def test_shapes_arrive_as_http_would_give_them(shape):
    params = pb.SamplingParams(structured_outputs=pb.StructuredOutputs(**shape))
    wanted = read_request(pb.GenerateRequest(text="a", sampling_params=params)).prompt.structured_outputs
    [(name, value)] = shape.items()
    assert wanted == StructuredOutputsParams.from_dict({name: list(value.texts) if name == "choice" else value})


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "text"),
        (
            pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(temperature=-1)),
            "sampling_params.temperature",
        ),
        (pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(top_p=2)), "sampling_params.top_p"),
        (
            pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(prompt_logprobs=1)),
            "sampling_params.prompt_logprobs",
        ),
        (pb.GenerateRequest(text="a", request_id="two words"), "request_id"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(text="x" * 500), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1 << 20])), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 500)), "token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="a")])), "chat.messages[0].role"),
        (pb.GenerateRequest(text="a", truncation_side=7), "truncation_side"),
    ],
)
def test_a_wrong_field_is_named_in_the_details(serving, request_, field):
    error = refused(serving, request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    [detail] = details_of(error)
    assert [violation.field for violation in detail.field_violations] == [field]
    assert detail.field_violations[0].description == error.details()


def test_another_model_is_not_found(serving):
    assert refused(serving, pb.GenerateRequest(text="a", model="other")).code() is grpc.StatusCode.NOT_FOUND


def test_a_full_queue_says_when_to_try_again(serving):
    async def scenario(server):
        server.engine.go_on.clear()  # the first request stays under way
        params = pb.SamplingParams(n=8, temperature=1, max_tokens=4)
        request = pb.GenerateRequest(text="a", sampling_params=params)
        first = asyncio.ensure_future(everything(server.stub.Generate(request)))
        while not len(server.service.traffic):
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await everything(server.stub.Generate(pb.GenerateRequest(text="a")))
        server.engine.go_on.set()
        await first
        return caught.value

    error = serving(scenario, options={"max_num_queued_reqs": 0})
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    [detail] = details_of(error)
    assert detail.retry_delay.seconds == 1


def test_a_draining_server_is_unavailable(serving):
    async def scenario(server):
        server.service.traffic.draining = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await everything(server.stub.Generate(pb.GenerateRequest(text="a")))
        return caught.value

    error = serving(scenario)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(error)


def test_a_dead_engine_is_an_internal_error_without_its_paths(serving):
    async def scenario(server):
        server.engine.is_dead = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await everything(server.stub.Generate(pb.GenerateRequest(text="a")))
        return caught.value

    error = serving(scenario)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "0x7f" not in error.details()
    assert "/srv" not in error.details()


def test_what_is_too_long_is_refused_before_it_is_read(serving):
    error = refused(serving, pb.GenerateRequest(text="a" * 5000), options={"max_body_bytes": 4096})
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_cancelling_a_call_ends_the_request_in_the_engine(serving):
    async def scenario(server):
        server.engine.go_on = Gate(1)
        call = server.stub.Generate(pb.GenerateRequest(text="ab", sampling_params=pb.SamplingParams(max_tokens=40)))
        await call.read()
        call.cancel()
        await until(lambda: server.engine.aborted)
        server.engine.go_on.set()
        await until(lambda: len(server.service.traffic) == 0)
        await until(lambda: not server.engine.engine.has_unfinished_requests())

    serving(scenario)


def test_a_deadline_ends_the_request_in_the_engine(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        call = server.stub.Generate(pb.GenerateRequest(text="ab"), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await everything(call)
        await until(lambda: server.engine.aborted)
        server.engine.go_on.set()
        await until(lambda: not server.engine.engine.has_unfinished_requests())
        return caught.value

    assert serving(scenario).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_request_is_aborted_by_its_id(serving):
    async def scenario(server):
        server.engine.go_on = Gate(1)
        params = pb.SamplingParams(max_tokens=40, temperature=0)
        call = server.stub.Generate(pb.GenerateRequest(text="ab", request_id="mine", sampling_params=params))
        rest = aiter(call)
        await anext(rest)
        assert (await server.stub.Abort(pb.AbortRequest(request_ids=["other"]))).num_aborted == 0
        assert (await server.stub.Abort(pb.AbortRequest(request_ids=["mine"]))).num_aborted == 1
        last = await everything(rest)
        server.engine.go_on.set()
        return last

    assert serving(scenario)[-1].sequences[0].finish_reason == "abort"


def test_an_interval_makes_fewer_responses_of_the_same_tokens(serving):
    async def scenario(server):
        answers = []
        for interval in (1, 4):
            params = pb.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, stream_interval=interval)
            request = pb.GenerateRequest(text="ab", sampling_params=params)
            answers.append(await everything(server.stub.Generate(request)))
        return answers

    each, fewer = serving(scenario)
    assert ids_of(fewer) == ids_of(each)
    assert text_of(fewer) == text_of(each)
    assert [len(sequence.token_ids) for response in fewer for sequence in response.sequences] == [1, 4, 4]


def test_markers_of_thinking_in_a_question_are_the_users_words(serving):
    shape = pb.StructuredOutputs(json='{"enum": ["a", "b"]}')

    async def scenario(server):
        message = pb.ChatMessage(role="user", content="What does <think> mean?")
        params = pb.SamplingParams(temperature=0, max_tokens=20, structured_outputs=shape)
        request = pb.GenerateRequest(chat=pb.Chat(messages=[message]), sampling_params=params)
        return await everything(server.stub.Generate(request))

    responses = serving(scenario, options={"reasoning_parser": "qwen3"}, **saying('"c"'))
    assert text_of(responses) in ('"a"', '"b"')
    assert not any(each.reasoning for response in responses for each in response.sequences)

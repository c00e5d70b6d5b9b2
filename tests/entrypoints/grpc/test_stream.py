"""`GenerateStream`: many requests on one stream."""

import asyncio
import contextlib

import grpc
import pytest

from jaxpaged.engine.core_calls import KeepLease
from jaxpaged.entrypoints.grpc import multiplexer
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import ServingError
from tests.engine.test_kv_transfer import CONSUMES
from tests.entrypoints.grpc.conftest import Gate


def wanted(request_id, text="ab", **params):
    params = {"max_tokens": 5, "temperature": 0, **params}
    request = pb.GenerateRequest(request_id=request_id, text=text, sampling_params=pb.SamplingParams(**params))
    return pb.GenerateStreamRequest(generate=request)


async def talk(server, messages):
    """All events that come back when the client says this and closes its side."""
    return [event async for event in reading(server.stub.GenerateStream(iter(messages)))]


async def reading(call):
    """The events of a call."""
    while (message := await call.read()) is not grpc.aio.EOF:
        assert message.events
        for event in message.events:
            yield event


def ids_of(events, request_id):
    own = [each.response for each in events if each.request_id == request_id and each.HasField("response")]
    return [token for response in own for sequence in response.sequences for token in sequence.token_ids]


def test_requests_are_answered_interleaved_and_each_as_alone(serving):
    async def scenario(server):
        server.engine.go_on = Gate(0)
        together = asyncio.ensure_future(talk(server, [wanted("a"), wanted("b", "xyz"), wanted("c", max_tokens=9)]))
        while len(server.engine.seen) < 3:
            await asyncio.sleep(0)
        server.engine.go_on.set()
        together = await together
        alone = [await talk(server, [wanted("a")]), await talk(server, [wanted("b", "xyz")])]
        return together, alone

    together, alone = serving(scenario)
    assert ids_of(together, "a") == ids_of(alone[0], "a")
    assert ids_of(together, "b") == ids_of(alone[1], "b")
    assert len(ids_of(together, "c")) == 9
    order = [message.request_id for message in together]
    assert order != sorted(order), "one request came after the other"
    assert sorted(each.request_id for each in together if each.HasField("done")) == ["a", "b", "c"]


def test_an_error_ends_its_own_request_only_and_names_the_field(serving):
    messages = serving(lambda server: talk(server, [wanted("bad", temperature=-1), wanted("good")]))
    [error] = [message.error for message in messages if message.HasField("error")]
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert error.field == "sampling_params.temperature"
    assert len(ids_of(messages, "good")) == 5


BAD = {
    "no id": (wanted(""), "request_id"),
    "an id in use": (wanted("b", "other"), "request_id"),
    "no action": (pb.GenerateStreamRequest(), "generate"),
    "an abort of nothing": (pb.GenerateStreamRequest(abort="unknown"), None),
    "a request of nothing": (pb.GenerateStreamRequest(generate=pb.GenerateRequest()), "request_id"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_message_that_begins_nothing_ends_no_request(serving, kind):
    """Before, each of these ended the call, with all requests that ran on it. An error about an id in use has none,
    so that nobody takes it for the end of the request that has this id."""
    bad, field = BAD[kind]

    async def scenario(server):
        server.engine.executor.longest_run = 1
        return await talk(server, [wanted("a"), wanted("b", max_tokens=30), bad, bad, wanted("c")])

    events = serving(scenario)
    assert [len(ids_of(events, name)) for name in "abc"] == [5, 30, 5]
    assert sorted(each.request_id for each in events if each.HasField("done")) == ["a", "b", "c"]
    errors = [each for each in events if each.HasField("error")]
    assert [(each.request_id, each.error.field) for each in errors] == [("", field)] * (2 if field else 0)
    assert all(each.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0] for each in errors)


def test_bad_messages_alone_end_as_a_call_that_is_done(serving):
    """The client takes none of them before it has sent all: what is said of them is bounded, and they are not lost."""
    events = serving(lambda server: talk(server, [pb.GenerateStreamRequest()] * 300))
    assert len(events) == 300 and all(each.HasField("error") for each in events)


@pytest.mark.parametrize("ids", [[1 << 20], [-1], []])
def test_wrong_token_ids_are_named_so_on_a_stream_too(serving, ids):
    request = pb.GenerateRequest(request_id="a", token_ids=pb.TokenIds(ids=ids))
    [event] = serving(lambda server: talk(server, [pb.GenerateStreamRequest(generate=request)]))
    assert event.request_id == "a" and event.error.field == "token_ids", event


def test_a_request_that_does_not_begin_gives_back_what_is_lent_for_it(serving, monkeypatch):
    lent, heard = CONSUMES["kv_transfer_params"], []

    async def call(said):
        heard.append(said)

    def lending(request_id, **params):
        message = wanted(request_id, **params)
        message.generate.kv_transfer_params.update(lent)
        return message

    async def scenario(server):
        server.engine.call = call
        server.engine.engine.call = lambda said: heard.append(said)
        server.engine.go_on = Gate(0)
        stream = server.stub.GenerateStream()
        await stream.write(wanted("a"))
        for message in (lending("a"), lending(""), lending("b", temperature=-1)):
            heard.clear()
            await stream.write(message)
            await stream.read()
            while not heard:
                await asyncio.sleep(0)
            assert heard[-1] == KeepLease(lent, is_needed=False)
        server.engine.go_on.set()
        await stream.done_writing()
        assert [event async for event in reading(stream)]

    serving(scenario)


def test_an_id_may_be_used_again_when_its_request_is_done(serving):
    async def scenario(server):
        call = server.stub.GenerateStream()
        ids = []
        for _ in range(2):
            await call.write(wanted("again"))
            done = False
            while not done:
                for event in (await call.read()).events:
                    done = event.HasField("done")
                    ids += [token for each in event.response.sequences for token in each.token_ids]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return ids

    ids = serving(scenario)
    assert ids[:5] == ids[5:]


def test_one_request_is_aborted_and_the_others_go_on(serving):
    async def scenario(server):
        server.engine.go_on = Gate(1)
        call = server.stub.GenerateStream()
        await call.write(wanted("long", max_tokens=40))
        [first] = (await call.read()).events
        await call.write(wanted("other"))
        await call.write(pb.GenerateStreamRequest(abort="long"))
        await call.write(pb.GenerateStreamRequest(abort="nobody"))
        await call.done_writing()
        while not server.engine.aborted:
            await asyncio.sleep(0.01)
        server.engine.go_on.set()
        return [first, *[event async for event in reading(call)]]

    messages = serving(scenario)
    last = [each.response for each in messages if each.request_id == "long" and each.HasField("response")][-1]
    assert last.sequences[0].finish_reason == "abort"
    assert len(ids_of(messages, "other")) == 5


def test_too_many_at_a_time_are_told_to_wait(serving, monkeypatch):
    monkeypatch.setattr(multiplexer, "MAX_OPEN", 2)

    async def scenario(server):
        server.engine.go_on.clear()
        call = server.stub.GenerateStream()
        for name in "abc":
            await call.write(wanted(name))
        [refusal] = (await call.read()).events
        server.engine.go_on.set()
        await call.done_writing()
        rest = [message async for message in reading(call)]
        return refusal, rest

    refusal, rest = serving(scenario)
    assert refusal.request_id == "c"
    assert refusal.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert refusal.error.retry_after_seconds > 0
    assert {message.request_id for message in rest} == {"a", "b"}


def test_a_client_that_leaves_ends_all_its_requests(serving):
    async def scenario(server):
        server.engine.go_on = Gate(0)
        call = server.stub.GenerateStream()
        await call.write(wanted("a", max_tokens=40))
        await call.write(wanted("b", max_tokens=40))
        while len(server.engine.seen) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        while len(server.engine.aborted) < 2:
            await asyncio.sleep(0.01)
        server.engine.go_on.set()
        while server.engine.engine.has_unfinished_requests() or len(server.service.traffic):
            await asyncio.sleep(0.01)

    serving(scenario)


class Endless:
    """Three requests, or as many as `given` brings, of which each has a result whenever it is asked for one."""

    def __init__(self, length=None):
        self.num_made = 0
        self._length = length  # of the text of a response

    async def prepared(self, request, caller):
        return None, self

    async def results(self, generation, take):
        while True:
            self.num_made += 1
            yield 0, None
            await asyncio.sleep(0)

    def of(self, output):
        return pb.GenerateResponse(sequences=[pb.SequenceDelta(text="x" * (self._length or 1))]).SerializeToString()

    async def abort(self, generation):
        raise AssertionError


async def messages_of(engine, names, num_messages):
    """The first messages of a stream with these requests, when the client reads one and then does something else."""

    async def given():
        for name in names:
            yield wanted(name)
        await asyncio.Event().wait()

    messages = []
    async with contextlib.aclosing(multiplexer.Multiplexer(engine, "me").responses(given())) as responses:
        for _ in range(num_messages):
            messages.append(pb.GenerateStreamResponse.FromString(await anext(responses)))
            for _ in range(100):
                await asyncio.sleep(0)
    return messages


def test_a_slow_reader_gets_one_response_of_each_request_at_a_time():
    """The tasks wait when nobody reads: what is made meanwhile stays with the engine."""
    engine = Endless()
    messages = asyncio.run(messages_of(engine, "abc", 4))
    for message in messages[1:]:
        assert sorted(event.request_id for event in message.events) == ["a", "b", "c"]
    assert engine.num_made <= 3 * (len(messages) + 2)  # one waits in the next message, and one in its task


def test_no_message_is_longer_than_clients_take():
    messages = asyncio.run(messages_of(Endless(multiplexer.MAX_MESSAGE_BYTES // 2 - 100), "abcde", 8))
    assert max(message.ByteSize() for message in messages) <= multiplexer.MAX_MESSAGE_BYTES
    assert max(len(message.events) for message in messages) == 2


def test_requests_that_end_while_nobody_reads_are_bounded(monkeypatch):
    """Their last words wait, and count as under way until they are read: a client that asks and never reads is told
    to wait, and then its requests are not even looked at."""
    monkeypatch.setattr(multiplexer, "MAX_OPEN", 4)
    refused = []

    class Refusing(Endless):
        async def prepared(self, request, caller):
            refused.append(request.request_id)
            raise ServingError("no")

    async def run():
        async def given():
            for number in range(100):
                yield wanted(str(number))

        async with contextlib.aclosing(multiplexer.Multiplexer(Refusing(), "me").responses(given())) as responses:
            await anext(responses)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(refused) < 20
            messages = [pb.GenerateStreamResponse.FromString(message) async for message in responses]
            return sum(len(message.events) for message in messages)

    assert asyncio.run(run()) > 80

"""Calls without a key, without a request, without end, and HTTP/2 that no library sends: others are served on."""

import asyncio
import contextlib
import socket
import struct
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from jaxpaged.entrypoints.grpc import methods, multiplexer, open_calls
from jaxpaged.entrypoints.grpc import server as grpc_server
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import ErrorKind, ServingError
from tests.entrypoints.grpc.test_server import ASKED, code_of, everything

SERVICES = pb.DESCRIPTOR.services_by_name
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES.values() for method in service.methods]
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


async def silence():
    """Requests that never come."""
    await asyncio.Event().wait()
    yield b""


# ---- keys


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("x-api-key", "secre"),),
        (("x-api-key", ""),),
        (("authorization", "secret"),),
        (("authorization", "Bearer secret2"), ("x-api-key", "secret")),
    ],
)
def test_every_method_refuses_who_has_no_key_before_it_reads_anything(serving, metadata):
    """Before, a call that did not send its request was held, whoever made it."""

    async def scenario(server):
        calls = [server.channel.stream_stream(path)(silence(), metadata=metadata, timeout=20) for path in METHODS]
        assert {await code_of(call) for call in calls} == {UNAUTHENTICATED}
        assert len(METHODS) == 17 and not server.engine.seen

    serving(scenario, keys=["secret"], admin_keys=["secret"])


def test_keys_are_compared_in_constant_time_with_all_that_there_are(serving, compared_keys):
    async def scenario(server):
        for key in ("first", "second", "third", "f", "a" * 5000):
            compared_keys.clear()
            with contextlib.suppress(grpc.RpcError):
                await server.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=(("x-api-key", key),))
            assert compared_keys == [(32, 32)] * 3, "digests, of one length whatever was given"

    serving(scenario, keys=["first", "second", "third"])


# ---- requests that do not come, and responses that are not taken


def test_a_request_that_does_not_come_holds_its_call_only_for_so_long(serving, monkeypatch):
    monkeypatch.setattr(methods, "MESSAGE_SECONDS", 0.05)

    async def scenario(server):
        late, none = [], []
        for name in ("Generate", "GetModelInfo"):
            path = f"/jaxpaged.v1.Inference/{name}"
            late.append(await code_of(server.channel.stream_stream(path)(silence())))
            none.append(await code_of(server.channel.stream_stream(path)(iter([]))))
        return late, none

    late, none = serving(scenario)
    assert set(late) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert set(none) == {grpc.StatusCode.INVALID_ARGUMENT}


def test_a_response_that_is_not_taken_ends_its_call(monkeypatch):
    monkeypatch.setattr(methods, "WRITE_SECONDS", 0.05)

    async def write_for_ever():
        async with methods.Writing() as writing:
            writing.number += 1
            await asyncio.Event().wait()

    async def take_a_while():
        async with methods.Writing() as writing:
            for _ in range(10):
                writing.number += 1
                await asyncio.sleep(0.02)
                writing.number += 1
            await asyncio.sleep(0.3)  # the engine has nothing to say
            return "whole"

    with pytest.raises(ServingError, match="No response was taken") as caught:
        asyncio.run(asyncio.wait_for(write_for_ever(), 20))
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert asyncio.run(take_a_while()) == "whole"


def test_a_stream_on_which_nothing_is_asked_is_ended(serving, monkeypatch):
    monkeypatch.setattr(multiplexer, "IDLE_SECONDS", 0.1)

    async def scenario(server):
        call = server.stub.GenerateStream()
        request = pb.GenerateRequest(request_id="a", text="ab", sampling_params=ASKED.sampling_params)
        server.engine.go_on.clear()
        await call.write(pb.GenerateStreamRequest(generate=request))
        await asyncio.sleep(0.5)  # it is waited for as long as it takes
        server.engine.go_on.set()
        while not any(event.HasField("done") for event in (await call.read()).events):
            pass
        return await code_of(read_on(call))

    assert serving(scenario) is grpc.StatusCode.DEADLINE_EXCEEDED


async def read_on(call):
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


def test_calls_without_a_key_are_so_many_at_a_time(serving, monkeypatch):
    monkeypatch.setattr(open_calls, "MAX_OPEN", 2)

    async def scenario(server):
        stub, status = health_pb2_grpc.HealthStub(server.channel), health_pb2.HealthCheckResponse
        watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for each in watching:
            assert (await each.read()).status == status.SERVING
        codes = [await code_of(stub.Watch(health_pb2.HealthCheckRequest())) for _ in range(2)]
        watching[0].cancel()
        while (answer := await (again := stub.Watch(health_pb2.HealthCheckRequest())).read()) is grpc.aio.EOF:
            await asyncio.sleep(0.01)
        assert answer.status == status.SERVING
        for each in (watching[1], again):
            each.cancel()
        return codes

    assert serving(scenario, keys=["secret"]) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


def test_reflection_is_not_open_for_ever(serving, monkeypatch):
    monkeypatch.setattr(open_calls, "REFLECTION_SECONDS", 0.05)

    async def scenario(server):
        return await code_of(reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo(silence()))

    assert serving(scenario) is grpc.StatusCode.DEADLINE_EXCEEDED


# ---- frames of HTTP/2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def field(name, value):
    """A header as HPACK has it at its simplest."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def call_of(path):
    names = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"a",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    return b"".join(field(name, value) for name, value in names.items())


def begun(path, stream=1, message=None):
    head = frame(HEADERS, END_HEADERS, stream, call_of(path))
    return (
        head
        if message is None
        else head + frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
    )


GENERATE, WATCH = b"/jaxpaged.v1.Inference/Generate", b"/grpc.health.v1.Health/Watch"
HELLO = PREFACE + frame(SETTINGS)
NO_WINDOW = PREFACE + frame(SETTINGS, payload=struct.pack(">HI", 4, 0))
COUNT = 500
LONG = field(b"a", b"b" * 90) * 90
FLOODS = {
    "pings": HELLO + frame(PING, payload=b"pingping") * COUNT,
    "settings": HELLO + frame(SETTINGS, payload=struct.pack(">HI", 3, 100)) * COUNT,
    "continuations": HELLO + frame(HEADERS, 0, 1, call_of(GENERATE)) + frame(CONTINUATION, 0, 1, b"") * COUNT,
    "long continuations": HELLO + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, LONG) * 9,
    "rapid reset": HELLO
    + b"".join(
        begun(GENERATE, 2 * i + 1, ASKED.SerializeToString()) + frame(RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08")
        for i in range(COUNT)
    ),
    "calls without requests": HELLO + b"".join(begun(GENERATE, 2 * i + 1) for i in range(COUNT)),
    "window updates": HELLO + frame(WINDOW_UPDATE, payload=struct.pack(">I", 1)) * COUNT,
    "a window too large": HELLO + frame(WINDOW_UPDATE, payload=struct.pack(">I", 2**31 - 1)) * 3,
    "a frame too long": HELLO + b"\xff\xff\xff\0\0\0\0\0\1",
    "data of no stream": HELLO + frame(DATA, 0, 99, b"a" * 1000) * 100,
    "a message that never ends": HELLO + begun(GENERATE) + frame(DATA, 0, 1, b"\0\x7f\xff\xff\xff" + b"a" * 9000),
    "watchers without a window": NO_WINDOW + b"".join(begun(WATCH, 2 * i + 1, b"") for i in range(50)),
    "generating without a window": NO_WINDOW + begun(GENERATE, 1, ASKED.SerializeToString()),
    "a key that is no text": HELLO + frame(HEADERS, END_HEADERS, 1, call_of(GENERATE) + field(b"x-api-key", b"\xff\0")),
    "half a preface": PREFACE[:9],
    "silence": b"",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_frames_that_no_library_sends_stop_nobody(serving, flood, capfd, monkeypatch):
    """Three connections at a time. The server also stops as it should while they are open."""
    monkeypatch.setattr(methods, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(grpc_server, "CLOSING_SECONDS", 0.3)

    async def scenario(server):
        made = [socket.create_connection(("127.0.0.1", server.listener.ports[0])) for _ in range(3)]
        for each in made:
            each.setblocking(False)

        async def send(one):
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(one, FLOODS[flood])

        sending = [asyncio.ensure_future(send(each)) for each in made]
        for _ in range(3):
            assert await everything(server.stub.Generate(ASKED, timeout=20))
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=20)).status
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        if "without a window" not in flood:
            for each in made:
                each.close()
        while server.engine.engine.has_unfinished_requests() or len(server.service.traffic):
            await asyncio.sleep(0.01)
        return made

    made = serving(scenario)
    for each in made:
        each.close()
    assert len(capfd.readouterr().err.splitlines()) <= 3


def test_hundreds_of_connections_that_say_nothing_lock_out_nobody(serving):
    async def scenario(server):
        # Both ends are this process's, and many a user's processes may have 1,024 files.
        made = [socket.create_connection(("127.0.0.1", server.listener.ports[0])) for _ in range(300)]
        assert await everything(server.stub.Generate(ASKED, timeout=20))
        for each in made:
            each.close()

    serving(scenario)


def test_calls_that_wait_for_the_event_loop_end_nobody_elses(serving, monkeypatch):
    """gRPC ends calls at random, also those of others, where more than 1,000 wait to be taken."""
    monkeypatch.setattr(grpc_server, "CLOSING_SECONDS", 0.3)

    async def scenario(server):
        made = [socket.create_connection(("127.0.0.1", server.listener.ports[0])) for _ in range(8)]
        for each in made:
            each.sendall(FLOODS["calls without requests"])
        time.sleep(0.5)  # as a busy machine stops the loop; gRPC's own threads read on
        answers = await asyncio.gather(*(everything(server.stub.Generate(ASKED, timeout=20)) for _ in range(8)))
        for each in made:
            each.close()
        while len(server.service.traffic):
            await asyncio.sleep(0.01)
        return answers

    assert all(serving(scenario))

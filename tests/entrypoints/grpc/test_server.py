"""The server around the methods: keys, health, reflection, TLS, Unix sockets, metrics, and the other methods."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess

import grpc
import prometheus_client.parser
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxpaged import __version__
from jaxpaged.entrypoints.grpc import open_calls
from jaxpaged.entrypoints.grpc import server as grpc_server
from jaxpaged.entrypoints.http import server as http_server
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.options import ServerOptions
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service

ASKED = pb.GenerateRequest(text="ab", sampling_params=pb.SamplingParams(max_tokens=3, temperature=0))


async def everything(call):
    return [message async for message in call]


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (everything(call) if hasattr(call, "__aiter__") else call)
    return caught.value.code()


# ---- keys


def test_a_key_is_needed_when_there_are_some(serving):
    async def scenario(server):
        # Of a stream that ends while it still sends grpcio's client may say INTERNAL; for those: test_hostile_calls.py.
        kinds, given = [server.stub.Generate, server.stub.GetModelInfo], [ASKED, pb.GetModelInfoRequest()]
        assert {await code_of(ask(each)) for ask, each in zip(kinds, given)} == {grpc.StatusCode.UNAUTHENTICATED}
        wrong = (("authorization", "Bearer other"),)
        assert await code_of(server.stub.Generate(ASKED, metadata=wrong)) is grpc.StatusCode.UNAUTHENTICATED
        for right in [(("authorization", "Bearer secret"),), (("x-api-key", "secret"),)]:
            assert await everything(server.stub.Generate(ASKED, metadata=right))

    serving(scenario, keys=["secret"])


def test_administration_has_keys_of_its_own(serving):
    async def scenario(server):
        request, bearer = pb.ResetPrefixCacheRequest(), lambda key: (("authorization", f"Bearer {key}"),)
        ordinary = server.admin.ResetPrefixCache(request, metadata=bearer("ordinary"))
        assert await code_of(ordinary) is grpc.StatusCode.UNAUTHENTICATED
        assert (await server.admin.ResetPrefixCache(request, metadata=bearer("operator"))).success
        slept = await server.admin.Sleep(pb.SleepRequest(level=1), metadata=bearer("operator"))
        assert (slept.sleeping, slept.level) == (True, 1)
        woken = await server.admin.WakeUp(pb.WakeUpRequest(), metadata=bearer("operator"))
        assert not woken.sleeping
        assert not woken.HasField("level")
        assert (await server.admin.StartProfile(pb.StartProfileRequest(), metadata=bearer("operator"))).profiling
        again = server.admin.StartProfile(pb.StartProfileRequest(), metadata=bearer("operator"))
        assert await code_of(again) is grpc.StatusCode.FAILED_PRECONDITION
        assert not (await server.admin.StopProfile(pb.StopProfileRequest(), metadata=bearer("operator"))).profiling
        bad = server.admin.Sleep(pb.SleepRequest(level=7), metadata=bearer("operator"))
        assert await code_of(bad) is grpc.StatusCode.INVALID_ARGUMENT

    serving(scenario, keys=["ordinary"], admin_keys=["operator"])


def test_without_admin_keys_nobody_administers(serving):
    async def scenario(server):
        assert await code_of(server.admin.AbortAll(pb.AbortAllRequest())) is grpc.StatusCode.PERMISSION_DENIED

    serving(scenario)


# ---- the other methods


def test_tokens_and_back(serving):
    async def scenario(server):
        tokens = await server.stub.Tokenize(pb.TokenizeRequest(text="hello", return_token_strs=True))
        text = await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
        longer = await server.stub.Tokenize(pb.TokenizeRequest(chat=chat))
        assert len(tokens.token_strs) == len(tokens.token_ids) < len(longer.token_ids)
        assert tokens.max_model_len == 64
        wrong = server.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1 << 20]))
        assert await code_of(wrong) is grpc.StatusCode.INVALID_ARGUMENT
        return text.text

    assert serving(scenario) == "<bos>hello"


def test_the_model_and_the_server_say_what_they_are(serving):
    async def scenario(server):
        model = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (list(model.names), model.max_model_len, model.task, model.chats) == (["fake"], 64, "generate", True)
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.version, info.not_ready, info.num_requests) == (__version__, "", 0)
        assert info.data_parallel_size == 1
        server.service.traffic.draining = True
        assert "shutting down" in (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).not_ready

    serving(scenario)


def test_a_model_that_generates_does_not_embed(serving):
    async def scenario(server):
        embed = server.stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
        score = server.stub.Score(pb.ScoreRequest(queries=["a"], documents=["b"]))
        return [await code_of(embed), await code_of(score)]

    assert serving(scenario) == [grpc.StatusCode.INVALID_ARGUMENT] * 2


# ---- health and reflection


def test_health_follows_readiness_of_every_service(serving, monkeypatch):
    monkeypatch.setattr(open_calls, "HEALTH_SECONDS", 0.02)

    async def scenario(server):
        stub = health_pb2_grpc.HealthStub(server.channel)
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="jaxpaged.v1.Inference"))
        status = health_pb2.HealthCheckResponse
        while (await watched.read()).status != status.SERVING:
            pass
        for name in ("", "jaxpaged.v1.Inference", "jaxpaged.v1.Admin"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status.SERVING
        assert await code_of(stub.Check(health_pb2.HealthCheckRequest(service="x"))) is grpc.StatusCode.NOT_FOUND
        server.service.traffic.draining = True
        assert (await watched.read()).status == status.NOT_SERVING
        watched.cancel()

    serving(scenario, keys=["health needs none"])


def test_reflection_describes_the_services(serving):
    async def scenario(server):
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxpaged.v1.Inference"),
        ]
        return [answer async for answer in stub.ServerReflectionInfo(iter(asked))]

    services, file = serving(scenario)
    names = {each.name for each in services.list_services_response.service}
    assert {"jaxpaged.v1.Inference", "jaxpaged.v1.Admin", "grpc.health.v1.Health"} <= names
    described = FileDescriptorProto.FromString(file.file_descriptor_response.file_descriptor_proto[0])
    assert "Generate" in {method.name for service in described.service for method in service.method}


# ---- where it listens


def test_a_unix_socket(serving, short_path):
    path = short_path / "jaxpaged.sock"

    async def scenario(server):
        assert path.stat().st_mode & 0o777 == 0o660
        return await everything(server.stub.Generate(ASKED))

    assert serving(scenario, address=f"unix:{path}")
    assert not path.exists()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and what it signed for the server at localhost and for a client."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for name in ("localhost", "client"):
        openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
            "-extfile",
            "names",
        )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tls_and_mutual_tls(serving, certificates):
    server_side = grpc_server.server_credentials(certificates["localhost.pem"], certificates["localhost.key"])
    both_sides = grpc_server.server_credentials(
        certificates["localhost.pem"], certificates["localhost.key"], certificates["ca.pem"], require_client=True
    )
    known = grpc.ssl_channel_credentials(certificates["ca.pem"])
    own = grpc.ssl_channel_credentials(certificates["ca.pem"], certificates["client.key"], certificates["client.pem"])

    async def answered(server):
        return await everything(server.stub.Generate(ASKED, timeout=10))

    async def refused(server):
        return await code_of(server.stub.Generate(ASKED, timeout=5))

    assert serving(answered, credentials=server_side, client_credentials=known)
    assert serving(answered, credentials=both_sides, client_credentials=own)
    for settings in [{"client_credentials": known}, {}]:
        code = serving(refused, credentials=both_sides, **settings)
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


# ---- what goes wrong


def test_calls_are_counted_by_method_and_status(serving):
    async def scenario(server):
        await everything(server.stub.Generate(ASKED))
        await code_of(server.stub.Generate(pb.GenerateRequest()))
        text = (await Client(create_app(server.service)).get("/metrics")).body.decode()
        return {
            (sample.labels["grpc_method"], sample.labels["grpc_code"]): sample.value
            for family in prometheus_client.parser.text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "grpc_server_handled_total"
        }

    assert serving(scenario) == {("Generate", "OK"): 1, ("Generate", "INVALID_ARGUMENT"): 1}


def test_garbage_on_the_port_hurts_nobody(serving):
    noise = random.Random(5)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    pieces = [
        noise.randbytes(2000),
        b"GET / HTTP/1.1\r\n\r\n",
        preface,
        preface + noise.randbytes(500),
        preface + b"\xff\xff\xff\x01\x04\0\0\0\x01",
        preface + b"\0\0\4\3\0\0\0\0\1\0\0\0\0" * 200,
    ]

    async def scenario(server):
        open_ones = []
        for piece in pieces:
            made = socket.create_connection(("127.0.0.1", server.listener.ports[0]))
            with contextlib.suppress(OSError):
                made.sendall(piece)
            open_ones.append(made)
        stub = server.channel.unary_unary("/jaxpaged.v1.Inference/Tokenize")
        assert await code_of(stub(os.urandom(100))) is grpc.StatusCode.INVALID_ARGUMENT
        assert await everything(server.stub.Generate(ASKED))
        for made in open_ones:
            made.close()
        unknown = server.channel.unary_unary("/jaxpaged.v1.Inference/Nothing")
        assert await code_of(unknown(b"")) is grpc.StatusCode.UNIMPLEMENTED

    serving(scenario)


def test_a_taken_address_is_refused_with_the_option_to_change(serving):
    from jaxpaged.errors import UsageError

    async def scenario(server):
        taken = f"127.0.0.1:{server.listener.ports[0]}"
        with pytest.raises(UsageError, match="--grpc-port"):
            await grpc_server.GrpcListener(server.service, [taken]).listen()

    serving(scenario)


async def reading(call):
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


def test_the_address_is_told_once_whoever_connects_is_not_refused():
    sockets = http_server.Sockets(ServerOptions(http=False, grpc_port=0))
    [address] = sockets.grpc_addresses
    host, _, port = address.partition(":")
    connected = []

    def on_listening():
        with socket.create_connection((host, int(port))):
            connected.append(port)
        signal.raise_signal(signal.SIGTERM)

    asyncio.run(asyncio.wait_for(http_server.serve(make_service(), sockets, on_listening=on_listening), 30))
    assert connected == [port]


def test_calls_under_way_end_with_the_server(serving):
    """The listener stops in bounded time although a client keeps its stream open."""

    async def scenario(server):
        call = server.stub.GenerateStream()
        await call.write(pb.GenerateStreamRequest(generate=pb.GenerateRequest(request_id="a", text="ab")))
        await call.read()
        server.listener.should_exit = True
        assert await asyncio.wait_for(code_of(reading(call)), 20) is grpc.StatusCode.UNAVAILABLE

    serving(scenario)

"""The generated code is that of `jaxpaged.proto`, and its guide says what is true."""

import hashlib
import json
import re
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

FOLDER = Path(__file__).parents[3] / "jaxpaged/proto"
GUIDE = (FOLDER.parent / "guides/grpc.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("stub", ["jaxpaged_pb2.py", "jaxpaged_pb2_grpc.py"])
def test_stubs_are_generated_from_the_interface_as_it_is(stub):
    digest = hashlib.sha256((FOLDER / "jaxpaged.proto").read_bytes()).hexdigest()
    first_lines = (FOLDER / stub).read_text(encoding="utf-8")[:400]
    assert digest in first_lines, "run scripts/generate_grpc_stubs"


def test_every_method_of_the_interface_is_in_the_guide():
    methods = re.findall(r"^  rpc (\w+)\(", (FOLDER / "jaxpaged.proto").read_text(encoding="utf-8"), re.MULTILINE)
    inference = methods[: methods.index("ResetPrefixCache")]
    missing = [method for method in inference if f"`{method}`" not in GUIDE]
    assert not missing, missing


def test_the_guides_commands_work_with_nothing_but_reflection(serving):
    """As grpcurl does it: the interface is asked of the server, and messages are made from JSON."""
    commands = re.findall(r"^grpcurl -plaintext -d '(.*?)' \\\n  \S+ (\S+)/(\S+)$", GUIDE, re.MULTILINE)
    assert len(commands) == 2

    async def scenario(server):
        pool = await described(server.channel, commands[0][1])
        answers = []
        for data, service, method in commands:
            found = pool.FindServiceByName(service).FindMethodByName(method)
            asked, given = map(message_factory.GetMessageClass, (found.input_type, found.output_type))
            call = server.channel.unary_stream(f"/{service}/{method}", asked.SerializeToString, given.FromString)(
                json_format.Parse(data, asked())
            )
            answers.append([json.loads(json_format.MessageToJson(each)) async for each in call])
        return answers

    for answer in serving(scenario):
        assert answer[-1]["sequences"][0]["finishReason"] in ("stop", "length")


async def described(channel, symbol):
    """A pool with the files that the server says belong to a symbol."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    pool = descriptor_pool.DescriptorPool()
    async for answer in stub.ServerReflectionInfo(iter([asked])):
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(each)
            for each in answer.file_descriptor_response.file_descriptor_proto
        ]
        for file in sorted(files, key=lambda file: len(file.dependency)):  # what is needed comes first
            pool.Add(file)
    return pool


def test_the_guides_python_runs(serving, capsys):
    [program] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)

    async def scenario(server):
        import asyncio

        source = program.replace("localhost:50051", f"127.0.0.1:{server.listener.ports[0]}")
        await asyncio.to_thread(exec, compile(source, "guide", "exec"), {})

    serving(scenario)
    assert capsys.readouterr().out.strip()


def test_the_generated_code_runs_with_what_is_installed():
    from jaxpaged.proto import jaxpaged_pb2_grpc

    assert [int(part) for part in jaxpaged_pb2_grpc.GRPC_GENERATED_VERSION.split(".")] <= [
        int(re.match(r"\d+", part)[0]) for part in grpc.__version__.split(".")
    ]

"""Adapters over gRPC: as the model of requests, and loaded and forgotten by the operator."""

import json

import grpc
import pytest

from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.engine.fake_adapters import FakeBook
from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor

KEY = {"metadata": (("x-api-key", "operator"),)}


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


async def answers(stub, model):
    request = pb.GenerateRequest(model=model, text="the cat", sampling_params=pb.SamplingParams(max_tokens=1))
    return [response async for response in stub.Generate(request)]


def test_an_adapter_is_loaded_named_and_forgotten(serving, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    path = str(tmp_path)

    async def scenario(server):
        load = pb.LoadLoraAdapterRequest(lora_name="sql", lora_path=path, base_model_name="parent")
        unload = pb.UnloadLoraAdapterRequest(lora_name="sql")
        loaded = await server.admin.LoadLoraAdapter(load, **KEY)
        refused = {"twice": await code_of(server.admin.LoadLoraAdapter(load, **KEY))}
        load.load_inplace = True
        await server.admin.LoadLoraAdapter(load, **KEY)
        await answers(server.stub, "sql")
        await answers(server.stub, "fake")
        await server.stub.Tokenize(pb.TokenizeRequest(model="sql", text="the cat"))
        info = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        await server.admin.UnloadLoraAdapter(unload, **KEY)
        refused["gone"] = await code_of(server.admin.UnloadLoraAdapter(unload, **KEY))
        refused["unknown"] = await code_of(answers(server.stub, "sql"))
        outside = pb.LoadLoraAdapterRequest(lora_name="sql", lora_path="/etc")
        refused["outside"] = await code_of(server.admin.LoadLoraAdapter(outside, **KEY))
        return loaded, info, refused, [lora and lora.lora_name for lora in server.engine.loras]

    options = {"allowed_lora_dirs": (path,)}
    loaded, info, refused, loras = serving(scenario, book=FakeBook(), options=options, admin_keys=("operator",))
    assert loaded.adapter == pb.LoraAdapter(name="sql", path=path, base_model_name="parent", rank=8)
    assert list(info.names) == ["fake"] and [each.name for each in info.lora_adapters] == ["sql"]
    assert "already been loaded" in refused["twice"][1] and loras == ["sql", None]
    assert {each: code for each, (code, _) in refused.items()} == {
        "twice": "INVALID_ARGUMENT",
        "gone": "NOT_FOUND",
        "unknown": "NOT_FOUND",
        "outside": "PERMISSION_DENIED",
    }


def test_vectors_and_scores_are_an_adapters_too(serving):
    async def scenario(server):
        assert await server.service.adapters.find("org/a")
        await server.stub.Embed(pb.EmbedRequest(model="org/a", inputs=[pb.Input(text="the cat")]))
        await server.stub.Score(pb.ScoreRequest(model="org/a", queries=["the cat"], documents=["sat"]))
        return {lora.lora_name for lora in server.engine.loras}

    engine = {"executor": FakePoolingExecutor(EMBEDS.width), "pooler": EMBEDS, "runner": "pooling"}
    assert serving(scenario, book=FakeBook(), options={"lora_resolver_repos": ("org/a",)}, **engine) == {"org/a"}


def test_a_server_without_folders_loads_nothing(serving):
    async def scenario(server):
        request = pb.LoadLoraAdapterRequest(lora_name="sql", lora_path="/a")
        return await code_of(server.admin.LoadLoraAdapter(request, **KEY))

    code, details = serving(scenario, book=FakeBook(), admin_keys=("operator",))
    assert code == "PERMISSION_DENIED" and "--allowed-lora-dirs" in details

"""Adapters over HTTP: as the model of every endpoint, among the models, and loaded and forgotten by the operator."""

import asyncio
import contextlib
import json
import os
import signal

import openai
import pytest

from jaxpaged.entrypoints.http import server
from jaxpaged.entrypoints.http.app import create_admin_app
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.messages import LoRARequest
from jaxpaged.serving.options import ServerOptions
from tests.engine.fake_adapters import FakeBook
from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor
from tests.entrypoints.http.live_server import live_server, make_service
from tests.entrypoints.http.test_hostile_bodies import BODIES

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GENERATING = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/invocations",
    "/v1/messages",
    "/v1/responses",
]
POOLING = ["/v1/embeddings", "/pooling", "/score", "/rerank"]
OF_TOKENS = ["/v1/messages/count_tokens", "/tokenize", "/detokenize"]


@pytest.fixture
def adapter(tmp_path):
    """`adapter(name, base)` makes the folder of one, of which the fake engine reads nothing."""

    def make(name, base="fake"):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return str(folder)

    return make


async def loaded(server, name="sql", path="/adapters/sql", base_model_name=None):
    """The adapter, which the operator's endpoint need not have loaded."""
    await server.service.adapters._read(LoRARequest(name, 7, path, base_model_name))


@pytest.mark.parametrize("path", [*GENERATING, *POOLING])
def test_every_endpoint_takes_an_adapter_as_its_model_and_the_model_itself(serving, path):
    engine = {"executor": FakePoolingExecutor(EMBEDS.width), "pooler": EMBEDS} if path in POOLING else {}

    async def scenario(server):
        await loaded(server)
        bodies = [{**BODIES[path], "model": "sql"}, {**BODIES[path], "model": "fake"}, BODIES[path]]
        answers = [await server.client.post(path, body) for body in bodies]
        assert [answer.status for answer in answers] == [200] * 3, answers[0].body
        unknown = await server.client.post(path, {**BODIES[path], "model": "other"})
        return [answer.json.get("model") for answer in answers], server.engine.loras, unknown

    models, loras, unknown = serving(scenario, book=FakeBook(), **engine)
    assert models[0] in ("sql", None) and models[1:] in (["fake", "fake"], [None, None])
    third = len(loras) // 3
    assert third and {lora.lora_name for lora in loras[:third]} == {"sql"} and set(loras[third:]) == {None}
    assert unknown.status == 404 and "'fake', 'sql'" in unknown.error["message"]


@pytest.mark.parametrize("path", OF_TOKENS)
def test_tokens_of_an_adapter_are_those_of_its_model(serving, path):
    async def scenario(server):
        await loaded(server)
        return [await server.client.post(path, {**BODIES[path], "model": model}) for model in ("sql", "fake", "other")]

    of_adapter, of_model, unknown = serving(scenario, book=FakeBook())
    assert of_adapter.status == 200 and of_adapter.body == of_model.body and unknown.status == 404


def test_beams_and_streams_have_the_adapter_too(serving):
    body = {"model": "sql", "prompt": "the cat", "max_tokens": 2}

    async def scenario(server):
        await loaded(server)
        for more in ({"use_beam_search": True, "n": 2, "temperature": 0}, {"stream": True}):
            answer = await server.client.post("/v1/completions", {**body, **more})
            assert answer.status == 200, answer.body
        return server.engine.loras

    assert {lora.lora_int_id for lora in serving(scenario, book=FakeBook())} == {7}


def test_models_have_a_card_for_each_adapter(serving):
    async def scenario(server):
        await loaded(server)
        await loaded(server, "org/b", "/adapters/b", "parent")
        paths = ("/v1/models", "/v1/models/sql", "/v1/models/org/b", "/v1/models/fake", "/v1/models/other")
        return [await server.client.get(path) for path in paths]

    listed, sql, b, fake, other = serving(scenario, book=FakeBook())
    cards = {card["id"]: card for card in listed.json["data"]}
    assert list(cards) == ["fake", "sql", "org/b"] and [sql.json, b.json, fake.json] == [*cards.values()][1:] + [
        cards["fake"]
    ]
    assert [(card["root"], card["parent"]) for card in cards.values()] == [
        ("fake", None),
        ("/adapters/sql", "fake"),
        ("/adapters/b", "parent"),
    ]
    assert other.status == 404


# ---- vLLM's endpoints


def test_an_adapter_is_loaded_replaced_and_forgotten(serving, adapter, tmp_path):
    """Bodies, statuses and texts are vLLM's."""
    path = adapter("sql")

    async def scenario(server):
        async def post(where, **body):
            answer = await server.admin.post(where, body)
            return answer.status, answer.body.decode() if answer.status == 200 else answer.error

        said = [
            await post(LOAD, lora_name="sql", lora_path=path),
            await post(LOAD, lora_name="sql", lora_path=path),
            await post(LOAD, lora_name="sql", lora_path=path, load_inplace=True, is_3d_lora_weight=False),
            (await server.client.post("/v1/completions", {"model": "sql", "prompt": "a", "max_tokens": 1})).status,
            await post(UNLOAD, lora_name="sql", lora_int_id=None),
            await post(UNLOAD, lora_name="sql"),
            (await server.client.post("/v1/completions", {"model": "sql", "prompt": "a"})).status,
            await post(LOAD, lora_name="", lora_path=path),
            await post(LOAD, lora_name="sql"),
            await post(UNLOAD),
            await post(LOAD, lora_name="notfound", lora_path=path + "/nothing"),
        ]
        return said, [(await server.client.post(where, {})).status for where in (LOAD, UNLOAD)]

    said, of_public = serving(scenario, book=FakeBook(), options={"allowed_lora_dirs": (str(tmp_path),)})
    added = (200, "Success: LoRA adapter 'sql' added successfully.")
    again = "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set "
    assert said[0] == said[2] == added and said[3] == 200
    assert said[1][0] == 400 and said[1][1]["message"] == again + "'load_inplace' to True."
    assert said[1][1]["type"] == "InvalidUserInput" and said[1][1]["code"] == 400
    assert said[4] == (200, "Success: LoRA adapter 'sql' removed successfully.") and said[6] == 404
    assert said[5][0] == 404 and said[5][1]["type"] == "NotFoundError"
    assert said[5][1]["message"] == "The lora adapter 'sql' cannot be found."
    for status, error in said[7:9]:
        assert status == 400 and error["message"] == "Both 'lora_name' and 'lora_path' must be provided."
    assert said[9][1]["message"] == "'lora_name' needs to be provided to unload a LoRA adapter."
    assert said[10][0] == 404 and "No adapter found for" in said[10][1]["message"]
    assert of_public == [404, 404], "clients are not the operator"


@pytest.mark.parametrize(("book", "options"), [(None, {}), (FakeBook(), {}), (FakeBook(), {"lora_modules": ("a=/a",)})])
def test_without_folders_no_adapter_is_loaded_while_the_server_runs(serving, book, options):
    async def scenario(server):
        return [
            (await server.admin.post(path, {"lora_name": "a", "lora_path": "/a"})).status for path in (LOAD, UNLOAD)
        ]

    assert serving(scenario, book=book, options=options) == [404, 404]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"lora_name": 5, "lora_path": "/a"}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": ["/a"]}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/a", "load_inplace": "yes"}, 400, "load_inplace"),
        ({"lora_name": "a", "lora_path": "/a", "lora_weights": "AAAA"}, 400, "lora_weights"),
        ({"lora_name": "fake", "lora_path": "/a"}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": "/etc"}, 403, "lora_path"),
        ({"lora_name": "a", "lora_path": "../../etc"}, 403, "lora_path"),
        (b"[", 400, None),
    ],
)
def test_bodies_that_ask_for_what_may_not_be(serving, tmp_path, body, status, field):
    async def scenario(server):
        return await server.admin.post(LOAD, body)

    answer = serving(scenario, book=FakeBook(), options={"allowed_lora_dirs": (str(tmp_path),)})
    assert answer.status == status and answer.error["param"] == field, answer.body


def test_the_operators_endpoints_need_the_keys(serving, adapter, tmp_path):
    body = {"lora_name": "a", "lora_path": adapter("a")}

    async def scenario(server):
        without = await server.admin.post(LOAD, body)
        return without.status, (await server.admin.post(LOAD, body, authorization="Bearer k")).status

    options = {"allowed_lora_dirs": (str(tmp_path),)}
    assert serving(scenario, book=FakeBook(), options=options, keys=("k",)) == (401, 200)


def test_a_request_may_name_an_adapter_that_a_folder_has(serving, adapter, tmp_path):
    adapter("sql"), adapter("other", base="org/other"), adapter("broken")
    book = FakeBook(bad={str(tmp_path / "adapters" / "broken")})

    async def scenario(server):
        bodies = [
            {"model": name, "prompt": "a", "max_tokens": 1} for name in ("sql", "other", "broken", "../adapters/x")
        ]
        answers = await asyncio.gather(*(server.client.post("/v1/completions", body) for body in bodies * 3))
        listed = (await server.client.get("/v1/models")).json["data"]
        return answers, [card["id"] for card in listed]

    answers, names = serving(scenario, book=book, options={"lora_resolver_dir": str(tmp_path / "adapters")})
    assert [answer.status for answer in answers] == [200, 404, 400, 404] * 3
    assert names == ["fake", "sql"] and len(book.read) == 2
    assert str(tmp_path) not in answers[2].error["message"], "clients do not learn where files are"


def test_openais_client_sees_vllms_answers(adapter, tmp_path):
    """vLLM's own tests of the two endpoints ask so."""
    path = adapter("sql")
    settings = {"book": FakeBook(), "options": {"allowed_lora_dirs": (str(tmp_path),)}}
    with live_server(app=create_admin_app, **settings) as (url, service):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def post(path, **body):
            return client.post(path, cast_to=str, body=body)

        assert "success" in post("load_lora_adapter", lora_name="sql", lora_path=path).lower()
        with pytest.raises(openai.BadRequestError, match="already been loaded"):
            post("load_lora_adapter", lora_name="sql", lora_path=path)
        with pytest.raises(openai.NotFoundError):
            post("load_lora_adapter", lora_name="notfound", lora_path=f"{path}/not/an/adapter")
        with pytest.raises(openai.NotFoundError):
            post("unload_lora_adapter", lora_name="notfound")
        service.engine.book.bad.add(path)
        with pytest.raises(openai.BadRequestError, match="cannot be loaded"):
            post("load_lora_adapter", lora_name="bad", lora_path=path)
        assert "success" in post("unload_lora_adapter", lora_name="sql").lower()


@pytest.mark.parametrize("bad", [False, True])
def test_a_server_without_the_adapters_of_its_start_is_none(bad):
    """It serves until it is told to stop, unless one of them cannot be read."""
    book = FakeBook(bad={"/b"} if bad else set())
    options = {"port": 0, "lora_modules": ("a=/a", {"name": "b", "path": "/b"}), "shutdown_timeout": 1}

    async def run(sockets):
        service = make_service(options, book=book)
        serving = asyncio.ensure_future(server.serve(service, sockets))
        while len(book.read) < 2:
            await asyncio.sleep(0.01)
        if not bad:
            await asyncio.sleep(0.05)
            assert not serving.done() and service.obstacle() is None
            os.kill(os.getpid(), signal.SIGTERM)
        await serving

    with contextlib.closing(server.Sockets(ServerOptions.from_options(options))) as sockets:
        if bad:
            with pytest.raises(CheckpointError, match="/b has no adapter"):
                asyncio.run(run(sockets))
        else:
            asyncio.run(run(sockets))
    assert [each.lora_name for each in book.read] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "book", "problem"),
    [
        ({"lora_modules": ("a=/a",)}, None, "lora_modules is given, but the engine takes no adapters"),
        ({"allowed_lora_dirs": ("/a",)}, None, "allowed_lora_dirs is given"),
        ({"lora_resolver_dir": "/a"}, None, "lora_resolver_dir is given"),
        ({"lora_resolver_repos": ("a/b",)}, None, "lora_resolver_repos is given"),
        ({"lora_modules": ("fake=/a",)}, FakeBook(), "the name 'fake', which the model has"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_the_start(options, book, problem):
    with pytest.raises(ConfigError, match=problem):
        make_service(options, book=book)

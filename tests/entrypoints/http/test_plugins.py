"""Parsers and endpoints of plugins on the server: what they do, and that one that raises or hangs stops no others."""

import asyncio
import dataclasses
import threading
import time

import pytest

from jaxpaged.config.lora import LoRAConfig
from jaxpaged.config.plugin_options import PluginConfig
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.errors import ConfigError, EngineError
from jaxpaged.parsing import watched
from jaxpaged.parsing.parser import Formats, make_parser, parse
from jaxpaged.plugins.loading import load_plugins
from jaxpaged.serving.formats import formats_of
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.service import Service, served_model
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.async_engine import FakeAsyncEngine

PLUGIN = """
import threading
import time

import msgspec
from starlette.responses import JSONResponse

from jaxpaged import LoRARequest, Plugin
from jaxpaged.entrypoints.http.endpoint import Endpoint
from jaxpaged.parsing.reasoning import ReasoningFormat
from jaxpaged.parsing.source import Markers

HANGS = threading.Event()


def shouted(source, out):
    \"\"\"!name{arguments}!\"\"\"
    while (yield from source.until(Markers("!"), out.content)) is not None:
        name, _ = yield from source.text_until(Markers("{"))
        out.begin_call(name)
        arguments, _ = yield from source.text_until(Markers("!"))
        out.arguments("{" + arguments)
        out.end_call()


def raising(source, out):
    raise KeyError("a bug")
    yield


def hanging(source, out):
    HANGS.wait(60)
    yield


class Resolver:
    def resolve_lora(self, base_model_name, lora_name):
        return LoRARequest(lora_name, 1, f"/adapters/{lora_name}") if lora_name == "mine" else None


class Words(msgspec.Struct):
    words: list[str]


def endpoints(engine):
    async def hello(request):
        \"\"\"Say hello.\"\"\"
        return JSONResponse({"words": [type(engine).__name__, request.query_params.get("name", "you")]})

    async def broken(request):
        \"\"\"Fail.\"\"\"
        raise KeyError("a bug")

    def slow(request):
        \"\"\"Block.\"\"\"
        HANGS.wait(60)
        return JSONResponse({})

    return [
        Endpoint("GET", "/mine/hello", hello, response=Words),
        Endpoint("GET", "/mine/broken", broken),
        Endpoint("GET", "/mine/slow", slow),
    ]


PLUGIN = Plugin(
    tool_parsers={"shouted": shouted, "raising": raising, "hanging": hanging},
    reasoning_parsers={"mused": ReasoningFormat("<muse>", "</muse>")},
    endpoints={"mine": endpoints},
    lora_resolvers={"mine": Resolver()},
)
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return str(path)


@pytest.fixture
def plugins(path):
    return load_plugins((path,), ())


def service_of(path, config=None, **options):
    engine = FakeAsyncEngine()
    config = dataclasses.replace(config or engine.config, plugins=PluginConfig((path,), ()))
    engine.config = config
    load = lambda: formats_of(load_plugins((path,), ()))
    return Service(engine, served_model(config, ("fake",)), ServerOptions.from_options(options, load))


# ---- parsers ---------------------------------------------------------------------------------------


def test_formats_of_plugins_read_answers_in_any_pieces(plugins):
    text = '<muse>Hm.</muse>Wait. !look{"at": 1}! done'
    options = {"formats": formats_of(plugins), "new_id": lambda: "id"}
    whole = parse(text, "shouted", "mused", **options)
    assert whole.reasoning == "Hm." and whole.content.split() == ["Wait.", "done"]
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [("look", '{"at": 1}')]
    parser = make_parser("shouted", "mused", **options)
    deltas = [delta for letter in text for delta in parser.push(letter)] + parser.finish()
    assert "".join(delta.content or "" for delta in deltas) == whole.content


def test_the_server_takes_their_names_and_no_others(path):
    service = service_of(path, tool_call_parser="shouted", reasoning_parser="mused")
    assert (service.formats.tool_parser, service.formats.reasoning_parser) == ("shouted", "mused")
    service.close()
    with pytest.raises(ConfigError, match="unknown tool parser 'shouter'. Did you mean 'shouted'"):
        service_of(path, tool_call_parser="shouter")


def test_a_parser_that_raises_costs_its_answer_only(plugins, caplog):
    formats = formats_of(plugins)
    for _ in range(2):
        with pytest.raises(EngineError, match="parser raising failed on this answer"):
            parse("x", "raising", formats=formats)
    assert any(record.exc_info for record in caplog.records)
    assert parse("!a{}!", "shouted", formats=formats).tool_calls


def test_a_parser_that_hangs_is_asked_once(plugins):
    watch = watched.Watch("hanging", seconds=0.05)
    formats = Formats(plugins.added("tool_parsers"), watches={"hanging": watch})
    began = time.monotonic()
    with pytest.raises(EngineError, match="parser hanging took more than 0.05 s"):
        parse("x", "hanging", formats=formats)
    with pytest.raises(EngineError, match="parser hanging has hung"):
        parse("x", "hanging", formats=formats)
    assert time.monotonic() - began < 30
    plugins.loaded[0].plugin.tool_parsers["hanging"].__globals__["HANGS"].set()


def test_resolvers_of_plugins_are_asked_for_adapters(path):
    engine = FakeAsyncEngine()
    lora = LoRAConfig(enable_lora=True)
    service = service_of(path, dataclasses.replace(engine.config, lora=lora), lora_resolver_repos=["org/other"])
    *_, resolver = service.adapters._resolvers
    found, missing = (asyncio.run(service.adapters._asked(resolver, name)) for name in ("mine", "theirs"))
    assert (found.lora_path, missing) == ("/adapters/mine", None)
    service.close()


# ---- endpoints -------------------------------------------------------------------------------------


def test_endpoints_answer_behind_the_servers_keys_and_stand_in_its_description(path, plugins):
    app = create_app(service_of(path), keys=["secret"])
    client = Client(app, {"authorization": "Bearer secret"})

    async def run():
        assert (await Client(app).get("/mine/hello")).status == 401
        answer = await client.get("/mine/hello?name=Ada")
        assert answer.json == {"words": ["FakeAsyncEngine", "Ada"]}
        described = (await client.get("/openapi.json")).json
        assert described["paths"]["/mine/hello"]["get"]["summary"] == "Say hello."

        slow = asyncio.ensure_future(client.get("/mine/slow"))
        broken = await client.get("/mine/broken")
        assert broken.status == 500 and "a bug" not in broken.body.decode()
        assert (await client.get("/health")).status == 200
        assert not slow.done()
        plugins.loaded[0].plugin.endpoints["mine"].__globals__["HANGS"].set()
        assert (await slow).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('no port')", "plugin mine cannot be used: OSError: no port"),
        ("return [3]", "gave 3; each must be a jaxpaged.entrypoints.http.endpoint.Endpoint"),
        ("return [Endpoint('GET', '/health', respond)]", "adds /health, which is taken"),
    ],
)
def test_endpoints_that_cannot_be_stop_the_start(code, words, tmp_path):
    path = tmp_path / "bad.py"
    lines = ["from jaxpaged import Plugin", "from jaxpaged.entrypoints.http.endpoint import Endpoint"]
    lines += ["async def respond(request):", "    'Respond.'", "def make(engine):", f"    {code}"]
    path.write_text("\n".join([*lines, "PLUGIN = Plugin(endpoints={'mine': make})"]), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        create_app(service_of(str(path)))
    assert threading.active_count() < 100

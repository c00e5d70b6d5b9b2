"""The adapters of a server by their names: loading, replacing, forgetting, and names that nobody knows."""

import asyncio
import json
import time

import pytest

from jaxpaged.errors import ConfigError, EngineDeadError
from jaxpaged.messages import LoRARequest
from jaxpaged.serving import adapters as served
from jaxpaged.serving.adapter_resolvers import FolderResolver, HubResolver, OwnThreads
from jaxpaged.serving.adapters import ServedAdapters
from jaxpaged.serving.errors import ErrorKind, ServingError
from jaxpaged.serving.lora_modules import LoraModule, lora_modules
from tests.engine.fake_adapters import AddLora, FakeBook, RemoveLora

BASE = "org/base"


class Engine:
    """Reads what `book` has, a moment after it was asked."""

    def __init__(self):
        self.book = FakeBook()
        self.is_dead = False

    async def add_lora(self, lora_request):
        await asyncio.sleep(0.001)
        if self.is_dead:
            raise EngineDeadError("it has stopped.")
        return self.book.call(AddLora(lora_request))

    async def remove_lora(self, lora_id):
        return self.book.call(RemoveLora(lora_id))


def adapter(folder, base=BASE, **fields):
    """The folder of an adapter of which only its description is looked at."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, **fields}))
    return folder


def with_adapters(scenario, **options):
    """What `await scenario(adapters, engine)` returns."""

    async def run():
        engine = Engine()
        return await asyncio.wait_for(scenario(ServedAdapters(engine, BASE, {"base"}, **options), engine), 20)

    return asyncio.run(run())


def refusal(*awaitable_of):
    """The ServingError that a call raises."""

    async def scenario(adapters, engine):
        with pytest.raises(ServingError) as caught:
            await awaitable_of[0](adapters)
        return caught.value

    return scenario


# ---- by the operator


def test_versions_of_a_name_have_numbers_of_their_own(tmp_path):
    path = str(adapter(tmp_path / "a"))

    async def scenario(adapters, engine):
        first = await adapters.load("a", path)
        with pytest.raises(ServingError, match="'a' has already been loaded. If you want to load"):
            await adapters.load("a", path)
        engine.book.contents[path] = "new"
        second = await adapters.load("a", path, in_place=True, base_model_name="parent")
        assert engine.book.removed == [first.lora_int_id]
        card = adapters.get("a")
        await adapters.unload("a")
        with pytest.raises(ServingError, match="The lora adapter 'a' cannot be found") as caught:
            await adapters.unload("a")
        third = await adapters.load("a", path)
        return first, second, card, caught.value.kind, third, await adapters.find("a")

    first, second, card, kind, third, found = with_adapters(scenario, folders=[str(tmp_path)])
    assert len({first.lora_int_id, second.lora_int_id, third.lora_int_id}) == 3 and first.digest != second.digest
    assert (card.info, card.base_model_name) == (second, "parent")
    assert kind is ErrorKind.NOT_FOUND and found is third


def test_a_version_that_cannot_be_read_leaves_the_one_before_it(tmp_path):
    path = str(adapter(tmp_path / "a"))

    async def scenario(adapters, engine):
        first = await adapters.load("a", path)
        engine.book.bad.add(path)
        with pytest.raises(ServingError, match="cannot be loaded: <path> has no adapter") as caught:
            await adapters.load("a", path, in_place=True)
        assert caught.value.kind is ErrorKind.INVALID and engine.book.removed == []
        engine.is_dead = True
        with pytest.raises(EngineDeadError):
            await adapters.load("b", path)
        return await adapters.find("a") is first

    assert with_adapters(scenario, folders=[str(tmp_path)])


def test_the_same_name_twice_at_once_is_one_reading(tmp_path):
    path = str(adapter(tmp_path / "a"))

    async def scenario(adapters, engine):
        results = await asyncio.gather(*(adapters.load("a", path) for _ in range(5)), return_exceptions=True)
        return len(engine.book.read), sorted(type(each).__name__ for each in results)

    assert with_adapters(scenario, folders=[str(tmp_path)]) == (1, ["LoRAInfo"] + ["ServingError"] * 4)


@pytest.mark.parametrize(
    ("name", "where", "kind", "problem"),
    [
        ("", "in/a", ErrorKind.INVALID, "Both 'lora_name' and 'lora_path' must be provided"),
        ("a", "", ErrorKind.INVALID, "Both 'lora_name'"),
        ("base", "in/a", ErrorKind.INVALID, "the name of the model itself"),
        ("a\tb", "in/a", ErrorKind.INVALID, "visible letters"),
        ("a" * 300, "in/a", ErrorKind.INVALID, "1 to 256 letters"),
        ("a", "out", ErrorKind.FORBIDDEN, "none of the folders of --allowed-lora-dirs"),
        ("a", "in/../out", ErrorKind.FORBIDDEN, "none of the folders"),
        ("a", "in/link", ErrorKind.FORBIDDEN, "none of the folders"),
        ("a", "in/nothing", ErrorKind.NOT_FOUND, "No adapter found for"),
        ("a", "in/\0", ErrorKind.FORBIDDEN, "none of the folders"),
        ("a", "org/adapter", ErrorKind.FORBIDDEN, "none of the folders"),
    ],
)
def test_what_may_not_be_loaded(tmp_path, name, where, kind, problem):
    adapter(tmp_path / "in" / "a")
    adapter(tmp_path / "out")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    path = where if where.startswith("org") else where and f"{tmp_path}/{where}"
    error = with_adapters(refusal(lambda adapters: adapters.load(name, path)), folders=[str(tmp_path / "in")])
    assert error.kind is kind and problem in str(error)


def test_a_link_to_the_allowed_folder_and_an_id_that_is_listed_are_taken(tmp_path):
    adapter(tmp_path / "in" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "in")

    async def scenario(adapters, engine):
        infos = [await adapters.load("a", str(tmp_path / "link" / "a")), await adapters.load("b", "org/b")]
        return [info.lora_path for info in infos]

    paths = with_adapters(scenario, folders=[str(tmp_path / "link")], repos=["org/b"])
    assert paths == [str(tmp_path / "in" / "a"), "org/b"]


# ---- at the start


def test_requests_for_adapters_of_the_start_wait_for_them():
    modules = lora_modules(["a=/a", {"name": "b", "path": "/b", "base_model_name": "parent"}])

    async def scenario(adapters, engine):
        loading = asyncio.ensure_future(adapters.load_at_start())
        await asyncio.sleep(0)
        assert adapters.obstacle() == "2 adapters are still being loaded: a, b."
        found = await adapters.find("b")
        await loading
        await asyncio.sleep(0)
        return found, adapters.obstacle(), [(each.info.lora_name, each.base_model_name) for each in adapters]

    found, obstacle, names = with_adapters(scenario, modules=modules)
    assert found.lora_path == "/b" and obstacle is None and names == [("a", None), ("b", "parent")]


def test_one_that_cannot_be_read_is_told_to_who_starts_the_server_and_to_who_waits():
    async def scenario(adapters, engine):
        engine.book.bad.add("/a")
        results = await asyncio.gather(adapters.load_at_start(), adapters.find("b"), return_exceptions=True)
        return [str(each) for each in results]

    of_start, of_request = with_adapters(scenario, modules=[LoraModule("a", "/a"), LoraModule("b", "/b")])
    assert of_start.startswith("/a has no adapter") and of_request != ""


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["a"], "has 'a'; give NAME=PATH"),
        ([5], "has 5; give"),
        (["=/a"], "an adapter without name"),
        (["a="], "an adapter without path"),
        ([{"name": "a"}], "an adapter without path"),
        ([{"name": "a", "path": 5}], "its values must be texts"),
        ([{"name": "a", "path": "/a", "pth": "/b"}], "an adapter with 'pth'; there are name, path, base_model_name"),
        (["a=/a", "b=/b", "a=/c"], "the name 'a' 2 times"),
        (["a\n=/a"], "visible letters"),
    ],
)
def test_modules_that_cannot_be_are_refused_at_the_start(given, problem):
    with pytest.raises(ConfigError, match=f"lora_modules has .*{problem}|lora_modules {problem}"):
        lora_modules(given)


# ---- by a request that names one


def test_a_folder_has_the_adapters_of_the_model_and_no_others(tmp_path):
    for name, base in [("a", BASE), ("served", "base"), ("foreign", "org/other")]:
        adapter(tmp_path / "dir" / name, base)
    adapter(tmp_path / "outside")
    (tmp_path / "dir" / "link").symlink_to(tmp_path / "outside")
    for name, text in [("broken", "{"), ("list", "[]"), ("none", "{}"), ("deep", "[" * 100_000)]:
        adapter(tmp_path / "dir" / name)
        (tmp_path / "dir" / name / "adapter_config.json").write_text(text)
    names = "a served foreign link broken list none deep ../outside . / /etc a/../a dir missing".split()

    async def scenario(adapters, engine):
        return {name: await adapters.find(name) for name in [*names, str(tmp_path / "dir" / "a"), "a" * 300, "a\0"]}

    found = with_adapters(scenario, resolvers=[FolderResolver(str(tmp_path / "dir"), ["base"])])
    paths = {name: info.lora_path.removeprefix(str(tmp_path)) for name, info in found.items() if info is not None}
    whole = str(tmp_path / "dir" / "a")
    assert paths == {"a": "/dir/a", "served": "/dir/served", "a/../a": "/dir/a", whole: "/dir/a"}


class Resolver:
    """Knows /NAME, and does what some names ask; `asked` counts."""

    def __init__(self):
        self.asked = []

    async def resolve_lora(self, base_model_name, lora_name):
        assert base_model_name == BASE
        self.asked.append(lora_name)
        if lora_name.startswith("none"):
            return None
        if lora_name == "raise":
            raise SystemExit("a plugin that ends processes")
        if lora_name == "hang":
            await asyncio.sleep(60)
        if lora_name == "block":
            time.sleep(0.5)  # as one that was not written for an event loop
        return 5 if lora_name == "nonsense" else LoRARequest("another name", 3, f"/{lora_name}")


def test_many_that_ask_for_a_name_have_it_looked_for_once():
    resolver = Resolver()

    async def scenario(adapters, engine):
        found = await asyncio.gather(*(adapters.find("a") for _ in range(50)))
        missing = await asyncio.gather(*(adapters.find("none") for _ in range(50)))
        await adapters.find("a"), await adapters.find("none")
        return found, missing, engine.book.read

    found, missing, read = with_adapters(scenario, resolvers=[resolver])
    assert len({id(info) for info in found}) == 1 and set(missing) == {None}
    assert resolver.asked == ["a", "none"] and [each.lora_name for each in read] == ["a"]


def test_a_resolver_that_fails_or_hangs_harms_nobody_else(monkeypatch):
    monkeypatch.setattr(served, "RESOLVE_SECONDS", 0.1)
    resolver = Resolver()

    async def scenario(adapters, engine):
        engine.book.bad.add("/bad")
        names = ("raise", "hang", "block", "nonsense", "bad")
        asking = {name: asyncio.ensure_future(adapters.find(name)) for name in names}
        begin = time.monotonic()
        served = await adapters.find("good")
        seconds = time.monotonic() - begin
        errors = dict(zip(names, await asyncio.gather(*asking.values(), return_exceptions=True)))
        again = await asyncio.gather(adapters.find("raise"), return_exceptions=True)
        return served, seconds, errors, again[0]

    served_one, seconds, errors, again = with_adapters(scenario, resolvers=[resolver])
    assert served_one.lora_path == "/good" and seconds < 0.4
    kinds = {name: error.kind for name, error in errors.items()}
    assert kinds == {**dict.fromkeys(errors, ErrorKind.UNAVAILABLE), "bad": ErrorKind.INVALID}
    assert "resolver failed" in str(again) and resolver.asked.count("raise") == 1


def test_another_resolver_may_have_what_one_fails_to_find():
    class Failing:
        async def resolve_lora(self, base_model_name, lora_name):
            raise OSError("no network")

    async def scenario(adapters, engine):
        return (await adapters.find("org/x")).lora_path

    assert with_adapters(scenario, resolvers=[Failing(), HubResolver(["org/x"])]) == "org/x"


def test_floods_of_unknown_names_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(served, "MOST_REFUSED", 8)
    monkeypatch.setattr(served, "MOST_RESOLVING", 4)
    resolver = Resolver()

    async def scenario(adapters, engine):
        flood = await asyncio.gather(*(adapters.find(f"none{i}") for i in range(40)), return_exceptions=True)
        for i in range(20):
            await adapters.find(f"none of {i}")
        assert len(adapters._refused) == 8 and not adapters._finding
        return [error for error in flood if error is not None], await adapters.find("a")

    errors, found = with_adapters(scenario, resolvers=[resolver])
    assert found is not None and len(errors) == 36
    assert {error.kind for error in errors} == {ErrorKind.UNAVAILABLE} and errors[0].retry_after


def test_threads_that_never_end_are_bounded():
    async def scenario():
        threads = OwnThreads(2)

        async def hang():
            time.sleep(1)

        async def quick():
            return 5

        for _ in range(2):
            with pytest.raises(TimeoutError):
                await threads.run(hang, 0.01)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="2 others have not ended"):
            await threads.run(quick, 10)
        waited = time.monotonic() - begin
        while threads.is_full:
            await asyncio.sleep(0.01)
        return waited, await threads.run(quick, 10)

    waited, result = asyncio.run(scenario())
    assert waited < 0.5 and result == 5

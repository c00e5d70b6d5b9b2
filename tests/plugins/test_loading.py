"""Plugins are found, loaded and put together; what cannot be stops the start and is named."""

import importlib.metadata
import logging
import sys

import pytest

import jaxpaged
from jaxpaged import Plugin
from jaxpaged.config import EngineConfig
from jaxpaged.engine.process.core_launcher import with_registered
from jaxpaged.engine.process.gathering import given_here
from jaxpaged.errors import ConfigError
from jaxpaged.plugins import registered, sources
from jaxpaged.plugins.loading import Plugins, digests, load_plugins

GENERAL = sources.GENERAL


class Model:
    """As much of a model as this package looks at."""

    def __init__(self, *architectures):
        self.architectures = architectures


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a module into a folder that can be imported from; gives its path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(f"from jaxpaged import Plugin\n{text}\n", encoding="utf-8")
        names.append(name)
        return str(tmp_path / f"{name}.py")

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def install(monkeypatch):
    """Installs entry points: (group, name, value)."""

    def install(*entries):
        found = [importlib.metadata.EntryPoint(name, value, group) for group, name, value in entries]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda: found)
        monkeypatch.setattr(sources, "may_be_installed", lambda: bool(found))

    install()
    return install


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registered, "_REGISTERED", [])


MODEL = """
class Model:
    architectures = ("{0}",)
MODEL = Model()
"""


def test_a_file_has_a_plugin_or_a_model_and_is_run_once(written, install):
    path = written("mine", MODEL.format("MineForCausalLM"))
    plugins = load_plugins([path], None)
    assert list(plugins.added("models")) == ["MineForCausalLM"]
    assert load_plugins([path, path], None).added("models") == plugins.added("models")
    written("mine", MODEL.format("OtherForCausalLM"))
    assert list(load_plugins([path], None).added("models")) == ["OtherForCausalLM"]


def test_installed_general_plugins_load_unless_others_are_named(written, install):
    written("package", f"{MODEL.format('AForCausalLM')}\nPLUGIN = Plugin(models=[MODEL])\nmake = lambda: PLUGIN")
    written("other", MODEL.format("BForCausalLM"))
    install((GENERAL, "a", "package:make"), (GENERAL, "b", "other:MODEL"), ("console_scripts", "c", "nowhere:main"))
    assert set(load_plugins([], None).added("models")) == {"AForCausalLM", "BForCausalLM"}
    assert set(load_plugins([], ["b"]).added("models")) == {"BForCausalLM"}
    assert load_plugins([], []) == Plugins()
    # A front end is told the names that its core has found: they open no door that was not named.
    install((GENERAL, "b", "other:MODEL"), ("jaxpaged.endpoint_plugins", "b", "no.such.module:make"))
    names = sources.chosen_names(None)
    assert [each.group for each in sources.sources_of([], names)] == [GENERAL]
    assert [each.group for each in sources.sources_of([], ["b"])] == [GENERAL, "jaxpaged.endpoint_plugins"]
    with pytest.raises(ConfigError, match="plugins names 'bb', which no installed package has. Did you mean 'b'"):
        load_plugins([], ["bb"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('no torch')", "cannot be loaded: ImportError: no torch"),
        ("import sys; sys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("x = 1 +", "cannot be loaded: SyntaxError"),
        ("x = 1", "has no PLUGIN"),
        ("PLUGIN = 3", "3 is no plugin"),
        ("def PLUGIN(): pass", "returned None; it must return a jaxpaged.Plugin"),
        ("PLUGIN = Plugin(models=[3])", "has the model 3; it must be a jaxpaged.models.interface.Model"),
        ("PLUGIN = Plugin(models=3)", "has models 3; it must be a list"),
        ("PLUGIN = Plugin(tools={})", "unexpected keyword argument 'tools'"),
    ],
)
def test_one_that_fails_is_named_and_its_traceback_is_in_the_log(text, words, written, install, caplog):
    path, before = written("bad", text), set(sys.modules)
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        load_plugins([path], None)
    assert path in str(caught.value) and words in str(caught.value)
    assert any(record.exc_info and path in record.getMessage() for record in caplog.records)
    new = sys.modules.keys() - before
    assert not [name for name in new if name.startswith("jaxpaged_plugin_bad")] or "raise" not in text


def test_a_name_belongs_to_one_plugin(written, install):
    one, two = written("one", MODEL.format("SameForCausalLM")), written("two", MODEL.format("SameForCausalLM"))
    with pytest.raises(ConfigError, match=r"one.py and \S+two.py both add the model SameForCausalLM"):
        load_plugins([one, two], None)
    install((GENERAL, "a", "one:MODEL"), (GENERAL, "a", "two:MODEL"))
    with pytest.raises(ConfigError, match="two packages have the plugin a in jaxpaged.general_plugins"):
        load_plugins([], None)


def test_what_is_built_in_is_replaced_only_where_that_is_said(written, install):
    path = written("mine", MODEL.format("LlamaForCausalLM"))
    with pytest.raises(ConfigError, match=r'LlamaForCausalLM, which is built in.*replaces=\["LlamaForCausalLM"\]'):
        load_plugins([path], None).joined("models", {"LlamaForCausalLM": 1})
    path = written("meant", f"{MODEL.format('A')}\nPLUGIN = Plugin(models=[MODEL], replaces=['A'])")
    joined = load_plugins([path], None).joined("models", {"A": 1, "B": 2})
    assert joined["A"] is not 1 and joined["B"] == 2  # noqa: F632


def test_places_that_are_none(install, tmp_path):
    for place, words in (
        ("mine", "must be a Python file"),
        (str(tmp_path / "no.py"), "there is no plugin"),
        ("json:nothing", "cannot be loaded: AttributeError"),
        ("no_such_module:PLUGIN", "cannot be loaded: ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_plugins([place], None)


def test_hosts_and_bundles_know_a_plugin_by_all_of_its_code(tmp_path, monkeypatch, install):
    package = tmp_path / "mypackage"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "inner" / "helper.py").write_text("x = 1", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    install((GENERAL, "mine", "mypackage.model:PLUGIN"), ("jaxpaged.nothing", "n", "nowhere:X"))
    config = EngineConfig.from_options(plugins=["mine"])
    before = digests((), ("mine",))
    assert given_here(config)["plugin mine"] == before["mine"]
    (package / "inner" / "helper.py").write_text("x = 2", encoding="utf-8")
    assert digests((), ("mine",)) != before
    install((GENERAL, "mine", "gone.model:PLUGIN"))
    assert "there is no module 'gone'" in given_here(config)["code of plugins"]


def test_a_package_that_is_really_installed_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(each for each in sys.path if "packages" not in each)])
    assert sources.installed_sources() == []
    package = tmp_path / "mine-1.2.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.2\n", encoding="utf-8")
    (package / "entry_points.txt").write_text(f"[{GENERAL}]\nfirst = mine.plugin:PLUGIN\n", encoding="utf-8")
    assert sources.installed_sources() == [sources.Source("first", "mine.plugin:PLUGIN", GENERAL, "package mine 1.2")]


# ---- registered by a script ------------------------------------------------------------------------


def test_a_registered_model_is_known_here_and_its_place_is_told_to_others(written, install):
    written("shipped", MODEL.format("ShippedForCausalLM"))
    import shipped

    jaxpaged.register_model(shipped.MODEL)
    jaxpaged.register_model(shipped.MODEL)
    config = with_registered(EngineConfig.from_options(plugin=["shipped:MODEL"]))
    assert config.plugins.plugin == ("shipped:MODEL",)
    # A front end has both, its own and what the processes were told; they are one model.
    assert load_plugins(config.plugins.plugin, ()).added("models") == {"ShippedForCausalLM": shipped.MODEL}
    with pytest.raises(ConfigError, match="two models for ShippedForCausalLM"):
        jaxpaged.register_model(Model("ShippedForCausalLM"))


def test_a_model_of_the_program_itself_is_refused_where_other_processes_need_it():
    jaxpaged.register_model(Model("LonelyForCausalLM"))
    assert list(load_plugins((), ()).added("models")) == ["LonelyForCausalLM"]
    with pytest.raises(ConfigError, match="LonelyForCausalLM that no module has but the program itself"):
        with_registered(EngineConfig())


def test_what_is_no_model_is_not_registered():
    with pytest.raises(ConfigError, match="has the model 'Llama'"):
        jaxpaged.register_model("Llama")
    assert Plugin().added("models") == {} and registered.registered() == ()

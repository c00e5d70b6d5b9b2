"""A connector of one's own: the example as a tier, found by module and by entry point, and what it may do wrong."""

from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.connector_options import GROUP, check_stranger, load_class
from jaxpaged.kv_store.custom_store import CustomTier, open_store
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store import example_connector
from tests.kv_store.pages import SPACE, key_of, page_of
from tests.kv_store.test_remote import settled

MODULE = "tests.kv_store.example_connector"


def tier_over(file, **config):
    store = open_store("SQLite", example_connector.SQLite, {"file": str(file), **config}, SPACE)
    return closing(CustomTier("SQLite", store, SPACE))


def test_the_example_is_short_and_is_shared(tmp_path):
    assert len(Path(example_connector.__file__).read_text(encoding="utf-8").splitlines()) < 100
    with tier_over(tmp_path / "x", most_pages=3) as ours, tier_over(tmp_path / "x") as theirs:
        assert all(ours.put(*page_of(n)[:2]) for n in range(5))
        assert sum(state is Lookup.HIT for state in settled(theirs, *range(5))) == 3
        kept = [n for n in range(5) if theirs.lookup([key_of(n)]) == [Lookup.HIT]]
        assert bytes(theirs.get(key_of(kept[0]))) == page_of(kept[0])[2]
        ours.pages.put(ours.name_of(key_of(kept[1])), b"damaged")
        assert theirs.get(key_of(kept[1])) is None and theirs.usage()[0].counters.corrupt == 1


def test_it_is_found_by_its_entry_point(tmp_path, monkeypatch):
    entry = EntryPoint("Mine", f"{MODULE}:SQLite", GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == GROUP else [])
    check_stranger("Mine", None)
    assert load_class("Mine", None) is example_connector.SQLite
    with pytest.raises(ConfigError, match="MultiConnector, Mine;"):
        check_stranger("Yours", None)


def test_what_it_does_wrong_is_a_miss(caplog):
    class Failing:
        def __init__(self, config, namespace):
            pass

        def fail(self, *arguments):
            raise KeyError("anything")

        exist = get = put = delete = fail

        def close(self):
            pass

    with closing(CustomTier("Failing", Failing({}, SPACE), SPACE)) as tier:
        assert settled(tier, 1) == [Lookup.MISS] and tier.get(key_of(1)) is None and not tier.put(*page_of(1)[:2])
        assert tier.usage()[0].counters.errors
    assert "KeyError" in caplog.text


def test_what_cannot_be_opened_is_said(tmp_path):
    for name, module, config, words in (
        ("SQLite", MODULE, {}, "KeyError: 'file'"),
        ("SQLight", MODULE, {}, "AttributeError"),
        ("SQLite", "no.such.module", {}, "No module named"),
        ("PurePath", "pathlib", {}, "cannot be opened|has no method"),
        ("tests.kv_store.example_connector:SQLight", None, {}, "AttributeError"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_store(name, load_class(name, module), config, "x")

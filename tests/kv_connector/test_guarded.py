"""A stranger's connector does its work, and whatever it does wrong is a page that did not come."""

import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_connector import KVConnectorBase, Lookup, guarded
from jaxpaged.kv_connector.base import KVCacheLayout, KVFetch, KVGroupLayout
from jaxpaged.kv_connector.guarded import check_class, is_connector, open_connector
from jaxpaged.kv_connector.pages import Load, Page, PageChecker
from jaxpaged.kv_store.page import PageContent
from tests.kv_connector import safetensors_folder
from tests.kv_connector.safetensors_folder import SafetensorsFolder
from tests.kv_store.pages import SPACE, key_of

SHAPE = (2, 2, 4, 2, 8)
LAYOUT = KVCacheLayout(
    namespace=SPACE,
    model="m",
    page_tokens=4,
    groups=(KVGroupLayout("full_attention", (0, 1), 4, None, SHAPE, "bfloat16"),),
    pools=(),
)


def content(number):
    return PageContent(key_of(number), key_of(number + 1000).block_hash, (number, 7, 8, 9))


def page_of(number):
    values = np.random.default_rng(number).normal(size=SHAPE).astype(ml_dtypes.bfloat16)
    return Page(LAYOUT, content(number), [values], None)


class Loaded:
    """A load of pages by an engine: what came, once it has ended."""

    def __init__(self, connector, *numbers, metadata=None):
        self.arrays = {key_of(number): [np.zeros(SHAPE, ml_dtypes.bfloat16)] for number in numbers}
        self._ended = threading.Event()
        fetch = KVFetch(1, "r", [[content(number)] for number in numbers], [4 * (i + 1) for i in range(len(numbers))])
        self.load = Load(fetch, PageChecker(LAYOUT, None), lambda fetch: ((), self.arrays), lambda _: self._ended.set())
        connector.start_load_kv([self.load], metadata)

    @property
    def came(self):
        assert self._ended.wait(20), "the load never ends"
        for page, source in zip(self.load.pages, self.load.sources):
            wanted = page_of(page.token_ids[0]).values if source else np.zeros(SHAPE)
            assert (self.arrays[page.key][0] == wanted).all(), "wrong values were taken for right ones"
        return [bool(source) for source in self.load.sources]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    for name, seconds in (("CALL_SECONDS", 0.2), ("HOOK_SECONDS", 0.3), ("CLOSE_SECONDS", 0.2)):
        monkeypatch.setattr(guarded, name, seconds)
    monkeypatch.setattr("jaxpaged.kv_store.remote_store.CALL_SECONDS", 0.2)


@contextmanager
def opened(made, folder, **config):
    connector = open_connector(f"somewhere:{made.__name__}", made, {"folder": str(folder), **config})
    connector.pages._patience_s = 0.3
    connector.register_kv_caches(LAYOUT)
    try:
        yield connector
    finally:
        connector.shutdown()


def settled(connector, *numbers, seconds=10):
    keys, deadline = [key_of(number) for number in numbers], time.monotonic() + seconds
    while Lookup.PENDING in (states := connector.look_up(keys)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return states


def counters(connector):
    return connector.get_kv_connector_stats()[f"kv_offload_tier_{connector.name}"]


# ---- the example --------------------------------------------------------------------------------


def test_the_example_is_short_and_engines_share_its_folder(tmp_path):
    assert len(Path(safetensors_folder.__file__).read_text(encoding="utf-8").splitlines()) < 100
    with opened(SafetensorsFolder, tmp_path) as ours, opened(SafetensorsFolder, tmp_path) as theirs:
        assert settled(ours, 1, 2) == [Lookup.MISS] * 2 and not Loaded(ours, 1).came[0]
        assert ours.save_kv([page_of(1), page_of(2)]) == [True, True]
        assert settled(theirs, 1, 2, 3) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
        assert Loaded(theirs, 1, 2, 3).came == [True, True, False]
        assert ours.lacks([key_of(1), key_of(3)], set()) == [False, True]
        assert [event.key for event in theirs.take_events()] == [key_of(1), key_of(2)]
        ours.discard([key_of(1)])
        assert settled(ours, 1) == [Lookup.MISS]
        stats = theirs.get_kv_connector_stats()
        assert stats["kv_connector_SafetensorsFolder_pages_read"] == 2 and counters(theirs)["hits"] == 2
    files = list(tmp_path.rglob("*.safetensors"))
    from safetensors.numpy import load_file  # any framework can read a page

    assert all(load_file(path)["kv"].shape == SHAPE for path in files)


def test_damaged_and_swapped_files_are_never_used(tmp_path):
    with opened(SafetensorsFolder, tmp_path) as connector:
        connector.save_kv([page_of(number) for number in (1, 2, 3)])
        paths = [connector._connector.path(key_of(number)) for number in (1, 2, 3)]
        damaged = bytearray(paths[0].read_bytes())
        damaged[-3] ^= 1
        paths[0].write_bytes(damaged)
        paths[1].write_bytes(paths[2].read_bytes())
        assert Loaded(connector, 1, 2, 3).came == [False, False, True]
        assert settled(connector, 1, 2) == [Lookup.MISS] * 2 and counters(connector)["corrupt"] == 2
        assert connector.save_kv([page_of(1)]) == [True], "it is kept anew"
        assert Loaded(connector, 1).came == [True]
        paths[0].unlink()
        assert settled(connector, 1) == [Lookup.HIT], "that is remembered"
        assert Loaded(connector, 1).came == [False] and settled(connector, 1) == [Lookup.MISS]


# ---- faults -------------------------------------------------------------------------------------


def stuck(*args):
    """A thread that never comes back, as far as a test sees."""
    time.sleep(30)


class Forgetful(SafetensorsFolder):
    """The thread of a load dies."""

    def load(self, load):
        sys.exit()


class Breathless(SafetensorsFolder):
    start_load_kv = stuck


class Refusing(SafetensorsFolder):
    def start_load_kv(self, loads, metadata):
        raise OSError("no route")


class Leaving(SafetensorsFolder):
    def start_load_kv(self, loads, metadata):
        sys.exit("gone")


class Slow(SafetensorsFolder):
    def load(self, load):
        time.sleep(2)
        super().load(load)


class Lying(SafetensorsFolder):
    """It gives nonsense, and says that it was checked."""

    def load(self, load):
        for nonsense in (b"", b"nonsense", 3, None, np.zeros(5000, np.float32), [b"x", "y"]):
            self.num_read += load.give(load.missing[0].key, nonsense, "it", is_checked=True)
        load.finish()


class Changing(SafetensorsFolder):
    """It checks pages, and gives others under their names."""

    def load(self, load):
        for page in load.missing:
            content = bytearray(self.path(page.key).read_bytes())
            content[-1] ^= 255
            load.give(page.key, content, "it", is_checked=True)
        load.finish()
        load.finish()


@pytest.mark.parametrize("made", [Forgetful, Breathless, Refusing, Leaving, Slow, Lying, Changing])
def test_loads_end_and_nothing_wrong_is_used(made, tmp_path, caplog):
    with opened(SafetensorsFolder, tmp_path) as connector:
        connector.save_kv([page_of(1), page_of(2)])
    with opened(made, tmp_path) as connector:
        assert settled(connector, 1, 2) == [Lookup.HIT] * 2
        begin = time.monotonic()
        first = Loaded(connector, 1, 2)
        assert time.monotonic() - begin < 0.3, "the engine waits"
        assert first.came == [False, False]
        assert counters(connector)["corrupt" if made in (Lying, Changing) else "errors"]
        assert connector._connector.num_read == 0
        begin = time.monotonic()
        assert Loaded(connector, 1).came == [False] and time.monotonic() - begin < 5
    assert made.__name__ in caplog.text


@pytest.mark.parametrize("made", [Refusing, Leaving])
def test_a_load_that_cannot_begin_is_not_waited_for(made, tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "CALL_SECONDS", 600.0)
    with opened(made, tmp_path) as connector:
        assert Loaded(connector, 1).came == [False]


class Short(SafetensorsFolder):
    def look_up(self, keys):
        return [Lookup.HIT]


def test_an_answer_to_some_keys_is_none(tmp_path):
    with opened(Short, tmp_path) as connector:
        assert settled(connector, 1, 2) == [Lookup.MISS] * 2


class Broken(SafetensorsFolder):
    """Every call is of the kind that the configuration names."""

    def __init__(self, config):
        super().__init__(config)
        self.act = {"raises": self.fail, "hangs": stuck, "lies": lambda *args: 7}[config["kind"]]

    def fail(self, *args):
        raise KeyError("anything")

    def look_up(self, keys):
        return self.act()

    def save_kv(self, pages):
        return self.act()

    def discard(self, keys):
        return self.act()

    def on_new_request(self, request):
        return self.act()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.act() and "many"

    def request_finished(self, request, is_computed):
        return self.act()

    def build_connector_meta(self):
        return self.act() and object()

    def take_params(self):
        return self.act()

    def take_events(self):
        return self.act()

    def must_load(self, request):
        return self.act()

    def get_kv_connector_stats(self):
        return self.act()

    def shutdown(self):
        return self.act()


REQUEST = SimpleNamespace(
    request_id="r", token_ids=[1, 2], num_prompt_tokens=2, kv_transfer_params=None, num_matched_tokens=lambda look_up: 5
)


@pytest.mark.parametrize("kind", ["raises", "hangs", "lies"])
def test_every_method_may_fail(kind, tmp_path, caplog):
    begin = time.monotonic()
    with opened(Broken, tmp_path, kind=kind) as connector:
        assert settled(connector, 1) == [Lookup.MISS]
        assert connector.save_kv([page_of(1)]) == [False]
        connector.discard([key_of(1)])
        for call, default in (
            (lambda: connector.on_new_request(REQUEST), None),
            (lambda: connector.get_num_new_matched_tokens(REQUEST, 0), 0),
            (lambda: connector.request_finished(REQUEST, True), None),
            (connector.build_connector_meta, None),
            (connector.take_params, {}),
            (connector.take_events, []),
            (lambda: connector.must_load(REQUEST), False),
        ):
            connector._breaker._open_until = None  # as if it were tried again
            assert call() == default
        assert "kv_offload_tier_Broken" in connector.get_kv_connector_stats()
    assert time.monotonic() - begin < 15 and "left alone" in caplog.text


def test_a_connector_that_fails_is_left_alone(tmp_path):
    with opened(Broken, tmp_path, kind="hangs") as connector:
        connector.on_new_request(REQUEST)
        begin = time.monotonic()
        for _ in range(100):
            connector.on_new_request(REQUEST)
        assert time.monotonic() - begin < 0.2


# ---- the scheduler's side -------------------------------------------------------------------------


class Talking(SafetensorsFolder):
    """It counts requests, and tells its worker's side of them."""

    def __init__(self, config):
        super().__init__(config)
        self.requests, self.heard, self.finished = [], [], []

    def on_new_request(self, request):
        self.requests.append(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found = request.num_matched_tokens(self.look_up)
        return None if found is None else min(found - num_computed_tokens, 3)

    def build_connector_meta(self):
        return {"num_requests": len(self.requests)}

    def start_load_kv(self, loads, metadata):
        self.heard.append(metadata)
        super().start_load_kv(loads, metadata)

    def request_finished(self, request, is_computed):
        return {"tokens": list(request.token_ids), "is_computed": is_computed}


def test_what_it_says_about_requests_is_heard(tmp_path):
    with opened(Talking, tmp_path) as connector:
        connector.on_new_request(REQUEST)
        assert connector.get_num_new_matched_tokens(REQUEST, 1) == 3
        assert connector.request_finished(REQUEST, True) == {"tokens": [1, 2], "is_computed": True}
        assert Loaded(connector, 1, metadata=connector.build_connector_meta()).came == [False]
        assert connector._connector.heard == [{"num_requests": 1}]
        (view,) = connector._connector.requests
        assert view.request_id == "r"
        with pytest.raises(RuntimeError, match="only within the call"):
            len(view.token_ids)


def test_hooks_that_a_class_has_not_are_not_called(tmp_path):
    with opened(SafetensorsFolder, tmp_path) as connector:
        connector._hooks = None  # no thread is asked
        connector.on_new_request(REQUEST)
        assert connector.get_num_new_matched_tokens(REQUEST, 1) == 4 and connector.build_connector_meta() is None
        assert not connector._breaker.is_open
        connector._hooks = guarded.Threads(1, "x")


# ---- what cannot be opened --------------------------------------------------------------------------


class Without(KVConnectorBase):
    def look_up(self, keys):
        return []


class TooMuch(SafetensorsFolder):
    def where(self, keys):
        return []


class Choosy(SafetensorsFolder):
    def register_kv_caches(self, layout):
        raise ValueError("too many heads")


def test_what_is_wrong_with_a_class_is_said(tmp_path):
    for made, config, words in (
        (Without, {}, "does not define start_load_kv, save_kv, discard. A connector derives from"),
        (TooMuch, {}, "defines where, which the engine does itself"),
        (SafetensorsFolder, {}, "cannot be opened with kv_connector_extra_config {}: KeyError: 'folder'"),
        (SafetensorsFolder, {"folder": 3}, "TypeError"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_connector("m:C", made, config)
    with pytest.raises(ConfigError, match="cannot serve this model's KV cache: ValueError: too many heads"):
        open_connector("m:C", Choosy, {"folder": str(tmp_path)}).register_kv_caches(LAYOUT)
    assert is_connector(Without) and is_connector(SafetensorsFolder) and not is_connector(dict)
    check_class("m:C", SafetensorsFolder)

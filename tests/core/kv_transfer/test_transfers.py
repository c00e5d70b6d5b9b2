"""What becomes of saves and loads that something happens to before they are done."""

import pytest

from tests.core.kv_cache.test_block_hash import make_request
from tests.core.kv_transfer.test_pieces import ENDLESS, Sharing, prompt_of

PROMPT = prompt_of(40, 1)
ANSWER = {"max_tokens": 3, **ENDLESS}


@pytest.fixture
def store():
    """What an engine has kept of `PROMPT`."""
    store = {}
    Sharing(store, 8, (None,)).answers([PROMPT])
    return store


def loading(store, **options):
    """An engine with a request that waits for its pages, which have not come."""
    engine = Sharing(store, 8, (None,), **options)
    engine.add("one", PROMPT, **ANSWER)
    engine.step()
    (load,) = engine.half.loading.values()
    return engine, load


def arrive(engine, load):
    return engine.half.arrived(load, [True] * len(load.pages), ["host"] * len(load.pages))


def test_what_a_request_computed_that_failed_is_not_saved_and_what_others_did_is():
    engine = Sharing({}, 8, (None,))
    engine.half.gathers.room = 0  # all is still to be saved
    engine.answers([PROMPT, prompt_of(40, 2)])
    request, saves = engine.books[0], engine.half.saves
    before = len(saves)
    engine.half.note_lost(request, 0, 1)
    (lost,) = engine.half.take_lost()
    assert len(saves) == before - 1 and lost not in saves
    assert lost not in [save.key for save in saves.take(None, before)]
    assert engine.half.take_lost() == [], "it is said once"


def test_a_page_in_which_a_window_begins_is_loaded_whole_so_that_it_can_be_saved_again():
    store, windows = {}, (21,)
    Sharing(store, 8, windows).answers([PROMPT])
    engine = Sharing(store, 4, windows)
    assert engine.answers([PROMPT]) == [32]  # whose last 20 tokens are seen: half of the page that begins at 8
    num_tokens, placed = engine.half.beginning(make_request([*PROMPT[:32], 0]))
    assert num_tokens == 32 and [page.first for pages, _ in placed for page in pages] == [8, 16, 24]


def test_pages_for_weights_that_were_replaced_meanwhile_are_not_used(store):
    engine, load = loading(store)
    engine.manager.change_root("others", [load.request])
    assert arrive(engine, load) is None
    engine.unwritten = []
    engine.run()
    assert engine.half.num_hits == 0


def test_pages_for_an_aborted_request_are_not_used_by_another_one_of_its_name(store):
    engine, load = loading(store)
    engine.abort("one")
    engine.add("one", PROMPT, **ANSWER)
    engine.unwritten = []
    engine.step()
    again = engine.half.loading["one"]
    assert again is not load and arrive(engine, load) is None
    assert engine.half.loading["one"] is again, "which still waits for its own"
    assert arrive(engine, again) is not None


def test_pages_for_which_no_blocks_are_free_are_computed(store):
    engine, load = loading(store)
    pool = engine.manager.pools[0]
    held = pool.get_new_blocks(pool.num_free_blocks - 2)
    assert len(load.pages) > 2 and arrive(engine, load) is None
    assert pool.num_free_blocks == 2
    pool.free_blocks(held)
    engine.unwritten = []
    engine.run()
    assert engine.half.num_hits == 0

"""Engines with blocks of different sizes name pages alike, find each other's, and put every token where it belongs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.kv_transfer.pieces import MOST_PAGES, Pieces
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import (
    AttentionSpec,
    EncoderCacheConfig,
    KVCacheConfig,
    KVCacheGroup,
    StateSpec,
    pool_layouts,
)
from jaxpaged.kv_connector.base import (
    FinishedFetch,
    KVCacheLayout,
    KVConnection,
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVPoolLayout,
    KVWrite,
)
from jaxpaged.kv_store.pieces import Piece, page_tokens_of
from jaxpaged.kv_store.tier import Lookup
from tests.core.kv_cache.test_block_hash import make_request
from tests.core.simulation import Engine, adapter, expected_output, illustrated, picture, prompt_of, states

PAGE = 8
SIZES = (4, 8, 16, 32)
WINDOWS = (None, 6, 21)
STATES = "states"
ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


class Sharing(Engine):
    """An engine with blocks of so many tokens that saves pages to `store`, by key, and loads them from there.

    Whatever a token reads is checked; what the prefix cache has besides, at the end.
    """

    def __init__(self, store, block_size, windows=WINDOWS, connector=None, **options):
        specs = tuple(
            states(block_size) if window == STATES else AttentionSpec(block_size, 1, 8, 4, window) for window in windows
        )
        sizes = {"max_model_len": 128, "max_num_batched_tokens": 24, "num_blocks": 4000 // block_size, **options}
        connector = connector or KVConnectorBase()
        connector.look_up, connector.lacks = self.lookup, lambda keys, under_way: [True] * len(keys)
        groups = tuple(KVCacheGroup(spec, (g,)) for g, spec in enumerate(specs))
        pools = [KVPoolLayout(tuple(pool.group_idxs), (1,), (1,)) for pool in pool_layouts(groups)]
        layout = KVCacheLayout("", "", PAGE, (), tuple(pools))
        super().__init__(windows=specs, connection=KVConnection(connector, layout), **sizes)
        self.store, self.block_size, self.num_copies = store, block_size, 0
        self.loads, self.unwritten = {}, []
        self.manager, self.half, self.finished_saves = self.scheduler.kv_cache_manager, self.scheduler.transfers, []

    def lookup(self, keys):
        return [Lookup.HIT if key in self.store else Lookup.MISS for key in keys]

    def slots(self, g, block_ids):
        pool, is_state = self.runner.pool_of[g], isinstance(self.runner.specs[g], StateSpec)
        slots = range(1 if is_state else self.block_size)
        return [(pool, block_id, slot) for block_id in block_ids for slot in slots]

    def save(self, save):
        self.keep(Piece(tuple(save.pages), tuple(save.block_ids)))
        self.finished_saves.append(save.save_id)

    def write(self, write):
        for pages, ids in zip(self.loads.pop(write.load_id), write.block_ids):
            places = self.slots(pages[0].key.group, ids)
            held = [slot for page in pages for slot in self.store[page.key][1]]
            self.runner.memory |= {place: slot for place, slot in zip(places, held, strict=True) if place[1]}

    def keep(self, piece):
        g = piece.pages[0].key.group
        held = [self.runner.memory[place] for place in self.slots(g, piece.block_ids)]
        size = 1 if isinstance(self.runner.specs[g], StateSpec) else PAGE
        assert len(held) == len(piece.pages) * size
        for number, page in enumerate(piece.pages):
            own = held[number * size : (number + 1) * size]
            assert {group for group, _ in own} == {g}
            assert self.store.setdefault(page.key, (page, own)) == (page, own), "two engines mean different content"
            self.num_copies += 1

    def dispatch(self):
        sources = lambda pieces: ["host"] * sum(map(len, pieces))
        came = [FinishedFetch(load_id, sources(self.loads[load_id]), 1.0) for load_id in self.unwritten]
        self.scheduler.update_connector_output(KVConnectorOutput(came, [], self.finished_saves))
        self.finished_saves, self.unwritten = [], []
        scheduled = self.scheduler.schedule(self.max_steps)
        self.scheduler.check_integrity()
        metadata = scheduled.kv_connector_metadata or self.scheduler.build_connector_meta() or KVConnectorMetadata()
        self.carry(metadata)
        self.in_flight.append((scheduled, self.runner.execute(scheduled)))
        for save in metadata.after_step:
            self.save(save)
        return scheduled

    def carry(self, metadata):
        """What is done ahead of a step, and begun."""
        for each in metadata.before_step:
            (self.write if isinstance(each, KVWrite) else self.save)(each)
        self.unwritten += [fetch.load_id for fetch in metadata.fetches]
        self.loads |= {fetch.load_id: fetch.pieces for fetch in metadata.fetches}

    def exchange(self):
        metadata = self.scheduler.build_connector_meta() or KVConnectorMetadata()
        self.carry(metadata)
        for save in metadata.after_step:
            self.save(save)

    def check_cache(self):
        pass

    def run(self):
        super().run()
        super().check_cache()

    def answers(self, prompts, **options):
        """How many tokens each request found; all answers are as they must be."""
        found = []
        for number, prompt in enumerate(prompts):
            self.add(f"{number}", prompt, **{"max_tokens": 3, **ENDLESS, **options})
            while f"{number}" not in self.ends:
                self.step()
            request, weights = self.requests[f"{number}"], self.weights[f"{number}"]
            assert self.tokens[f"{number}"] == expected_output(request, self.max_model_len, weights)[0]
            found.append(self.books[-1].num_cached_tokens)
        return found


def align(num_tokens, block_size):
    size = max(block_size, PAGE)
    return num_tokens // size * size


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", SIZES)
def test_what_one_engine_computed_another_one_loads_as_far_as_whole_blocks_of_both_go(first, second):
    lengths, store = (33, 64, 75), {}
    prompts = [prompt_of(length, length) for length in lengths]
    Sharing(store, first).answers(prompts)
    engine = Sharing(store, second)
    found = engine.answers(prompts)
    # The first one has computed two tokens more than the prompt, the second one always computes the last of it.
    assert found == [align(min(align(length + 2, first), length - 1), second) for length in lengths]
    assert engine.half.num_hits == sum(found)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=4),
    st.lists(st.sampled_from(SIZES), min_size=2, max_size=3),
    st.sampled_from([WINDOWS, (None,), (9,)]),
    st.booleans(),
)
def test_engines_with_little_memory_share_whatever_they_preempt_and_forget(prompts, sizes, windows, is_small):
    """Requests run together, begin alike, and are preempted; the store has what the engines before have saved."""
    store = {}
    for size in sizes:
        engine = Sharing(store, size, windows, **({"num_blocks": 320 // size + 8} if is_small else {}))
        for number, (kind, length) in enumerate(prompts):
            prompt = [*prompt_of(16), *prompt_of(120, kind)][:length]
            engine.add(f"{number}", prompt, max_tokens=12, **ENDLESS)
        engine.run()
        for name, request in engine.requests.items():
            assert engine.tokens[name] == expected_output(request, engine.max_model_len)[0]
    for page, held in store.values():
        assert len(page.token_ids) == len(held) == PAGE


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("xyz"), st.integers(1, 20)), min_size=1, max_size=4),
    st.lists(st.sampled_from(SIZES), min_size=2, max_size=3),
    st.booleans(),
)
def test_keys_of_pages_name_the_pictures_in_them(prompts, sizes, whole):
    """Requests of the same tokens with other pictures, in engines whose encoder caches have room for one."""
    store = {}
    for size in sizes:
        engine = Sharing(store, size, encoder=EncoderCacheConfig(10, 2, 20, whole))
        for number, (place, name, length) in enumerate(prompts):
            prompt, features = illustrated(prompt_of(40), (place, name, (length,)), (35, "w", (3,)))
            engine.add(f"{number}", prompt, mm_features=features, max_tokens=12, **ENDLESS)
        engine.run()
        for name, request in engine.requests.items():
            assert engine.tokens[name] == expected_output(request, engine.max_model_len)[0]


def test_pictures_of_a_loaded_beginning_are_not_encoded():
    store, sees = {}, EncoderCacheConfig(20, 2, 40)
    prompt, features = illustrated(prompt_of(40), (3, "x", (20,)), (30, "y", (9,)))
    for block_size, num_encoded, num_loaded in ((8, 2, 0), (32, 0, 64)):
        engine = Sharing(store, block_size, encoder=sees)
        engine.add("a", prompt, mm_features=features, max_tokens=2, **ENDLESS)
        engine.run()
        assert engine.runner.num_encoded == num_encoded and engine.half.num_hits == num_loaded


def snapshots_of(length, block_size):
    """Where the first request with such a prompt, which is answered with 3 tokens, leaves snapshots."""
    return {(length - 1) // block_size * block_size, (length + 2) // block_size * block_size}


@pytest.mark.parametrize("first", SIZES[1:])
@pytest.mark.parametrize("second", SIZES[1:])
def test_with_states_a_beginning_is_loaded_as_far_as_a_snapshot_ends_it(first, second):
    lengths, store = (33, 64, 75), {}
    prompts = [prompt_of(length, length) for length in lengths]
    Sharing(store, first, (None, 21, STATES)).answers(prompts)
    engine = Sharing(store, second, (None, 21, STATES))
    ends = [[end for end in snapshots_of(n, first) if end % second == 0 and end < n] for n in lengths]
    assert engine.answers(prompts) == [max(some, default=0) for some in ends]
    assert engine.half.num_hits == sum(max(some, default=0) for some in ends)
    for key in [key for key in store if key.group == 2]:
        del store[key]
    engine = Sharing(store, first, (None, 21, STATES))
    assert engine.answers(prompts) == [0, 0, 0] and not engine.half.num_hits, "nothing is loaded without a snapshot"
    assert any(key.group == 2 for key in store), "it is taken and kept again"


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=4),
    st.lists(st.sampled_from(SIZES[1:]), min_size=2, max_size=3),
    st.sampled_from([(None, STATES), (None, 9, STATES), (STATES,)]),
    st.booleans(),
    st.sets(st.integers(0, 30)),
)
def test_a_state_that_was_loaded_is_that_of_the_tokens_before_it(prompts, sizes, windows, is_small, lost):
    """Requests run together, begin alike, and are preempted, and pages are lost between engines."""
    store = {}
    for size in sizes:
        for number, key in enumerate(list(store)):
            if number in lost:
                del store[key]
        engine = Sharing(store, size, windows, **({"num_blocks": 320 // size + 8} if is_small else {}))
        for number, (kind, length) in enumerate(prompts):
            prompt = [*prompt_of(16), *prompt_of(120, kind)][:length]
            engine.add(f"{number}", prompt, max_tokens=12, **ENDLESS)
        engine.run()
        for name, request in engine.requests.items():
            assert engine.tokens[name] == expected_output(request, engine.max_model_len)[0]


@pytest.mark.parametrize("producer", SIZES)
@pytest.mark.parametrize("consumer", [size for size in SIZES if size <= MOST_PAGES * PAGE])
@pytest.mark.parametrize("way", ["lent", "file"])
def test_what_is_lent_or_in_a_file_is_enough_for_blocks_of_any_size(producer, consumer, way):
    for length in (33, 64, 95):
        prompt, engine, store = prompt_of(length, 5), Sharing({}, producer), {}
        engine.answers([prompt])
        (request,) = engine.books
        if way == "lent":
            num_tokens, pieces = engine.half.prompt_pieces(request)
        else:
            whole = make_request([*prompt[: engine.half.align(length)], 0])
            num_tokens, placed = engine.half.beginning(whole)
            pieces = [Piece(tuple(page.content for page in pages), ids) for pages, ids in placed]
            for page in (page for pages, _ in placed for page in pages):
                assert page.content.token_ids == tuple(prompt[page.first : page.first + PAGE])
        assert num_tokens == align(length, producer) and all(piece.block_ids for piece in pieces)
        engine.store = store
        for piece in pieces:
            engine.keep(piece)
        other = Sharing(store, consumer)
        assert other.answers([prompt]) == [align(min(num_tokens, length - 1), consumer)], (length, len(store))


def test_a_page_is_not_saved_if_its_first_blocks_are_reused_before_its_last_one_is_full():
    engine = Sharing({}, 2, windows=(3,), num_blocks=4, max_num_batched_tokens=2, max_num_seqs=1)
    engine.answers([prompt_of(8)], max_tokens=40)
    assert engine.num_copies < 5
    roomy = Sharing({}, 2, windows=(3,))
    roomy.answers([prompt_of(8)], max_tokens=40)
    assert roomy.num_copies == 5
    for page, held in engine.store.values():
        assert roomy.store[page.key] == (page, held)


FIELDS = st.sampled_from([{}, {"cache_salt": "s"}, {"lora": adapter("l")}, {"mm_features": [picture("image", 5, 9)]}])


@given(st.lists(st.integers(0, 300_000), max_size=100), st.sampled_from([2, 3, 8, 24]), FIELDS)
def test_keys_of_pages_are_those_of_blocks_that_are_as_large(tokens, page_tokens, fields):
    def pages_with(block_size):
        group = KVCacheGroup(AttentionSpec(block_size, 1, 8, 4), (0,))
        manager = KVCacheManager(KVCacheConfig((4,), (group,)), max_num_batched_tokens=8, enable_prefix_caching=True)
        manager.hasher.root = b"some weights"
        pieces, request = Pieces(manager, page_tokens), make_request(tokens, **fields)
        count = pieces.align(len(tokens)) // pieces.piece_sizes[0].tokens
        return [page for number in range(count) for page in pieces.pages(request, 0, number)], request, manager

    own, request, manager = pages_with(page_tokens)
    manager.hasher.extend(request)
    assert [page.key.block_hash for page in own] == request.block_hashes
    assert [page.parent for page in own] == [None, *request.block_hashes][: len(own)]
    assert [token for page in own for token in page.token_ids] == tokens[: len(own) * page_tokens]
    for block_size in (1, page_tokens * 2, page_tokens * 3):
        others, _, _ = pages_with(block_size)
        assert others == own[: len(others)] and len(own) - len(others) < max(block_size // page_tokens, 1)


def test_weights_that_were_replaced_have_other_pages():
    engine = Sharing({}, 16)
    engine.answers([prompt_of(70)])
    (request,), before = engine.books, set(engine.store)
    assert request.page_hashes
    engine.manager.change_root("v2", [request])
    assert not request.page_hashes
    engine.answers([prompt_of(70)])
    assert engine.num_copies == 2 * len(before) and engine.books[-1].num_cached_tokens == 0


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(0, 6)), min_size=2, max_size=5),
    st.lists(st.sampled_from([None, True, True, False]), min_size=20, max_size=20),
    st.lists(st.sampled_from(SIZES), min_size=2, max_size=2),
    st.sampled_from([(None,), (None, 9), (None, STATES)]),
    st.booleans(),
)
def test_what_requests_keep_of_old_weights_reaches_no_store(prompts, changes, sizes, windows, is_small):
    """Two engines with one store take updates, over which requests keep their keys and values or not. What either
    stores of some weights is what both compute with these from the first token on."""
    store = {}
    for size in sizes:
        size = max(size, PAGE) if STATES in windows else size
        engine = Sharing(store, size, windows, **({"num_blocks": 320 // size + 8} if is_small else {}))
        pending = list(enumerate(prompts))
        for keeps in changes:
            for number, (kind, length, num_steps) in pending[:1]:
                prompt = [*prompt_of(16), *prompt_of(120, kind)][:length]
                engine.add(f"{number}", prompt, max_tokens=30, **ENDLESS)
                for _ in range(num_steps):
                    engine.step()
            pending = pending[1:]
            if keeps is not None:
                engine.change_weights(keeps=keeps)
            engine.step()
        engine.run()


def test_a_prompt_whose_weights_changed_is_not_lent():
    engine = Sharing({}, 8, (None,))
    engine.add("a", prompt_of(64), max_tokens=9, **ENDLESS)
    while len(engine.tokens["a"]) < 2:
        engine.step()
    (request,) = engine.books
    assert engine.half.prompt_pieces(request)[0] == 64
    engine.change_weights(keeps=True)
    assert engine.half.prompt_pieces(request) == (0, [])
    engine.run()
    assert engine.half.prompt_pieces(request) == (0, [])


def test_what_a_request_computed_that_failed_is_kept_in_no_page_of_its_blocks():
    for size in SIZES:
        engine = Sharing({}, size, windows=(None,))
        engine.add("a", prompt_of(64), max_tokens=4, **ENDLESS)
        while len(engine.tokens["a"]) < 2:
            engine.step()
        (request,), saved = engine.books, {page.key for page, _ in engine.store.values()}
        engine.manager.uncache_request(request)
        assert set(engine.half.take_lost()) == saved and len(saved) == 64 // PAGE


def test_blocks_of_ordinary_sizes_share_pages_and_others_have_their_own():
    ordinary = {size: page_tokens_of(None, [size]) for size in (16, 32, 64, 96, 128, 1024)}
    assert set(ordinary.values()) == {32}
    assert {size: page_tokens_of(None, [size]) for size in (1, 4, 8, 24, 48, 100)} == {
        n: n for n in (1, 4, 8, 24, 48, 100)
    }
    assert page_tokens_of(None, [16, 48]) == 16 and page_tokens_of(64, [16, 32, 128]) == 64
    with pytest.raises(ConfigError, match="page_tokens=32, and block_size is 24, 64: one must be a multiple"):
        page_tokens_of(32, [24, 64])
    with pytest.raises(ConfigError, match="at most 65536 tokens"):
        page_tokens_of(1 << 17, [16])


def test_where_there_are_snapshots_a_page_ends_with_every_block():
    assert {size: page_tokens_of(None, [size], has_snapshots=True) for size in (16, 64)} == {16: 16, 64: 64}
    assert page_tokens_of(8, [16], has_snapshots=True) == 8
    with pytest.raises(ConfigError, match="page_tokens=32, and block_size is 16: this model has recurrent states"):
        page_tokens_of(32, [16], has_snapshots=True)

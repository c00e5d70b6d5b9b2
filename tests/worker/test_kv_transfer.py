"""The worker's half of KV transfer over a device of numpy arrays: what is stored and when, and what is loaded."""

import threading
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.core.kv_transfer.saves import Gathers, Save
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.kv_connector.base import KVConnectorMetadata, KVFetch, KVWrite
from jaxpaged.kv_connector.multi import MultiConnector
from jaxpaged.kv_connector.offloading import OffloadingConnector
from jaxpaged.kv_connector.peers import PeersConnector
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.page import PageContent, PageHeader, PageKey, decode, encode, namespace, scales_of
from jaxpaged.kv_store.pieces import Piece
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.worker.kv_transfer import transfer
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.transfer import KVTransferWorker, Losses

SPACE, OTHER = namespace(weights="a"), namespace(weights="b")
SPEC = AttentionSpec(4, 2, 8, 4)
GROUPS = (KVCacheGroup(SPEC, (0, 1)), KVCacheGroup(SPEC, (2,)))  # the second one's pages have one layer
CACHE = KVCacheConfig((16,), GROUPS)


class Pages(np.ndarray):
    """Arrays of a device: these are on the host already."""

    def copy_to_host_async(self):
        pass


class NumpyDevice:
    """Blocks `[16, 2, 4, 2, 8]` of two KV tensors, and the two copies, in any form."""

    def __init__(self, form):
        self.form, self.state = form, SimpleNamespace(kv=[np.zeros((16, 2, 4, 2, 8), np.float32) for _ in range(2)])

    def call(self, key, tensors, id_P, *pages):
        valid = [i for i, block_id in enumerate(id_P) if block_id >= 0]
        if key.kind == "kv_gather":
            found = np.zeros((len(id_P), 2, 2, 4, 2, 8), np.float32)
            found[valid] = np.stack([tensor[id_P[valid]] for tensor in tensors], axis=1)
            found = cut_anew(found, self.form.page_tokens)
            arrays = (found,) if not self.form.is_scaled else (found.round().astype(np.int8), found[..., 0] / 10)
            return tuple(array.copy().view(Pages) for array in arrays)
        (arrays,) = pages
        values = arrays[0] if len(arrays) == 1 else arrays[0].astype(np.float32) * arrays[1][..., None]
        assert np.isfinite(values).all()
        values = cut_anew(values, 4)
        made = [tensor.copy() for tensor in tensors]
        for layer, tensor in enumerate(made):
            tensor[id_P[valid]] = values[valid, layer]
        return made

    def fill(self, block_id, value):
        for tensor in self.state.kv:
            tensor[block_id] = value

    def holds(self, block_id):
        return [float(tensor[block_id].max()) for tensor in self.state.kv]


def cut_anew(runs, num_tokens):
    """Runs `[runs, layers, 2, tokens, heads, head dim]` of other numbers of tokens, by all of their tokens in a row."""
    row = np.concatenate(list(runs), axis=2)
    return np.stack([row[:, :, i : i + num_tokens] for i in range(0, row.shape[2], num_tokens)])


def content(number, group=0, tokens=4):
    return PageContent(PageKey(bytes([number]) * 32, group), None, (number, *range(1, tokens)))


def whole(save):
    """A save of a piece, or of (step, the only page, the only block)."""
    return Save(*save) if len(save) == 2 else Save(save[0], Piece((save[1],), (save[2],)))


class Made:
    """A worker with its device and store, and what says to it which pieces to save."""

    def __init__(self, name="exact", page_tokens=4, behind=(), **options):
        form = PageForm(name, np.dtype(np.float32), page_tokens)
        self.device, self.tier = NumpyDevice(form), HostTier(1 << 20)
        self.open(OffloadingConnector(Tiers([self.tier])), form, behind, **options)

    def open(self, connector, form, behind=(), **options):
        self.connector = MultiConnector([connector, *behind]) if behind else connector
        self.worker = KVTransferWorker(self.device, CACHE, self.connector, SPACE, form, **options)
        self.gathers, self.num_loads = Gathers(self.connector, self.worker.layout), 0

    def save(self, *saves):
        """What finds no room."""
        begun, left = self.gathers.begin(list(map(whole, saves)))
        self.worker.wait_for_save(KVConnectorMetadata(after_step=begun))
        return left

    def confirm(self, before=1 << 30):
        self.worker.start_load_kv(KVConnectorMetadata(confirmed=before))

    def has_room(self, seconds=0.0):
        """Whether another copy may begin, within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            for save_id in self.worker.exchange(None, 0.05 * bool(seconds)).finished_saves:
                self.gathers.end(save_id)
            if self.gathers.has_room or time.monotonic() >= deadline:
                return self.gathers.has_room

    def settled(self):
        """The pages in the tier once threads have done all that they were given."""
        for _ in range(2):
            self.worker._savers.submit(lambda: None).result()
        gate = threading.Barrier(3)
        for _ in range(2):
            self.worker._savers.submit(gate.wait)
        gate.wait(5)
        return {key: decode(page, expect_namespace=SPACE, key=key)[1] for key, page in self.tier._pages.items()}

    def begin(self, *contents, each=1):
        """Fetch pages, so many of which make a piece. The number of the load."""
        pieces = [list(contents[i : i + each]) for i in range(0, len(contents), each)]
        self.num_loads += 1
        fetch = KVFetch(self.num_loads, "a", pieces, [4 * (i + 1) for i in range(len(contents))])
        self.worker.start_load_kv(KVConnectorMetadata(fetches=[fetch]))
        return self.num_loads

    def load(self, *contents, each=1):
        """The same: what came of them."""
        self.begin(*contents, each=each)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if fetched := self.worker.exchange(None, 0.05).finished_fetches:
                return fetched[0]
        raise AssertionError("a load does not end")

    def write(self, fetched, block_ids):
        self.worker.start_load_kv(KVConnectorMetadata(before_step=[KVWrite(fetched.load_id, block_ids)]))

    def close(self):
        self.worker.close()


def came(fetched):
    return list(map(bool, fetched.sources))


@pytest.fixture
def made():
    made = Made()
    yield made
    made.close()


def test_a_block_is_copied_as_it_was_and_stored_once_its_step_is_confirmed(made):
    made.device.fill(3, 1.0)
    made.save((7, content(1), 3))
    made.device.fill(3, 2.0)  # the block is another's at once
    made.confirm(7)
    assert not made.settled()
    made.confirm(8)
    assert [float(page.max()) for page in made.settled().values()] == [1.0]
    made.save((9, content(2), 3), (12, content(3), 4))
    made.confirm(12)
    assert len(made.settled()) == 1, "the later step is not done"
    made.confirm()
    assert len(made.settled()) == 3


def test_what_a_failed_step_computed_is_dropped_and_its_room_is_free_again(made, monkeypatch):
    made.gathers.room = 1
    for number in range(5):
        assert not made.save((7, content(number), 3)) and not made.has_room()
        made.worker.revoke()
        assert made.has_room()
    made.confirm()
    assert not made.settled()
    stats = made.worker.stats()
    assert stats["kv_offload_copies_under_way"] == stats["kv_offload_pages_dropped"] == 0
    made.save((8, content(0), 3))
    made.confirm()
    assert list(made.settled()) == [content(0).key], "it may be saved later"


def test_what_finds_no_room_is_handed_back_and_goes_later(made):
    each = made.worker._copies.num_bytes(0, 1)
    made.gathers.room = 2 * each
    saves = [Save(7, Piece((content(number),), (3,))) for number in range(5)]
    assert [made.save(save) for save in saves] == [[], [], *([save] for save in saves[2:])]
    assert not made.has_room(0.01) and made.worker.stats()["kv_offload_copies_under_way"] == 2
    made.confirm()
    assert made.has_room(10) and len(made.settled()) == 2
    made.has_room()
    made.save(*saves[2:4])
    made.confirm()
    assert made.has_room(10)
    made.save(*saves[4:])
    made.confirm()
    assert len(made.settled()) == 5 and made.worker.stats()["kv_offload_copies_under_way"] == 0


def test_room_is_counted_by_the_bytes_of_copies(made):
    piece_bytes = sum(
        page.nbytes for page in made.device.call(SimpleNamespace(kind="kv_gather"), made.device.state.kv, np.array([1]))
    )
    sizes = made.worker._copies._sizes[0]
    assert [made.worker._copies.num_bytes(0, size) for size in sizes] == [size * piece_bytes for size in sizes]
    made.save((7, content(1), 3))
    assert made.gathers.num_bytes == sizes[0] * piece_bytes, "padding takes room, too"


def test_what_is_given_up_is_counted_and_told_of_once(made, caplog):
    keys = [content(number).key for number in range(3)]
    for some in (keys[1:2], keys[2:], []):
        made.worker.start_load_kv(KVConnectorMetadata(given_up=some))
    assert made.worker.stats()["kv_offload_pages_dropped"] == 2
    assert [record.getMessage()[:7] for record in caplog.records] == ["1 pages"]


def test_losses_are_told_of_once_for_each_reason(caplog):
    losses = Losses()
    for number, reason in enumerate(["a", "b", "a", "b"]):
        losses.add(number, reason)
    assert losses.num_pages == 6 and len(caplog.records) == 2


def test_pages_that_no_tier_takes_are_counted_and_told_of(made, caplog):
    made.tier.capacity = 100
    made.save((7, content(1), 3), (7, content(2), 4))
    made.confirm()
    assert not made.settled() and made.worker.stats()["kv_offload_pages_dropped"] == 2
    assert len(caplog.records) == 1 and "no tier takes them" in caplog.text


class Told(PeersConnector):
    """What consumers hear."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def save_kv(self, pages):
        self.keys.append([page.content.key for page in pages])
        return super().save_kv(pages)


def test_consumers_hear_of_pages_while_the_rest_of_a_copy_is_stored(monkeypatch):
    told = Told()
    made = Made(behind=[told])
    contents = [content(number) for number in range(1, 6)]
    monkeypatch.setattr(transfer, "SAVED_BYTES", 2 * made.worker._copies.page_bytes(0))
    made.save(*((1, each, each.token_ids[0]) for each in contents))
    made.confirm()
    made.close()
    keys = [each.key for each in contents]
    assert told.keys == [keys[:2], keys[2:4], keys[4:]]


def test_a_page_is_copied_once(made):
    made.save((7, content(1), 3))
    made.save((8, content(1), 4))
    assert len(made.gathers) == 1
    made.confirm()
    made.settled()
    assert made.has_room(1) and not made.gathers
    made.save((9, content(1), 5))
    assert not made.gathers


def test_what_is_discarded_is_kept_neither_before_nor_after_it_is_stored(made):
    made.save((7, content(1), 3), (7, content(2), 4))
    made.worker.start_load_kv(KVConnectorMetadata(discarded=[content(1).key]))
    made.confirm()
    assert list(made.settled()) == [content(2).key]
    made.worker.start_load_kv(KVConnectorMetadata(discarded=[content(2).key]))
    assert not made.settled()


def test_what_was_saved_is_written_to_other_blocks_and_what_did_not_come_to_none(made):
    pages = content(1), content(2), content(1, group=1)
    for number, page in enumerate(pages):
        made.device.fill(3 + number, number + 1.0)
        made.save((7, page, 3 + number))
    made.confirm()
    assert sorted(page.shape[0] for page in made.settled().values()) == [1, 2, 2]
    assert made.connector.look_up([pages[0].key, content(9).key]) == [Lookup.HIT, Lookup.MISS]
    fetched = made.load(content(9), *pages)
    assert came(fetched) == [False, True, True, True] and fetched.sources == ["", "host", "host", "host"]
    assert made.worker.num_lost == 1 and made.worker.num_loaded == 3
    made.device.fill(0, 5.0)
    made.write(fetched, [[0], [10], [11], [12]])
    assert [made.device.holds(block) for block in (0, 10, 11, 12)] == [[5.0] * 2, [1.0] * 2, [2.0] * 2, [3.0, 0.0]]


@pytest.mark.parametrize("name", ["exact", "int8"])
@pytest.mark.parametrize("page_tokens", [8, 2])
def test_blocks_are_joined_to_pages_and_cut_into_them(page_tokens, name):
    """Two blocks that hold the numbers of their tokens are one page or four."""
    made = Made(name, page_tokens)
    for tensor in made.device.state.kv:
        tensor[3:5] = np.arange(8).reshape(2, 1, 4, 1, 1)
    pages = [content(i, tokens=page_tokens) for i in range(8 // page_tokens)]
    pieces = (
        [Piece((pages[0],), (3, 4))] if page_tokens == 8 else [Piece((*pages[:2],), (3,)), Piece((*pages[2:],), (4,))]
    )
    made.save(*[(7, piece) for piece in pieces])
    assert sum(len(gathered.save.block_ids) for gathered in made.worker._unconfirmed) == 2
    made.confirm()
    stored = made.settled()
    for number, page in enumerate(pages):
        expected = np.arange(number * page_tokens, (number + 1) * page_tokens)
        assert (stored[page.key] == expected.reshape(1, 1, -1, 1, 1)).all(), "tokens are in other places"
    made.tier.delete([pages[0].key])
    made.has_room()
    made.save(*[(8, piece) for piece in pieces])
    made.confirm()
    assert made.settled().keys() == stored.keys() and made.worker.num_saved == len(pages) + 1, "only what was missing"
    fetched = made.load(*pages, each=len(pages) // len(pieces))
    assert all(came(fetched))
    before = [tensor[:2].copy() for tensor in made.device.state.kv]
    made.write(fetched, [[10, 0]] if page_tokens == 8 else [[10], [0]])
    for old, tensor in zip(before, made.device.state.kv):
        scale = 1.0 if name == "exact" else 0.1 * np.arange(4).reshape(1, 4, 1, 1)  # as the device rounds
        assert np.allclose(tensor[10], tensor[3] * scale) and (tensor[:2] == old).all()
    made.close()


def kept(tier, page, header_content, space=SPACE, scales=None):
    """Put a page that says to be `header_content` under the key of `page`."""
    values = np.ones((2, 2, 4, 2, 8), np.float32 if scales is None else np.int8)
    header = PageHeader(space, header_content.key, None, header_content.token_ids)
    tier.put(page.key, encode(header, values, None, scales))


def test_pages_of_others_are_not_loaded_and_are_removed(made):
    other_tokens = PageContent(content(2).key, None, (9, 9, 9, 9))
    cases = {
        content(1): {"header_content": content(1), "space": OTHER},
        content(2): {"header_content": other_tokens},
        content(3): {"header_content": content(4)},
        content(5): {"header_content": content(5), "scales": np.ones((2, 2, 4, 2), np.float32)},
    }
    for page, said in cases.items():
        kept(made.tier, page, **said)
        assert came(made.load(page)) == [False] and made.connector.look_up([page.key]) == [Lookup.MISS]
    kept(made.tier, content(6), content(6))
    assert came(made.load(content(6))) == [True]


def test_rounded_pages_come_back_with_their_scales_and_exact_ones_are_none():
    made = Made("int8")
    made.device.fill(3, 20.0)
    made.save((7, content(1), 3), (7, content(1, group=1), 3))
    made.confirm()
    pages = made.settled()
    assert [page.dtype for page in pages.values()] == [np.int8] * 2
    header, _ = decode(made.tier.get(content(1).key), expect_namespace=SPACE, key=content(1).key)
    assert (scales_of(made.tier.get(content(1).key), header) == 2.0).all()
    made.write(made.load(content(1), content(1, group=1)), [[10], [11]])
    assert [made.device.holds(block) for block in (10, 11)] == [[40.0] * 2, [40.0, 0.0]]
    kept(made.tier, content(2), content(2))
    eight = PageHeader(SPACE, content(4).key, None, content(4).token_ids)
    made.tier.put(content(4).key, encode(eight, np.ones((2, 2, 4, 2, 8), np.int8)))
    assert came(made.load(content(2))) == came(made.load(content(4))) == [False], "they have no scales"
    made.close()


def test_forms_tell_namespaces_apart():
    bfloat = np.dtype(ml_dtypes.bfloat16)
    facts = [PageForm(name, bfloat, 4).facts for name in ("exact", "int8", "fp8")]
    assert len({namespace(weights="a", **each) for each in facts}) == 3 and facts[0] == {}

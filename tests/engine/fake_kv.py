"""A connector without bytes and a device that copies nothing: loads come when a test says so."""

from jaxpaged.engine.core import EngineCore
from jaxpaged.kv_connector.base import (
    FinishedFetch,
    KVCacheLayout,
    KVConnectorOutput,
    KVGroupLayout,
    KVPoolLayout,
    KVSave,
    KVWrite,
)
from jaxpaged.kv_connector.peers import PeersConnector
from jaxpaged.kv_store.pieces import Piece
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tier_events import MEMORY, TierEvent
from tests.engine.fake_engine import Done, FakeExecutor, make_config


def layout_of(page_tokens, num_groups=1):
    """Pages of which nobody reads the content; a copy takes one piece, and one byte."""
    group = KVGroupLayout("full_attention", (0,), 4, None, (1, 2, page_tokens, 1, 2), "float32")
    groups = tuple(range(num_groups))
    return KVCacheLayout("", "", page_tokens, (group,) * num_groups, (KVPoolLayout(groups, (1,), (1,)),))


class FakeConnector(PeersConnector):
    """The scheduler's side over what `transfer` has stored."""

    def __init__(self, transfer):
        peers = FakePeers(transfer)
        super().__init__(peers, peers)
        self.transfer, self.outlives = transfer, True
        self.told = set()

    @property
    def outlives_engine(self):
        return self.outlives

    def look_up(self, keys):
        if self.transfer.num_unsure:
            self.transfer.num_unsure -= 1
            return [Lookup.PENDING] * len(keys)
        return [Lookup.HIT if key in self.transfer.stored else Lookup.MISS for key in keys]

    def lacks(self, keys, under_way):
        return [True] * len(keys)

    def where(self, keys):
        return [self.transfer.tier for _ in keys]

    def take_events(self):
        before, self.told = self.told, set(self.transfer.stored)
        changes = [TierEvent(MEMORY, key, True) for key in sorted(self.told - before)]
        return changes + [TierEvent(MEMORY, key, False) for key in sorted(before - self.told)]


class FakeTransfer:
    """A store and a device whose blocks hold keys. Loads come when the test says so."""

    def __init__(self, page_tokens=4):
        self.page_tokens, self.layout, self.connector = page_tokens, layout_of(page_tokens), FakeConnector(self)
        self.connector.register_kv_caches(self.layout)
        self.gathers = None
        self.mistakes = []  # which an exception would not tell: the engine goes on after it
        self.stored, self.unconfirmed, self.loads, self.came = {}, [], [], {}
        self.finished, self.ended_saves = [], []
        self.num_written, self.answer = 0, [True]
        self.lent, self.sources, self.kept_leases, self.released = {}, [], [], []
        self.leases, self.taken_back, self.ended_leases = [], [], {}
        self.given_up = []
        self.tier, self.seconds = "host", 0.001  # where all pages are, and what a load takes
        self.num_unsure = 0  # look-ups that a store elsewhere has not answered yet

    @property
    def room(self):
        """Pieces that are copied and not stored yet, at most."""
        return self.gathers.room

    @room.setter
    def room(self, room):
        self.gathers.room = room

    # ---- around steps ----

    def start_load_kv(self, metadata):
        for key in metadata.discarded:
            self.stored.pop(key, None)
        self.confirm(metadata.confirmed)
        self.given_up += metadata.given_up
        for each in metadata.before_step:
            self.write(each) if isinstance(each, KVWrite) else self.save(each)
        self.loads += metadata.fetches

    def wait_for_save(self, metadata):
        for save in metadata.after_step:
            self.save(save)

    def get_finished(self):
        output = KVConnectorOutput(self.finished, [], self.ended_saves)
        self.finished, self.ended_saves = [], []
        return output

    def exchange(self, metadata, seconds):
        if metadata is not None:
            self.start_load_kv(metadata)
            self.wait_for_save(metadata)
            self.confirm(metadata.confirmed)
        if seconds:
            self.wait()
        return self.get_finished()

    def wait(self):
        self.finish(self.answer)  # an idle engine sleeps until pages come

    def save(self, save):
        self.unconfirmed.append(save)

    def confirm(self, before):
        done = [save for save in self.unconfirmed if save.step_id < before]
        self.unconfirmed = [save for save in self.unconfirmed if save.step_id >= before]
        self.stored |= {page.key: page for save in done for page in save.pages}
        self.ended_saves += [save.save_id for save in done]

    def revoke(self):
        self.ended_saves += [save.save_id for save in self.unconfirmed]
        self.unconfirmed.clear()

    def finish(self, came):
        """The oldest load ends; `came` says of its pages in turn whether they do."""
        if self.loads:
            load = self.loads.pop(0)
            pages = [page for piece in load.pieces for page in piece]
            some = [came[i % len(came)] and self.stored.get(page.key) == page for i, page in enumerate(pages)]
            sources = [self.tier if ok else "" for ok in some]
            self.finished.append(FinishedFetch(load.load_id, sources, self.seconds))
            self.came[load.load_id] = load, {page.key for page, ok in zip(pages, some) if ok}

    def write(self, write):
        load, came = self.came.pop(write.load_id)
        if not write.block_ids:
            return
        for pages, ids in zip(load.pieces, write.block_ids, strict=True):
            if any(ids) and not came >= {page.key for page in pages}:
                self.mistakes.append(f"{ids} are written, and a part of {pages} did not come")
        given = [block_id for ids in write.block_ids for block_id in ids if block_id]
        if not given or len(set(given)) < len(given):
            self.mistakes.append(f"{write.block_ids} are written")
        self.num_written += len(given)


class FakePeers:
    """Other engines: a `KVProducer` and a `KVConsumer`."""

    host, port = "127.0.0.1", 1

    def __init__(self, transfer):
        self._transfer = transfer

    def grant(self, keys):
        self._transfer.leases.append(list(keys))
        return str(len(self._transfer.leases)), 0.0

    def hold(self, keys):
        pass

    def finish(self, name, keys):
        self._transfer.ended_leases[name] = list(keys)
        return 0.0

    def release(self, what):
        (self._transfer.taken_back if isinstance(what, str) else self._transfer.released).append(what)

    def expect(self, keys, source):
        transfer = self._transfer
        transfer.stored |= {key: transfer.lent[key] for key in keys if key in transfer.lent}
        transfer.sources.append(source)

    def keep_lease(self, source):
        self._transfer.kept_leases.append(source)


class KVExecutor(FakeExecutor):
    """A device with copies around its steps."""

    transfer = None

    def execute_model(self, scheduled):
        metadata = scheduled.kv_connector_metadata
        if metadata is None:
            return self.compute(scheduled)
        self.transfer.start_load_kv(metadata)
        done = self.compute(scheduled)
        self.transfer.wait_for_save(metadata)
        return KVDone(done, self.transfer)

    def compute(self, scheduled):
        return super().execute_model(scheduled)

    def recover(self):
        super().recover()
        if self.transfer is not None:
            self.transfer.revoke()


class KVDone:
    """A step whose result says what has become of loads and saves when it is taken."""

    def __init__(self, done: Done, transfer):
        self._done, self._transfer = done, transfer

    def result(self):
        output = self._done.result()
        output.kv_connector_output = self._transfer.get_finished()
        return output


def core_of(executor, transfer, publishers=(), **options):
    """An engine core that loads whatever it can, and never runs out of room."""
    core = EngineCore(make_config(kv_offload="host=1M", **options), executor, None, publishers, transfer)
    executor.transfer, transfer.gathers = transfer, core.transfers.gathers
    transfer.room = 10**9
    core.transfers.rates.pays = lambda sources: True
    return core


def pieces_of(saves):
    return [Piece(tuple(save.pages), tuple(save.block_ids)) for save in saves if isinstance(save, KVSave)]

"""A prompt is saved whole, however large its pages are beside what may be under way, and however slow its tier is.

The arrays of pages have the sizes of models' and one number in memory.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged import SamplingParams
from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.core.kv_transfer.saves import ROOM
from jaxpaged.engine.core import EngineCore
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.kv_connector import pages
from jaxpaged.kv_connector.offloading import OffloadingConnector
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.page import namespace
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.transfer import KVTransferWorker
from tests.engine.fake_engine import counting_model
from tests.engine.fake_kv import KVExecutor
from tests.worker.test_kv_transfer import Pages

BLOCK, VOCAB = 32, 100
MODELS = {3: (3, 1), 36: (9, 4), 128: (32, 4), 320: (80, 4)}
"""Layers and heads, by KiB of a token."""


class Named(HostTier):
    """A tier that keeps names, and gives no page before its gate is open."""

    def __init__(self):
        super().__init__(1 << 60)
        self.gate, self.keys = threading.Event(), set()

    def put(self, key, buffers):
        assert self.gate.wait(60)
        self.keys.add(key)
        return True

    def lookup(self, keys):
        return [Lookup.HIT if key in self.keys else Lookup.MISS for key in keys]


class LargeDevice:
    """Copies of the right size without content."""

    def __init__(self, layers, heads):
        self.state, self.shape = SimpleNamespace(kv=[None] * layers), (layers, 2, BLOCK, heads, 128)
        self.most = 0

    def call(self, key, tensors, id_P):
        array = np.broadcast_to(np.zeros(1, np.float32), (len(id_P), *self.shape))
        self.most = max(self.most, array.nbytes)
        return (array.view(Pages),)


def made(kib, monkeypatch, num_blocks):
    monkeypatch.setattr(pages, "encode", lambda *page: [b"a page"])
    layers, heads = MODELS[kib]
    group = KVCacheGroup(AttentionSpec(BLOCK, heads, 128, 4), tuple(range(layers)))
    device, tier = LargeDevice(layers, heads), Named()
    form = PageForm("exact", np.dtype(np.float32), BLOCK)
    cache = KVCacheConfig((num_blocks,), (group,))
    worker = KVTransferWorker(device, cache, OffloadingConnector(Tiers([tier])), namespace(weights="a"), form)
    executor = KVExecutor(counting_model(VOCAB), VOCAB, num_blocks, BLOCK)
    sizes = {"max_model_len": 33_000, "max_num_batched_tokens": 2048, "block_size": BLOCK, "num_scheduler_steps": 1}
    facts = ModelFacts(max_position_embeddings=40_000, dtype="float32", num_heads=1, vocab_size=VOCAB)
    config = EngineConfig.from_options(**sizes, kv_offload="host=1M").resolve(facts, "cpu")
    executor.transfer = worker
    return EngineCore(config, executor, kv_transfer=worker), worker, tier


def answer(core, name, prompt):
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add_request(EngineCoreRequest(name, prompt, params, arrival_time=0.0))
    while core.has_work():
        core.step()


@pytest.mark.parametrize("kib", MODELS)
@pytest.mark.parametrize("num_tokens", [500, 3000, 32_000])
def test_a_first_prompt_is_saved_whole_by_an_engine_that_is_idle_behind_it(kib, num_tokens, monkeypatch):
    core, worker, tier = made(kib, monkeypatch, num_tokens // BLOCK + 2)
    answer(core, "a", [5 + i % 90 for i in range(num_tokens)])  # whose tier takes nothing before it has ended
    under_way = core.transfers.gathers.num_bytes
    assert under_way < ROOM + (40 << 20)
    assert under_way > 0.9 * min(ROOM, 1024 * kib * (num_tokens // BLOCK * BLOCK)), "there was room for more"
    tier.gate.set()
    deadline = time.monotonic() + 60
    while core.save_idle():
        time.sleep(0.01)
        assert time.monotonic() < deadline
    worker.close()
    assert len(tier.keys) == num_tokens // BLOCK and worker.stats()["kv_offload_pages_dropped"] == 0


def test_other_requests_do_not_push_out_what_waits_while_there_are_blocks(monkeypatch):
    core, worker, tier = made(320, monkeypatch, 400)
    for number in range(3):
        answer(core, f"{number}", [5 + (i * (number + 1)) % 90 for i in range(3000)])
    assert not core.transfers.gathers.has_room
    tier.gate.set()
    core.shutdown = lambda: None
    core.reset_prefix_cache()
    worker.close()
    assert len(tier.keys) == 3 * (3000 // BLOCK) and worker.stats()["kv_offload_pages_dropped"] == 0

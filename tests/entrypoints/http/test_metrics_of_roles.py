"""The whole exposition of engines that keep, lend, borrow and draft, through Prometheus' own parser."""

from collections import Counter as Count
from contextlib import closing

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.engine.observability.metrics import EngineMetrics
from jaxpaged.entrypoints.http.metrics import exposition
from jaxpaged.kv_connector.multi import MultiConnector
from jaxpaged.kv_connector.offloading import OffloadingConnector
from jaxpaged.kv_connector.peers import PeersConnector
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.custom_store import CustomTier
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.producer import KVProducer
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.messages import SchedulerStats
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.transfer import KVTransferWorker
from tests.worker.test_kv_hanging_stores import Hanging
from tests.worker.test_kv_transfer import CACHE, SPACE, NumpyDevice

ROLES = {"none": (False, False), "kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True)}


def stats_of(role, tiers):
    """What a worker of this role counts."""
    lends, borrows = ROLES[role]
    store, form = Tiers(tiers), PageForm("exact", np.dtype(np.float32), 4)
    producer = KVProducer(store, ("127.0.0.1", 0), SPACE, lease_s=9.0, capacity=1 << 20) if lends else None
    consumer = KVConsumer(SPACE, 1 << 20, peers="127.0.0.1") if borrows else None
    connector = MultiConnector([OffloadingConnector(store), PeersConnector(producer, consumer)])
    worker = KVTransferWorker(NumpyDevice(form), CACHE, connector, SPACE, form)
    with closing(worker):
        return worker.stats()


def samples(text):
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("drafts", [False, True])
def test_no_sample_is_there_twice_nor_a_name_with_and_without_total(role, drafts, tmp_path):
    own = lambda name: CustomTier(name, Hanging(), SPACE)
    tiers = [HostTier(1 << 20), DiskTier(tmp_path, 1 << 20, SPACE), own("mine"), own("mine")]
    executor = {"steps": 3, "recompiles": 0, **stats_of(role, tiers)}
    scheduler = SchedulerStats(num_accepted_per_pos=[1, 0] if drafts else [])
    text = "".join(exposition(EngineMetrics(1000, stats=scheduler).read(executor), {"engine": "0"}))
    found = samples(text)
    counts = Count((each.name, *sorted(each.labels.items())) for each in found)
    assert not [name for name, count in counts.items() if count > 1]
    names = {each.name for each in found}
    assert not {name for name in names if f"{name}_total" in names}
    types = Count(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    assert set(types.values()) == {1}
    lends, borrows = ROLES[role]
    assert ("jaxpaged:kv_leases_granted_total" in names) is lends
    assert ("jaxpaged:kv_leases" in names) is lends
    assert ("jaxpaged:kv_borrowed_bytes_total" in names) is borrows
    tiers_told = {each.labels["tier"] for each in found if each.name == "jaxpaged:kv_offload_tier_pages"}
    assert tiers_told >= {"host", "disk", "mine", "mine_2"}

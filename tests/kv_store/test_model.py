"""Any sequence of calls, against a dictionary: content is equal or missing, and bytes never go above the capacity."""

import tempfile
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.pages import SPACE, page_of

PAGES = [page_of(number, layers=1 + number % 3, head_dim=4) for number in range(8)]
CAPACITY = 3 * len(PAGES[2][2])
CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "touch", "delete", "lookup"]), st.integers(0, len(PAGES) - 1)),
    max_size=40,
)


def on_disk(policy):
    """In a folder that vanishes with the tier."""
    kept = tempfile.TemporaryDirectory()
    tier = DiskTier(kept.name, CAPACITY, SPACE, policy=policy)
    tier.kept = kept
    assert tier.wait_ready(10)
    return tier


MAKERS = {
    "host lru": lambda: HostTier(CAPACITY),
    "host arc": lambda: HostTier(CAPACITY, "arc"),
    "host second use": lambda: HostTier(CAPACITY, second_use=True),
    "disk lru": lambda: on_disk("lru"),
    "disk arc": lambda: on_disk("arc"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@given(calls=CALLS)
@settings(max_examples=60, deadline=None)
def test_a_tier_is_a_dictionary_that_forgets(make, calls):
    written = {}
    with closing(make()) as tier:
        for call, number in calls:
            key, pieces, whole = PAGES[number]
            if call == "put":
                if tier.put(key, pieces):
                    written[key] = whole
                    assert tier.lookup([key]) == [Lookup.HIT]
            elif call == "get":
                found = tier.get(key)
                assert found is None or bytes(found) == written[key]
            elif call == "delete":
                tier.delete([key])
                written.pop(key, None)
            elif call == "touch":
                tier.touch([key])
            (state,) = tier.lookup([key])
            assert (state is Lookup.HIT) == (tier.get(key) is not None)
            assert key in written or state is Lookup.MISS
            (usage,) = tier.usage()
            present = [page for page in PAGES if tier.lookup([page[0]]) == [Lookup.HIT]]
            assert sum(len(page[2]) for page in present) <= usage.num_bytes <= CAPACITY  # files go after their entries
            assert usage.num_pages == len(present)

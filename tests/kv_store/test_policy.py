"""Which page goes: the rules themselves, without pages."""

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.policy import ARC, LRU, SecondUse, policy_named


def hits(policy, capacity, accesses):
    """How many of the accesses find their key, where each key has 10 bytes and a miss inserts it."""
    resident, found = set(), 0
    for key in accesses:
        if key in resident:
            found += 1
            policy.touch(key)
            continue
        while 10 * (len(resident) + 1) > capacity:
            resident.remove(policy.evict())
        policy.insert(key, 10)
        resident.add(key)
    return found


def test_least_recently_used_goes_first():
    policy = LRU(30)
    for key in "abc":
        policy.insert(key, 10)
    policy.touch("a")
    policy.remove("c")
    policy.touch("unknown")
    assert [policy.evict(), policy.evict()] == ["b", "a"]
    with pytest.raises(KeyError):
        policy.evict()


def scan_between(rounds):
    """Five keys used again and again, and between two rounds of them ten keys that never come again."""
    return [key for turn in range(rounds) for key in [*"abcde", *"abcde", *(f"{turn} {n}" for n in range(10))]]


def test_a_scan_evicts_what_is_used_again_under_lru_only():
    accesses = scan_between(8)
    assert hits(LRU(100), 100, accesses) == 8 * 5
    assert hits(ARC(100), 100, accesses) == 8 * 10 - 5


def test_arc_adapts_to_what_comes_back():
    policy = ARC(40)
    policy.insert("a", 10)
    policy.insert("b", 10)
    assert policy.evict() == "a"
    policy.insert("a", 10)  # it came back after all: pages used once get more room
    assert (policy.target, policy.once.num_bytes, policy.again.num_bytes) == (10, 10, 10)
    assert policy.evict() == "a"
    policy.insert("a", 10)  # and now those used again
    assert (policy.target, policy.once.num_bytes, policy.again.num_bytes) == (0, 10, 10)
    for key in range(20):
        policy.insert(key, 10)
        policy.evict()
    assert policy.left_once.num_bytes <= 40


def test_arc_counts_sizes():
    policy = ARC(100)
    for key, size in (("small", 1), ("large", 90), ("again", 5)):
        policy.insert(key, size)
    policy.touch("again")
    assert (policy.once.num_bytes, policy.again.num_bytes) == (91, 5)
    assert [policy.evict(), policy.evict(), policy.evict()] == ["small", "large", "again"]
    policy.insert("large", 90)
    assert policy.target == 90 and policy.again.num_bytes == 90
    policy.remove("large")
    assert policy.again.num_bytes == 0


def test_admission_on_second_use_forgets_the_oldest():
    admission = SecondUse(limit=2)
    assert [admission.admits(key) for key in "aabcdb"] == [False, True, False, False, False, False]
    assert admission.admits("d")


def test_an_unknown_policy():
    with pytest.raises(ConfigError, match="'lur'; it must be one of lru, arc. Did you mean 'lru'"):
        policy_named("lur", 10)

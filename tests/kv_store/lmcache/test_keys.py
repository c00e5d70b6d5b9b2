"""Names are those that LMCache's own code gives (`scripts/update_lmcache_golden.py`), or there are none."""

import json
from pathlib import Path

import pytest

from jaxpaged.core.kv_cache.block_hash import NONE_HASH
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.lmcache.keys import ChunkHasher, check_model_name, check_name_length, chunk_name, root_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "lmcache.json").read_text(encoding="utf-8"))
TOKENS = [(i * i * 7919 + 13 * i) % 151_936 if i % 50 else 0 for i in range(900)]


def names_of(hasher, case):
    parent, size = hasher.root, case["chunk_size"]
    for start in range(0, len(TOKENS) - size + 1, size):
        parent = hasher.hash(parent, TOKENS[start : start + size])
        yield chunk_name(case["model"], case["world_size"], case["world_size"] - 1, parent, case["dtype"])


@pytest.mark.parametrize(("algorithm", "seed"), sorted({(c["algorithm"], c["seed"]) for c in GOLDEN["names"]}, key=str))
def test_names_are_lmcaches(algorithm, seed):
    hasher = ChunkHasher(algorithm, seed)
    cases = [case for case in GOLDEN["names"] if (case["algorithm"], case["seed"]) == (algorithm, seed)]
    assert len(cases) == 6
    for case in cases:
        names = list(names_of(hasher, case))
        assert len(names) == case["num_names"] and [*names[:2], names[-1]] == case["names"]


def test_hashes_below_zero_were_recorded_too():
    assert any("@-" in name for case in GOLDEN["names"] for name in case["names"])


def test_the_root_is_that_of_our_own_blocks():
    assert root_of("sha256_cbor", None) == int.from_bytes(NONE_HASH[:8], "big")
    assert ChunkHasher("sha256_cbor_64bit").hash(1, [2]) == ChunkHasher().hash(1, [2])


@pytest.mark.parametrize(
    ("algorithm", "seed", "said"),
    [
        ("sha256", None, "'sha256' is not followed here: it hashes pickles. Set pre_caching_hash_algorithm"),
        ("xxhash", "0", "it hashes pickles"),
        ("xxhash_cbor", "0", "xxhash_cbor"),
        ("sha256_cbot", None, "sha256_cbor"),
        ("builtin", None, "PYTHONHASHSEED is not set"),
        ("builtin", "random", "'random'"),
        ("builtin", "4294967296", "Set it to a number"),
    ],
)
def test_what_nobody_can_follow_is_refused_by_name(algorithm, seed, said):
    with pytest.raises(ConfigError, match=said):
        ChunkHasher(algorithm, seed)


@pytest.mark.parametrize("model", ["", "a@b", " a", "m" * 120])
def test_models_without_a_name_are_refused(model):
    def check(model):
        check_model_name(model)
        check_name_length(model, 8, "bfloat16")

    check("m" * 100)
    with pytest.raises(ConfigError, match="the setting model"):
        check(model)

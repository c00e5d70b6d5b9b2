"""Block hashes against cbor2 and hashlib, which routers would use."""

import hashlib

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.kv_cache.block_hash import NONE_HASH, BlockHasher, extra_keys
from jaxpaged.core.request import Request
from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.core.simulation import adapter, picture

VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-(2**64), 2**64 - 1), st.binary(max_size=40), st.text(max_size=300)),
    lambda inner: st.lists(inner, max_size=30),
    max_leaves=40,
)


def make_request(token_ids, **fields) -> Request:
    message = EngineCoreRequest("r", token_ids, SamplingParams(max_tokens=4), 0.0, **fields)
    return Request(message, max_model_len=10**6, arrival_order=0, num_groups=1)


def hashes_of(token_ids, block_size=4, **fields) -> list[bytes]:
    request = make_request(token_ids, **fields)
    BlockHasher(block_size).extend(request)
    return request.block_hashes


@given(VALUES)
def test_cbor_is_what_cbor2_calls_canonical(value):
    assert encode_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("n", [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, -1, -24, -25, -(2**64)])
def test_cbor_integers_take_the_shortest_form(n):
    assert encode_cbor(n) == cbor2.dumps(n, canonical=True)


def test_integers_beyond_64_bits_are_refused():
    with pytest.raises(OverflowError, match="more than 8 bytes"):
        encode_cbor(2**64)


@given(st.lists(st.integers(0, 300_000), max_size=50), st.sampled_from([1, 4, 16, 30]), st.booleans())
def test_a_hash_is_sha256_of_the_cbor_of_parent_tokens_and_extra_keys(token_ids, block_size, salted):
    salt = "pepper" if salted else None
    parent, expected = NONE_HASH, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra = [["cache_salt", salt]] if salted and start == 0 else None
        message = cbor2.dumps([parent, token_ids[start : start + block_size], extra], canonical=True)
        parent = hashlib.sha256(message).digest()
        expected.append(parent)
    assert hashes_of(token_ids, block_size, cache_salt=salt) == expected


def test_the_first_parent_is_a_known_constant():
    assert hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest() == NONE_HASH
    assert len(NONE_HASH) == 32


def test_hashes_grow_with_the_tokens_and_are_computed_once():
    request, hasher = make_request(list(range(7))), BlockHasher(4)
    hasher.extend(request)
    first = list(request.block_hashes)
    assert len(first) == 1
    request.all_token_ids += [7, 8, 9, 10, 11]
    hasher.extend(request)
    assert request.block_hashes[:1] == first
    assert request.block_hashes == hashes_of(list(range(12)))


def test_a_token_changes_its_block_and_all_after_it():
    tokens = list(range(16))
    changed = [*tokens[:5], 99, *tokens[6:]]
    same = [a == b for a, b in zip(hashes_of(tokens), hashes_of(changed))]
    assert same == [True, False, False, False]


def test_adapter_and_salt_separate_equal_prompts():
    tokens = list(range(8))
    variants = [hashes_of(tokens), hashes_of(tokens, lora=adapter("a")), hashes_of(tokens, lora=adapter("b"))]
    variants += [hashes_of(tokens, lora=adapter("a", digest="1"))]
    variants += [hashes_of(tokens, cache_salt="s"), hashes_of(tokens, cache_salt="s", lora=adapter("a"))]
    for block_idx in range(2):
        assert len({hashes[block_idx] for hashes in variants}) == len(variants)


def test_an_image_is_named_in_every_block_that_it_touches():
    request = make_request([0] * 16, mm_features=[picture("image", 6, 4)], lora=adapter("a"), cache_salt="s")
    name, lora = b"image".ljust(32, b".").hex(), ("lora", "a", "/adapters/a", "0")
    assert [extra_keys(request, block_idx, 4) for block_idx in range(4)] == [
        (lora, ("cache_salt", "s")),
        (lora, ("mm", name, 2)),
        (lora, ("mm", name, -2)),
        (lora,),
    ]


@given(st.lists(st.integers(0, 9), max_size=12), st.sampled_from([1, 4, 16, 30]))
def test_each_block_finds_the_pictures_that_it_has_tokens_of(gaps, block_size):
    features, end = [], 0
    for number, gap in enumerate(gaps):
        features.append(picture(str(number), end + gap, 1 + (gap * 7) % 23))
        end = features[-1].offset + features[-1].length
    request = make_request([0] * (end + 9), mm_features=features)
    for block_idx in range((end + 9) // block_size + 1):
        block = range(block_idx * block_size, (block_idx + 1) * block_size)
        touching = [
            each for each in features if any(place in block for place in range(each.offset, each.offset + each.length))
        ]
        expected = tuple(("mm", each.key.hex(), each.offset - block.start) for each in touching)
        assert extra_keys(request, block_idx, block_size) == (expected or None)


def test_blocks_without_extra_keys_have_none():
    assert extra_keys(make_request([0] * 8, mm_features=[picture("image", 0, 4)]), 1, 4) is None
    assert extra_keys(make_request([0] * 8, cache_salt="s"), 1, 4) is None

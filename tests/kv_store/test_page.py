"""A page gives back what was written, or PageError: whatever is flipped, cut off, or another's."""

import json

import cbor2
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.errors import PageError
from jaxpaged.kv_store import page
from jaxpaged.kv_store.buffers import aligned_empty, joined
from jaxpaged.kv_store.page import PageHeader, PageKey, decode, encode, namespace
from tests.kv_store.pages import SPACE, key_of, page_of, scaled_page_of, values_of

SECRET = b"a shared secret"


@pytest.mark.parametrize("dtype", page.DTYPES.values(), ids=str)
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_page_comes_back_as_it_was(dtype, secret):
    shape = (2, 1, 1, 1, 64) if dtype.name == page.SNAPSHOT else (1, 2, 4, 2, 8)
    values = np.arange(2 * 4 * 2 * 8).reshape(shape).astype(dtype)
    written = PageHeader(SPACE, key_of(1), None, (5, 6, 7, 2**32 - 1))
    whole = joined(encode(written, values, secret))
    header, found = decode(whole, expect_namespace=SPACE, key=key_of(1), token_ids=[5, 6, 7, 2**32 - 1], secret=secret)
    assert (header.parent, header.token_ids, header.dtype) == (None, (5, 6, 7, 2**32 - 1), dtype.name)
    assert found.dtype == dtype and found.tobytes() == values.tobytes()
    assert found.ctypes.data % 64 == 0 and not found.flags.writeable


def test_bytes_are_snapshots_which_have_neither_tokens_nor_scales():
    header = PageHeader(SPACE, key_of(1), None, (5, 6, 7, 8))
    with pytest.raises(PageError, match=r"the shape \(1, 2, 4, 2, 8\)"):
        encode(header, np.zeros((1, 2, 4, 2, 8), np.uint8))
    with pytest.raises(PageError, match="scales of uint8"):
        encode(header, np.zeros((1, 1, 1, 1, 8), np.uint8), None, np.ones((1, 1, 1, 1), np.float32))


def test_pieces_of_arrays_that_are_not_contiguous():
    pool = values_of(1, layers=6)
    header = PageHeader(SPACE, key_of(1), None, (1, 2, 3, 4))
    for part in (pool[::2], pool[:, :, :, :, ::2]):
        found = decode(joined(encode(header, part)), expect_namespace=SPACE, key=key_of(1))[1]
        assert np.array_equal(found, part)
    assert len(encode(header, pool[::2])) == 4  # views of the three layers, nothing copied
    assert np.shares_memory(np.frombuffer(encode(header, pool[::2])[1], np.uint8), pool.view(np.uint8))


def test_a_page_is_a_safetensors_buffer():
    whole = page_of(3)[2]
    ((name, tensor),) = safetensors.deserialize(whole)
    assert (name, tensor["dtype"], tensor["shape"]) == ("kv", "BF16", [2, 2, 4, 2, 8])
    assert bytes(tensor["data"]) == values_of(3).tobytes()
    length = int.from_bytes(whole[:8], "little")
    said = json.loads(whole[8 : 8 + length])["__metadata__"]
    assert (8 + length) % 64 == 0
    assert (said["tokens"], said["group"], said["namespace"]) == ("3,7,8,9", "0", SPACE)
    assert bytes.fromhex(said["hash"]) == key_of(3).block_hash


@pytest.mark.parametrize("secret", [None, SECRET])
def test_no_bit_can_be_flipped(secret):
    key, _, whole = page_of(4, secret, layers=2, head_dim=4)
    damaged = bytearray(whole)
    for position in range(len(damaged)):
        damaged[position] ^= 1 << position % 8
        with pytest.raises(PageError):
            decode(damaged, expect_namespace=SPACE, key=key, secret=secret)
        damaged[position] ^= 1 << position % 8
    decode(damaged, expect_namespace=SPACE, key=key, secret=secret)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_values_of_8_bits_have_scales(secret):
    key, values, scales, whole = scaled_page_of(4, secret)
    header, found = decode(whole, expect_namespace=SPACE, key=key, version=page.SCALED, dtype="int8", secret=secret)
    assert np.array_equal(found, values) and np.array_equal(page.scales_of(whole, header), scales)
    tensors = dict(safetensors.deserialize(whole))
    assert [tensors[name]["dtype"] for name in ("scales", "kv")] == ["F32", "I8"]
    assert bytes(tensors["scales"]["data"]) == scales.tobytes() and tensors["scales"]["shape"] == [2, 2, 4, 2]
    with pytest.raises(PageError, match="version is 2, not 1"):
        decode(whole, expect_namespace=SPACE, key=key, version=page.VERSION, secret=secret)
    exact = joined(encode(PageHeader(SPACE, key, None, (4, 7, 8, 9)), values, secret))
    assert page.scales_of(exact, decode(exact, expect_namespace=SPACE, key=key, secret=secret)[0]) is None
    with pytest.raises(PageError, match="version is 1, not 2"):
        decode(exact, expect_namespace=SPACE, key=key, version=page.SCALED, secret=secret)
    damaged = bytearray(whole)
    for position in range(len(damaged)):
        damaged[position] ^= 1 << position % 8
        with pytest.raises(PageError):
            decode(damaged, expect_namespace=SPACE, key=key, secret=secret)
        damaged[position] ^= 1 << position % 8


def test_a_reader_of_exact_pages_refuses_scales_by_the_version(monkeypatch):
    whole = scaled_page_of(4)[3]
    monkeypatch.setattr(page, "SCALED", page.VERSION)  # as programs were before there were any
    with pytest.raises(PageError, match="version '2'"):
        decode(whole, expect_namespace=SPACE, key=key_of(4))


def test_scales_that_cannot_be():
    header, values = PageHeader(SPACE, key_of(1), None, (1, 2, 3, 4)), values_of(1)
    with pytest.raises(PageError, match="scales of bfloat16"):
        encode(header, values, None, np.ones(values.shape[:-1], np.float32))
    eight = values.astype(np.int8)
    for scales in (np.ones(values.shape[:-1]), np.ones(values.shape, np.float32)):
        with pytest.raises(PageError, match="cannot have scales"):
            encode(header, eight, None, scales)
    whole = scaled_page_of(4)[3]
    changes = [
        set_field("page", "1"),
        set_field("scales", ""),
        set_field("scales", "x" * 8),
        set_tensor("dtype", "F16"),
    ]
    changes += [lambda fields: fields["__metadata__"].pop("scales"), lambda fields: fields.pop("scales")]
    changes += [lambda fields: fields["scales"].__setitem__("dtype", "I32")]
    assert forged(whole, lambda fields: None) == whole
    for change in changes:
        with pytest.raises(PageError):
            decode(forged(whole, change), expect_namespace=SPACE, key=key_of(4))


def test_nothing_can_be_cut_off_or_added():
    key, _, whole = page_of(4)
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        with pytest.raises(PageError, match="truncated|bytes"):
            decode(whole[:length], expect_namespace=SPACE, key=key)
    with pytest.raises(PageError, match=f"has {len(whole) + 1} bytes"):
        decode(whole + b"\0", expect_namespace=SPACE, key=key)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"expect_namespace": namespace(weights="v2")}, "namespace"),
        ({"key": key_of(5)}, "key"),
        ({"key": key_of(4, group=1)}, "key is .*_g0, not .*_g1"),
        ({"token_ids": [4, 7, 8, 10]}, "token_ids"),
        ({"dtype": "float16"}, "dtype is 'bfloat16', not 'float16'"),
        ({"shape": (2, 2, 4, 2, 16)}, "shape"),
        ({"secret": SECRET}, "damaged or is signed with another secret"),
    ],
)
def test_a_page_of_another_is_none(other, said):
    key, _, whole = page_of(4)
    asked = {"expect_namespace": SPACE, "key": key, "token_ids": (4, 7, 8, 9), "shape": (2, 2, 4, 2, 8)}
    decode(whole, **asked)
    with pytest.raises(PageError, match=said):
        decode(whole, **asked | other)


def test_a_signed_page_needs_its_secret():
    key, _, whole = page_of(4, SECRET)
    for secret in (None, b"another"):
        with pytest.raises(PageError, match="signed"):
            decode(whole, expect_namespace=SPACE, key=key, secret=secret)


def test_a_checksum_is_no_signature_but_a_signed_page_has_none_that_can_be_kept_by_another_content():
    pattern = (0xEDB88320 << 1 | 1).to_bytes(5, "little")  # CRC-32's polynomial: adding it changes no CRC
    for secret in (None, SECRET):
        key, _, whole = page_of(4, secret)
        other = whole[:-9] + bytes(a ^ b for a, b in zip(whole[-9:-4], pattern)) + whole[-4:]
        if secret is None:
            assert decode(other, expect_namespace=SPACE, key=key)[1].tobytes() != values_of(4).tobytes()
            continue
        with pytest.raises(PageError, match="Layer 1 of the page is damaged"):
            decode(other, expect_namespace=SPACE, key=key, secret=secret)


def forged(whole, change, secret=None):
    """The page with a changed header, whose check is right again."""
    length = int.from_bytes(whole[:8], "little")
    fields = json.loads(whole[8 : 8 + length])
    change(fields)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -(8 + len(text)) % 64)
    head = len(text).to_bytes(8, "little") + text
    check = page.check_of(head, secret)
    return head[: page.CHECK_START] + check + head[page.CHECK_END :] + whole[8 + length :]


def set_field(name, value):
    return lambda fields: fields["__metadata__"].__setitem__(name, value)


def set_tensor(name, value):
    return lambda fields: fields["kv"].__setitem__(name, value)


@pytest.mark.parametrize(
    "change",
    [
        *(set_field("page", value) for value in ("2", "3", "01", None, 1)),
        *(set_field("group", value) for value in ("-1", "99999", "x", "9" * 5000, " 0")),
        *(set_field("tokens", value) for value in ("", "1,2", "1,2,3,-4", "1,2,3,4294967296", "1," * 70000 + "1")),
        *(set_field("hash", value) for value in ("", "zz", "00" * 65, "\u00e9", [1])),
        *(set_field("namespace", value) for value in ("", "../../etc", 7, SPACE.upper())),
        *(set_field("layers", value) for value in ("", "00000000", "\u00e9,\u00e9", "00000000,00000000", None)),
        *(set_field("checksum", value) for value in ("sha256", "none")),
        *(set_tensor("shape", value) for value in ([], [2, 2, 4, 2], [2, 2, 4, 2, 9], [2, 2, 4, 2, -8], None)),
        *(set_tensor("shape", [*value, 8]) for value in ([2.0, 2, 4, 2], [2, 3, 4, 2], [1 << 40, 2, 4, 2])),
        *(set_tensor("dtype", value) for value in ("F64", "BF17", [], "F16")),
        set_tensor("data_offsets", [0, 1]),
        set_field("more", "1"),
        lambda fields: fields.pop("kv"),
        lambda fields: fields.__setitem__("__metadata__", {"check": "0" * 64}),
    ],
)
def test_headers_with_a_right_check_and_wrong_content(change):
    key, _, whole = page_of(4)
    assert forged(whole, lambda fields: None) == whole
    with pytest.raises(PageError):
        decode(forged(whole, change), expect_namespace=SPACE, key=key, dtype="bfloat16")


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_no_page(content, begins_well):
    text = page.PREFIX + content if begins_well else content
    with pytest.raises(PageError):
        decode(len(text).to_bytes(8, "little") + text, expect_namespace=SPACE, key=key_of(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": "../x"},
        {"key": PageKey(b"", 0)},
        {"key": PageKey(b"x" * 65, 0)},
        {"key": PageKey(b"x", -1)},
        {"parent": b""},
        {"token_ids": (1, 2, 3)},
        {"token_ids": (1, 2, 3, -4)},
        {"token_ids": ()},
    ],
)
def test_a_page_that_no_reader_would_take_is_not_written(wrong):
    fields = {"namespace": SPACE, "key": key_of(1), "parent": None, "token_ids": (1, 2, 3, 4)} | wrong
    with pytest.raises(PageError, match="cannot have"):
        encode(PageHeader(**fields), values_of(1))


def test_limits_hold_before_anything_is_read():
    huge = (page.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + page.PREFIX + b" " * 64
    with pytest.raises(PageError, match="too long"):
        page.header_end(huge)
    with pytest.raises(PageError, match="the shape"):
        encode(PageHeader(SPACE, key_of(1), None, (1,)), np.zeros((1, 2, 1, 1), np.float32))


def test_layers_are_checked_as_they_come():
    key, _, whole = page_of(4)
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    header, start = page.decode_header(memoryview(damaged)[: page.header_end(damaged)])
    assert start == page.header_end(damaged)
    values = decode(damaged, expect_namespace=SPACE, key=key, verify=False)[1]
    page.check_layer(header, 0, values[0])
    with pytest.raises(PageError, match="Layer 1"):
        page.check_layer(header, 1, values[1])


def test_a_namespace_follows_from_its_facts_alone():
    facts = {"weights": "v1", "rope": {"theta": 1e4, "factor": 0.1}, "layers": [1, 2], "causal": True}
    assert namespace(**facts) == namespace(**dict(reversed(facts.items())))
    assert len({namespace(**facts | {"causal": value}) for value in (True, 1, "1", None, 1.0)}) == 5
    with pytest.raises(TypeError, match="canonical"):
        namespace(weights=object())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN)
def test_cbor_is_canonical(value):
    assert encode_cbor(value) == cbor2.dumps(value, canonical=True)


def test_memory_is_aligned():
    assert all(aligned_empty(size).ctypes.data % 64 == 0 for size in (1, 63, 4096))
    assert bytes(joined([b"ab", np.frombuffer(b"cd", np.uint8), memoryview(b"e")])) == b"abcde"

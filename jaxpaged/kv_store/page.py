"""A page: the keys and values of one block of tokens in one KV group, as any framework can read them.

A page is a safetensors buffer. Its tensor `kv` has the axes [layers of the group, 2, tokens, KV heads, head dim]
(1 in place of 2 for latents), little-endian, without the padding of a backend's layout. A snapshot of a recurrent state
is a page, too, that of the tokens in front of it: its bytes, [layers of the group, 1, 1, 1, bytes]. Keys and values
that were rounded to 8 bits have a tensor `scales` before it, float32, with all its axes but the last: a number times
its scale is what is meant. `__metadata__` says whose they are:

    check      SHA-256 of the header with this field's digits as zeros; HMAC-SHA256 where there is a secret
    page       the version of this format: 1, or 2 where there are scales, so that who knows none refuses them
    namespace  digest of everything besides tokens that keys and values depend on (`namespace`)
    hash       content hash of the block, which covers all tokens before it too
    group      index of the KV group
    parent     content hash of the block before; empty for the first
    tokens     the block's token ids
    checksum   of what kind `layers` are: crc32, or sha256 where there is a secret
    layers     a checksum for each layer of `kv`, so that layers can be used as they come
    scales     the checksum of `scales`, where there are any

`check` comes first, at a fixed place, so nothing is parsed before the header is known to be whole. The header has
one spelling only: what is parsed must give the same bytes again. It ends at a multiple of 64, where the tensor begins.
Checksums find accidents. Who can write to a store can make pages with right checksums, and whoever writes keys and
values writes the answers: a store that others may write to needs a secret.
"""

import hashlib
import hmac
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpaged.encoding.cbor import Plain, encode_cbor
from jaxpaged.errors import PageError
from jaxpaged.kv_store.buffers import ALIGNMENT, Buffer, bytes_of

VERSION, SCALED = 1, 2
"""Without and with scales."""
SCALE_BYTES = 4
MAX_HEADER_BYTES = 1 << 20
MAX_PAGE_BYTES = 1 << 32
MAX_TOKENS = 1 << 16
MAX_LAYERS = 1 << 12
MAX_GROUPS = 1 << 10

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""What keys and values may be, by the names of safetensors; the last one are the bytes of snapshots."""
SAFETENSORS_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
SNAPSHOT = "uint8"
EIGHT_BITS = frozenset(dtype.name for dtype in DTYPES.values() if dtype.itemsize == 1) - {SNAPSHOT}
"""What can have scales."""

LENGTH_BYTES = 8
PREFIX = b'{"__metadata__":{"check":"'
CHECK_START = LENGTH_BYTES + len(PREFIX)
CHECK_END = CHECK_START + 64
NO_CHECK = b"0" * 64


class PageKey(NamedTuple):
    """What a page is found by, within a namespace."""

    block_hash: bytes
    group: int

    @property
    def file_name(self) -> str:
        return f"{self.block_hash.hex()}_g{self.group}"


class PageContent(NamedTuple):
    """The keys and values of one page: of which tokens, behind which page."""

    key: PageKey
    parent: bytes | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PageHeader:
    """What a page says about itself. `encode` fills in the fields from `dtype` (numpy's name of that of `kv`) on."""

    namespace: str
    key: PageKey
    parent: bytes | None
    token_ids: tuple[int, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    checksums: tuple[str, ...] = ()
    version: int = VERSION
    scales: str = ""
    """The checksum of the scales; empty: there are none."""


def namespace(**facts: Plain) -> str:
    """64 hexadecimal digits for everything that keys and values depend on besides tokens.

    For example the weights' version, the model's configuration, its rope and the cache's dtype: pages are shared by
    engines with equal facts, and by no others.
    """
    return hashlib.sha256(encode_cbor(facts)).hexdigest()


def encode(
    header: PageHeader, array: np.ndarray, secret: bytes | None = None, scales: np.ndarray | None = None
) -> list[Buffer]:
    """The page in pieces, to be written one behind the other. The later ones are views of `array` where it allows.

    `scales`, float32, are those of an array of 8 bits. Raises PageError for what no reader would accept.
    """
    layers = [flat(layer) for layer in array]
    header = replace(
        header,
        dtype=array.dtype.name,
        shape=array.shape,
        checksums=tuple(checksum(each, secret) for each in layers),
        version=VERSION if scales is None else SCALED,
        scales="" if scales is None else checksum(flat(scales), secret),
    )
    check_header(header)
    if scales is not None and (scales.dtype != np.float32 or scales.shape != array.shape[:-1]):
        raise PageError(f"A page of shape {array.shape} cannot have scales {scales.dtype} {scales.shape}.")
    pieces: list[Buffer] = [header_bytes(header, secret)]
    if scales is not None:
        pieces.append(bytes_of(flat(scales)))
    if array.flags.c_contiguous:
        return [*pieces, bytes_of(flat(array))]
    return [*pieces, *map(bytes_of, layers)]


def decode(
    buffer: Buffer,
    *,
    expect_namespace: str | None,
    key: PageKey,
    token_ids: Sequence[int] | None = None,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    version: int | None = None,
    secret: bytes | None = None,
    verify: bool = True,
) -> tuple[PageHeader, np.ndarray]:
    """The header and a read-only view of `kv`, whose `scales_of` belong to it where the version is SCALED. Raises
    PageError saying what is wrong with the page.

    What is None is not compared; an engine always has a namespace, and expects a version. `verify=False` leaves the
    checksums of scales and layers out, for bytes that were checked before (`Tier.get`) or that are checked as they come
    (`check_scales`, `check_layer`).
    """
    view = bytes_of(buffer)
    header, start = decode_header(view, secret)
    expected: dict[str, Any] = {
        "namespace": expect_namespace,
        "key": key,
        "token_ids": None if token_ids is None else tuple(token_ids),
        "dtype": dtype,
        "shape": None if shape is None else tuple(shape),
        "version": version,
    }
    for name, value in expected.items():
        found = getattr(header, name)
        if value is not None and found != value:
            raise PageError(f"The page is another's: its {name} is {shown(found)}, not {shown(value)}. Do not use it.")
    if view.nbytes != start + payload_bytes(header):
        raise PageError(f"The page has {view.nbytes} bytes; its header says {start + payload_bytes(header)}.")
    array = np.frombuffer(view, dtype_named(header.dtype), offset=start + scale_bytes(header)).reshape(header.shape)
    array.flags.writeable = False
    if verify and (scales := scales_of(view, header)) is not None:
        check_scales(header, scales, secret)
    for layer in range(len(array) if verify else 0):
        check_layer(header, layer, array[layer], secret)
    return header, array


def scales_of(buffer: Buffer, header: PageHeader) -> np.ndarray | None:
    """A read-only view of the scales of a page that was decoded: [layers, 2, tokens, KV heads]; None: it has none."""
    if not header.scales:
        return None
    count, start = math.prod(header.shape[:-1]), header_end(buffer)
    scales = np.frombuffer(bytes_of(buffer), "<f4", count, start).reshape(header.shape[:-1])
    scales.flags.writeable = False
    return scales


def check_scales(header: PageHeader, scales: np.ndarray, secret: bytes | None = None) -> None:
    """Raise PageError unless these contiguous scales are those that were written."""
    found = checksum(flat(scales), secret)
    if found != header.scales:
        raise PageError(f"The scales of the page are damaged: checksum {found}, not {header.scales}.")


def check_layer(header: PageHeader, layer: int, values: np.ndarray, secret: bytes | None = None) -> None:
    """Raise PageError unless the contiguous values of one layer are those that were written."""
    found = checksum(flat(values), secret)
    if found != header.checksums[layer]:
        raise PageError(f"Layer {layer} of the page is damaged: checksum {found}, not {header.checksums[layer]}.")


def decode_header(buffer: Buffer, secret: bytes | None = None) -> tuple[PageHeader, int]:
    """The header at the beginning of `buffer`, and where the tensor begins. The rest may be missing.

    Raises PageError where it is damaged, of another version, signed otherwise, or beyond the limits.
    """
    view = bytes_of(buffer)
    end = header_end(view)
    if view.nbytes < end:
        raise PageError(f"The page is truncated: it has {view.nbytes} bytes, and its header ends at {end}.")
    head = bytes(view[:end])
    if not hmac.compare_digest(head[CHECK_START:CHECK_END], check_of(head, secret)):
        signed = " or is signed with another secret, or with none" if secret else " or is signed with a secret"
        raise PageError(f"The header of the page is damaged{signed}: its digest does not match.")
    try:
        header = parsed(json.loads(head[LENGTH_BYTES:]))
        check_header(header)
        canonical = header_bytes(header, secret)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PageError(f"The header of the page is malformed: {type(error).__name__}: {error}.") from None
    if canonical != head:
        raise PageError("The header of the page is not spelled as this format does.")
    return header, end


def header_end(beginning: Buffer) -> int:
    """Where a header ends that begins so: for who reads a page piece by piece, from at least CHECK_END bytes."""
    view = bytes_of(beginning)
    if view.nbytes < CHECK_END:
        raise PageError(f"The page is truncated: {view.nbytes} bytes are too few for a header.")
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    if view[LENGTH_BYTES:CHECK_START] != PREFIX or length > MAX_HEADER_BYTES:
        raise PageError(f"This is no page: it does not begin like one, or its header of {length} bytes is too long.")
    return LENGTH_BYTES + length


def parsed(fields: dict[str, Any]) -> PageHeader:
    """The header that a JSON object says. ValueError, KeyError or TypeError for what it cannot be."""
    said, tensor = fields["__metadata__"], fields["kv"]
    if said["page"] not in (str(VERSION), str(SCALED)):
        raise ValueError(f"it has version {said['page']!r:.20}, and this program reads {VERSION} and {SCALED}")
    if said["tokens"].count(",") >= MAX_TOKENS:
        raise ValueError(f"it has more than {MAX_TOKENS} tokens")
    return PageHeader(
        namespace=said["namespace"],
        key=PageKey(bytes.fromhex(said["hash"]), int(said["group"])),
        parent=bytes.fromhex(said["parent"]) if said["parent"] else None,
        token_ids=tuple(map(int, said["tokens"].split(","))),
        dtype=DTYPES[tensor["dtype"]].name,
        shape=tuple(tensor["shape"]),
        checksums=tuple(said["layers"].split(",")),
        version=int(said["page"]),
        scales=said.get("scales", ""),
    )


def check_header(header: PageHeader) -> None:
    """Raise PageError for values that no page may have. Nothing is allocated before."""
    shape, tokens = header.shape, header.token_ids
    problems = {
        f"the namespace {shown(header.namespace)}": not re.fullmatch("[0-9a-f]{12,128}", header.namespace),
        f"a hash of {len(header.key.block_hash)} bytes": not 1 <= len(header.key.block_hash) <= 64,
        f"the parent {shown(header.parent)}": header.parent is not None and not 1 <= len(header.parent) <= 64,
        f"the group {header.key.group}": not 0 <= header.key.group < MAX_GROUPS,
        f"{len(tokens)} tokens": not 1 <= len(tokens) <= MAX_TOKENS,
        "token ids outside of 32 bits": not all(0 <= token < 1 << 32 for token in tokens),
        f"the type {shown(header.dtype)}": header.dtype not in SAFETENSORS_NAMES,
        f"the shape {shown(shape)}": not is_shape(shape, 1 if header.dtype == SNAPSHOT else len(tokens)),
        f"version {header.version} and the scales {shown(header.scales)}": (header.version == SCALED)
        is not bool(header.scales),
        f"scales of {header.dtype}": bool(header.scales) and header.dtype not in EIGHT_BITS,
        f"{len(header.checksums)} checksums": len(header.checksums) != (shape[0] if shape else 0),
    }
    wrong = [name for name, is_wrong in problems.items() if is_wrong]
    if not wrong and payload_bytes(header) > MAX_PAGE_BYTES:
        wrong.append(f"{payload_bytes(header)} bytes, more than {MAX_PAGE_BYTES}")
    if wrong:
        raise PageError(f"A page cannot have {', '.join(wrong)}.")


def is_shape(shape: Sequence[Any], num_tokens: int) -> bool:
    """[layers, 2 or 1, tokens, heads, head dim], with no axis that is empty."""
    whole = all(type(extent) is int and extent > 0 for extent in shape)
    return len(shape) == 5 and whole and shape[0] <= MAX_LAYERS and shape[1] <= 2 and shape[2] == num_tokens


def header_bytes(header: PageHeader, secret: bytes | None) -> bytes:
    """The one spelling of a header: its length, JSON, and spaces up to where the tensor may begin."""
    said = {
        "check": NO_CHECK.decode(),
        "page": str(header.version),
        "namespace": header.namespace,
        "hash": header.key.block_hash.hex(),
        "group": str(header.key.group),
        "parent": (header.parent or b"").hex(),
        "tokens": ",".join(map(str, header.token_ids)),
        "checksum": "sha256" if secret else "crc32",
        "layers": ",".join(header.checksums),
    }
    said |= {"scales": header.scales} if header.scales else {}
    tensors = {"__metadata__": said, **tensors_of("kv", "scales", header.dtype, header.shape, 0, bool(header.scales))}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    length = len(text) + -(LENGTH_BYTES + len(text)) % ALIGNMENT
    if length > MAX_HEADER_BYTES:
        raise PageError(f"The header of a page would have {length} bytes, more than {MAX_HEADER_BYTES}.")
    head = length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)
    return head[:CHECK_START] + check_of(head, secret) + head[CHECK_END:]


def check_of(head: bytes, secret: bytes | None) -> bytes:
    """The digest of a header, whatever stands in its place."""
    covered = head[:CHECK_START] + NO_CHECK + head[CHECK_END:]
    found = hmac.new(secret, covered, hashlib.sha256) if secret else hashlib.sha256(covered)
    return found.hexdigest().encode()


def checksum(values: np.ndarray, secret: bytes | None) -> str:
    """Of a layer's bytes. It needs no secret of its own: the header, which has it, is signed."""
    return hashlib.sha256(values).hexdigest() if secret else f"{zlib.crc32(values):08x}"


def tensors_of(
    name: str, scales_name: str, dtype: str, shape: Sequence[int], start: int, is_scaled: bool
) -> dict[str, dict[str, Any]]:
    """What the header of a safetensors file says of a page's tensors, whose first byte is number `start`."""
    middle = start + SCALE_BYTES * math.prod(shape[:-1]) * is_scaled
    end = middle + math.prod(shape) * dtype_named(dtype).itemsize
    scales = {"dtype": "F32", "shape": list(shape[:-1]), "data_offsets": [start, middle]}
    values = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [middle, end]}
    return {scales_name: scales, name: values} if is_scaled else {name: values}


def payload_bytes(header: PageHeader) -> int:
    return scale_bytes(header) + math.prod(header.shape) * dtype_named(header.dtype).itemsize


def scale_bytes(header: PageHeader) -> int:
    return SCALE_BYTES * math.prod(header.shape[:-1]) if header.scales else 0


def flat(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def dtype_named(name: str) -> np.dtype:
    return DTYPES[SAFETENSORS_NAMES[name]]


def shown(value: Any) -> str:
    """A value in an error message: hashes as digits, and not a whole page of token ids."""
    if isinstance(value, PageKey):
        return value.file_name
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

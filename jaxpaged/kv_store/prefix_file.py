"""The keys and values of a text's beginning as one file, which another engine of the same model loads.

A safetensors file with a tensor for each page, `g<group>.t<first token>`, in the axes of a page, and before it, where
pages have scales, one of these, `g<group>.t<first token>.scales`. `__metadata__` says

    check      as in a page: SHA-256 of the header with this field's digits as zeros, an HMAC where there is a secret
    prefix     the version of this format: 1, or 2 where there are scales
    namespace  whose keys and values these are; `model` is its name, for people
    tokens     the ids of all tokens that the file covers
    hashes, parents, checksums    of each page, in the order of the tensors; its scales and values have one checksum

Of a group with a window the file has only what the token behind the beginning sees. A page knows its tokens by where
it begins and by the size of its tensor. Written aside and renamed, so that there is never half a file.
"""

import contextlib
import hmac
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.errors import PageError, UsageError
from jaxpaged.kv_store.buffers import ALIGNMENT, Buffer
from jaxpaged.kv_store.page import (
    CHECK_END,
    CHECK_START,
    DTYPES,
    EIGHT_BITS,
    LENGTH_BYTES,
    NO_CHECK,
    PREFIX,
    SCALED,
    SNAPSHOT,
    VERSION,
    PageContent,
    PageHeader,
    PageKey,
    check_of,
    checksum,
    encode,
    flat,
    is_shape,
    tensors_of,
)

MAX_HEADER_BYTES = 64 << 20
MAX_PAGES = 1 << 20


class PrefixInfo(NamedTuple):
    """What a file holds."""

    namespace: str
    model: str
    num_tokens: int
    num_pages: int
    num_bytes: int


class PlacedPage(NamedTuple):
    """A page, and the number of the first of its tokens."""

    content: PageContent
    first: int


@dataclass(frozen=True)
class PrefixHeader:
    """What the file says of itself; `checksums` are those of the pages."""

    namespace: str
    model: str
    token_ids: tuple[int, ...]
    dtype: str
    pages: tuple[PlacedPage, ...]
    shapes: tuple[tuple[int, ...], ...]
    checksums: tuple[str, ...] = ()
    is_scaled: bool = False

    @property
    def tensors(self) -> list[dict[str, dict[str, Any]]]:
        """What the header says of the tensors of each page, the one with the values last."""
        pages, end = [], 0
        for page, shape in zip(self.pages, self.shapes, strict=True):
            name = f"g{page.content.key.group}.t{page.first}"
            pages.append(tensors_of(name, f"{name}.scales", self.dtype, shape, end, self.is_scaled))
            end = pages[-1][name]["data_offsets"][1]
        return pages

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return next(reversed(self.tensors[-1].values()))["data_offsets"][1]


def write_prefix(
    path: Path, header: PrefixHeader, pages: Iterable[Sequence[np.ndarray]], secret: bytes | None
) -> PrefixInfo:
    """Write the pages of `header`, whose `checksums` are still empty, each as its values and, where it is so, scales.
    Raises UsageError where that cannot be done."""
    width = len(checksum(np.zeros(1, np.uint8), secret))
    blank = header_bytes(header, ["0" * width] * len(header.pages), secret)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(blank)
                checksums = []
                for arrays in pages:
                    content = np.concatenate([flat(each) for each in reversed(arrays)])
                    checksums.append(checksum(content, secret))
                    file.write(content)
                file.seek(0)
                file.write(header_bytes(header, checksums, secret))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Choose another place.") from None
    return info_of(header)


def info_of(header: PrefixHeader) -> PrefixInfo:
    return PrefixInfo(header.namespace, header.model, len(header.token_ids), len(header.pages), header.num_bytes)


class PrefixFile:
    """A file that was written so. Its header is checked when it is opened, its pages when they are read."""

    def __init__(self, path: Path, secret: bytes | None = None):
        """Raises UsageError for a path that cannot be read, PageError for what is no such file, or a damaged one."""
        self.path, self._secret = path, secret
        try:
            self._bytes: Any = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is empty"
            raise UsageError(f"{path} cannot be read: {reason}.") from None
        try:
            self.header, self._start = decoded(self._bytes, secret)
        except PageError as error:
            raise PageError(f"{path} is not used: {error}") from None
        wanted = self._start + self.header.num_bytes
        if wanted != len(self._bytes):
            raise PageError(f"{path} is not used: it has {len(self._bytes)} bytes, and its header says {wanted}.")

    def pages(self) -> Iterator[tuple[PageKey, list[Buffer]]]:
        """Every page with its key, as tiers take them. Raises PageError at one that is damaged."""
        header = self.header
        for page, tensors, wanted in zip(header.pages, header.tensors, header.checksums, strict=True):
            arrays = [self._tensor(said) for said in reversed(tensors.values())]
            if checksum(np.concatenate([flat(each) for each in reversed(arrays)]), self._secret) != wanted:
                raise PageError(f"{self.path} is damaged: the page at token {page.first} is not what was written.")
            said = PageHeader(header.namespace, page.content.key, page.content.parent, page.content.token_ids)
            values, *scales = arrays
            yield page.content.key, encode(said, values, self._secret, *scales)

    def _tensor(self, said: dict[str, Any]) -> np.ndarray:
        start, end = said["data_offsets"]
        content = np.asarray(self._bytes[self._start + start : self._start + end])
        return content.view(DTYPES[said["dtype"]]).reshape(said["shape"])


def header_bytes(header: PrefixHeader, checksums: Sequence[str], secret: bytes | None) -> bytes:
    """The beginning of the file, up to where its first tensor begins."""
    said = {
        "check": NO_CHECK.decode(),
        "prefix": str(SCALED if header.is_scaled else VERSION),
        "namespace": header.namespace,
        "model": header.model,
        "tokens": ",".join(map(str, header.token_ids)),
        "hashes": ",".join(page.content.key.block_hash.hex() for page in header.pages),
        "parents": ",".join((page.content.parent or b"").hex() for page in header.pages),
        "checksums": ",".join(checksums),
    }
    tensors = {name: tensor for page in header.tensors for name, tensor in page.items()}
    text = json.dumps({"__metadata__": said, **tensors}, separators=(",", ":")).encode()
    length = len(text) + -(LENGTH_BYTES + len(text)) % ALIGNMENT
    head = length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)
    return head[:CHECK_START] + check_of(head, secret) + head[CHECK_END:]


def decoded(view: np.ndarray, secret: bytes | None) -> tuple[PrefixHeader, int]:
    """The header of a file, and where its first tensor begins. Raises PageError."""
    length = int.from_bytes(bytes(view[:LENGTH_BYTES]), "little")
    begins_so = bytes(view[LENGTH_BYTES:CHECK_START]) == PREFIX
    if not begins_so or not CHECK_END <= LENGTH_BYTES + length <= min(len(view), MAX_HEADER_BYTES):
        raise PageError("it is no file of a beginning's keys and values, or it is cut off.")
    head = bytes(view[: LENGTH_BYTES + length])
    if not hmac.compare_digest(head[CHECK_START:CHECK_END], check_of(head, secret)):
        signed = "or signed with another secret, or with none" if secret else "or signed with a secret"
        raise PageError(f"its header is damaged, {signed}.")
    try:
        return parsed(json.loads(head[LENGTH_BYTES:])), len(head)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PageError(f"its header is malformed: {type(error).__name__}: {error}.") from None


def parsed(fields: dict[str, Any]) -> PrefixHeader:
    """What a JSON object says. ValueError, KeyError or TypeError for what it cannot be."""
    said = fields.pop("__metadata__")
    if said["prefix"] not in (str(VERSION), str(SCALED)):
        raise ValueError(f"it has version {said['prefix']!r:.20}, and this program reads {VERSION} and {SCALED}")
    is_scaled = said["prefix"] == str(SCALED)
    values = {name: tensor for name, tensor in fields.items() if not name.endswith(".scales")}
    token_ids = tuple(map(int, said["tokens"].split(",")))
    hashes, parents = (list(map(bytes.fromhex, said[name].split(","))) for name in ("hashes", "parents"))
    checksums = tuple(said["checksums"].split(","))
    if not len(values) == len(hashes) == len(parents) == len(checksums) <= MAX_PAGES:
        raise ValueError(f"it has {len(values)} pages, {len(hashes)} hashes and {len(checksums)} checksums")
    pages, shapes = [], []
    dtypes = {tensor["dtype"] for tensor in values.values()}
    (dtype,) = (DTYPES[name] for name in dtypes)
    if dtype.name == SNAPSHOT:
        raise ValueError("it has snapshots of states, and a file of a prefix has keys and values only")
    for (name, tensor), block_hash, parent in zip(values.items(), hashes, parents):
        group, first = (int(part[1:]) for part in name.split("."))
        shape = tuple(tensor["shape"])
        if not is_shape(shape, shape[2]):
            raise ValueError(f"the tensor {name!r:.40} has the shape {shape!r:.80}")
        own = token_ids[first : first + shape[2]]
        if len(own) != shape[2]:
            raise ValueError(f"the tensor {name!r:.40} reaches beyond the {len(token_ids)} tokens")
        pages.append(PlacedPage(PageContent(PageKey(block_hash, group), parent or None, own), first))
        shapes.append(shape)
    header = PrefixHeader(
        str(said["namespace"]),
        str(said["model"]),
        token_ids,
        dtype.name,
        tuple(pages),
        tuple(shapes),
        checksums,
        is_scaled,
    )
    wanted = {name: tensor for page in header.tensors for name, tensor in page.items()}
    if fields != wanted or (is_scaled and dtype.name not in EIGHT_BITS):
        raise ValueError("its tensors are of another shape or type than a prefix has, or lie elsewhere")
    return header

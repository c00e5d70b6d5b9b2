"""Canonical CBOR (RFC 8949, section 4.2.1): one text of bytes for one value, to be hashed. Nothing is ever decoded."""

import math
import struct
from collections.abc import Mapping

Plain = int | float | bytes | str | bool | tuple | list | Mapping | None


def encode_cbor(value: Plain) -> bytes:
    """Numbers, bytes, text, truth values, null, and arrays and maps of them. TypeError for anything else."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bool):
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return item_start(0, value) if value >= 0 else item_start(1, -1 - value)
    if isinstance(value, bytes):
        return item_start(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return item_start(3, len(text)) + text
    if isinstance(value, tuple | list):
        return item_start(4, len(value)) + b"".join(map(encode_cbor, value))
    if isinstance(value, Mapping):
        pairs = sorted((encode_cbor(name), encode_cbor(entry)) for name, entry in value.items())
        return item_start(5, len(pairs)) + b"".join(name + entry for name, entry in pairs)
    if isinstance(value, float):
        return encode_float(value)
    raise TypeError(f"{value!r} is of type {type(value).__name__}, which has no canonical CBOR here. Use plain values.")


def encode_float(value: float) -> bytes:
    """The shortest of 2, 4 and 8 bytes that holds the value exactly."""
    if math.isnan(value):
        return b"\xf9\x7e\x00"
    for start, code in ((b"\xf9", ">e"), (b"\xfa", ">f")):
        try:
            packed = struct.pack(code, value)
        except OverflowError:
            continue
        if struct.unpack(code, packed)[0] == value:
            return start + packed
    return b"\xfb" + struct.pack(">d", value)


def item_start(major_type: int, argument: int) -> bytes:
    """The shortest beginning of a data item: three bits of type, then the argument in 0, 1, 2, 4 or 8 bytes."""
    if argument < 24:
        return bytes((major_type << 5 | argument,))
    for code, num_bytes in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * num_bytes:
            return bytes((major_type << 5 | code,)) + argument.to_bytes(num_bytes, "big")
    raise OverflowError(f"{argument} needs more than 8 bytes; CBOR integers end there")

"""Protocol buffers' public wire format, as far as the news of one token needs it.

To make a message of the library, fill it in and have it encoded takes twice as long as to write its bytes, and that is
done for every token of every stream. `tests/entrypoints/grpc/test_wire_format.py` holds these bytes to the library's.
"""

from collections.abc import Sequence


def encoded(number: int) -> bytes:
    """A whole number that is not negative, seven bits a byte, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


VARINTS = tuple(map(encoded, range(2**14)))
"""The usual ones: most ids of tokens, and lengths of what they say."""
NUM_VARINTS = len(VARINTS)
TAGS = tuple(encoded(number << 3 | 2) for number in range(16))
"""Before a field of this number that says its length."""


def varint(number: int) -> bytes:
    return VARINTS[number] if number < NUM_VARINTS else encoded(number)


def nested(number: int, content: bytes) -> bytes:
    """Field `number`, up to 15, that holds a text or a message of these bytes."""
    return TAGS[number] + varint(len(content)) + content


def packed(number: int, values: Sequence[int]) -> bytes:
    """Field `number` that holds several numbers."""
    return nested(number, b"".join(map(varint, values)))

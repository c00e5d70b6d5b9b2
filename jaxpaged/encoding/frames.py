"""How a value that one process says to another becomes frames, and back.

A value is one msgpack frame, structs as arrays, followed by one frame for every numpy array in it. Nothing that is
received is ever run: types are known beforehand, and arrays hold plain numbers. This module knows no sockets.

msgspec (0.22) ends the process where a thread decodes a type of which another one is making the first decoder.
"""

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

PLAIN_KINDS = "biuf"
"""numpy's letters for truth values, integers and floating point numbers: what an array may hold."""
ONE_AT_A_TIME = threading.Lock()
"""Who makes a decoder."""


class FrameEncoder:
    """Makes frames of values. Not for several threads at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put_aside)
        self._arrays: list[memoryview] = []

    def encode(self, value: Any) -> list[Any]:
        """The frames of a value. Raises TypeError when it holds something that is not plain data."""
        self._arrays = []
        return [self._encoder.encode(value), *self._arrays]

    def _put_aside(self, value: Any) -> Any:
        """Arrays get a frame of their own, and in their place stand type, shape, and number of the frame."""
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in PLAIN_KINDS:
            raise TypeError(f"{value!r} cannot be sent to another process. Use plain values and arrays of numbers.")
        self._arrays.append(memoryview(np.ascontiguousarray(value)).cast("B") if value.size else memoryview(b""))
        return value.dtype.str, value.shape, len(self._arrays) - 1


class FrameDecoder:
    """Makes values of one type from frames. Not for several threads at a time."""

    def __init__(self, type: Any):
        with ONE_AT_A_TIME:
            self._decoder = msgspec.msgpack.Decoder(type, dec_hook=self._take_array)
        self._frames: Sequence[bytes] = ()

    def decode(self, frames: Sequence[bytes]) -> Any:
        """The value. Raises ValueError (msgspec's errors are such) when the frames are not one of this type."""
        if not frames:
            raise ValueError("the message has no value")
        self._frames = frames[1:]
        return self._decoder.decode(frames[0])

    def _take_array(self, type: Any, value: Any) -> np.ndarray:
        if type is not np.ndarray:
            raise ValueError(f"nothing of type {type} is ever sent")
        name, shape, number = msgspec.convert(value, tuple[str, tuple[int, ...], int])
        try:
            dtype = np.dtype(name)
        except TypeError:
            raise ValueError(f"an array has the unknown type {name!r}") from None
        if dtype.kind not in PLAIN_KINDS or not 0 <= number < len(self._frames):
            raise ValueError(f"an array of type {name!r} in frame {number} of {len(self._frames)} cannot be")
        array = np.frombuffer(self._frames[number], dtype)  # ValueError unless the length is a multiple
        if any(extent < 0 for extent in shape):
            raise ValueError(f"an array has the shape {shape}")
        return array.reshape(shape)

"""Embeddings of pictures as files in a folder that engines share: one engine encodes a picture, others read what it has
encoded.

`<namespace>/<key>/encoder_cache.safetensors` is the file of a picture. The key is the picture's (`identity.py`), the
namespace says what else embeddings depend on: the tower, its weights, the type. Before the folder, or in place of it,
may be memory of this engine: it keeps embeddings longer than the device does. A file has one tensor, `ec_cache`,
[embeddings, numbers of one], and in its header the SHA-256 of its bytes. It is written under another name and renamed,
so readers see all of it or nothing.

Nothing here is waited for by a step. Whatever goes wrong, a file that is missing, damaged or slow, is counted, and the
picture is encoded where it is needed.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxpaged.config.ec_transfer import ECTransfer
from jaxpaged.encoding.cbor import Plain, encode_cbor
from jaxpaged.errors import PageError
from jaxpaged.kv_store.threads import Threads
from jaxpaged.multimodal.byte_lru import ByteLRU
from jaxpaged.multimodal.embeddings import FLOATS, LENGTH_BYTES, Form

logger = logging.getLogger(__name__)

FILE, TENSOR = "encoder_cache.safetensors", "ec_cache"
NAMES = {dtype: name for name, dtype in FLOATS.items()}
NUM_READERS = 4
MOST_WAITING_BYTES = 256 << 20
"""Of embeddings that wait to be written. What comes beyond is not written."""
CLOSING_SECONDS = 10.0


def namespace(**facts: Plain) -> str:
    """64 hexadecimal digits for all that embeddings depend on besides the picture."""
    return hashlib.sha256(encode_cbor(facts)).hexdigest()


class EmbedsLoad:
    """Embeddings that may come. `embeds` once it is `done`; None if they do not."""

    def __init__(self, future: "Future[np.ndarray | None]", seconds: float):
        self.future, self._late_at = future, time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Until it is no longer waited for."""
        return 0.0 if self.future.done() else max(self._late_at - time.monotonic(), 0.0)

    @property
    def is_late(self) -> bool:
        return not self.future.done() and time.monotonic() >= self._late_at

    @property
    def embeds(self) -> np.ndarray | None:
        return self.future.result() if self.future.done() and not self.future.cancelled() else None


class EmbedsFolder:
    """The folder of one engine, from both sides: `save` for what encodes, `load` for what needs embeddings."""

    def __init__(self, transfer: ECTransfer, form: Form):
        self.transfer, self.form = transfer, form
        self._writer, self._readers = Threads(1, "embeds-writer"), Threads(NUM_READERS, "embeds-reader")
        self._lock, self._counts, self._waiting_bytes = threading.Lock(), Counter[str](), 0
        self._abandoned: set[Future[np.ndarray | None]] = set()  # late, and perhaps never done
        self._has_complained = False
        self._host = ByteLRU[tuple[str, bytes], np.ndarray](transfer.host_bytes, lambda embeds_EX: embeds_EX.nbytes)

    def stats(self) -> dict[str, int]:
        """Pictures since the start: what was written, found, and what went wrong."""
        names = "from_host", "saved", "save_failures", "saves_dropped", "loaded", "missing", "damaged", "late"
        return {f"ec_{name}": self._counts[name] for name in names}

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # ---- writing -------------------------------------------------------------------------------------

    def save(self, space: str, key: bytes, embeds_EX: np.ndarray) -> None:
        """Keep embeddings in memory, if they may be, and write them soon, unless they are there."""
        self._keep(space, key, embeds_EX)
        if self.transfer.folder is None:
            return
        with self._lock:
            if self._waiting_bytes + embeds_EX.nbytes > MOST_WAITING_BYTES:
                self._counts["saves_dropped"] += 1
                return
            self._waiting_bytes += embeds_EX.nbytes
        self._writer.submit(self._save, space, key, embeds_EX)

    def _save(self, space: str, key: bytes, embeds_EX: np.ndarray) -> None:
        path = self.path_of(space, key)
        part = path.with_name(f"{uuid.uuid4().hex}.part")
        try:
            if path.exists():
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(part, "wb") as file:
                    file.writelines(encoded(embeds_EX))
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
            self._count("saved")
        except OSError as error:
            self._count("save_failures")
            if not self._has_complained:
                logger.warning("embeddings of pictures cannot be written to %s: %s", path.parent, error)
            self._has_complained = True
        finally:
            with self._lock:
                self._waiting_bytes -= embeds_EX.nbytes

    def _keep(self, space: str, key: bytes, embeds_EX: np.ndarray) -> None:
        """Keep embeddings in memory, in place of those that were not used for longest."""
        if embeds_EX.nbytes > self.transfer.host_bytes:
            return
        with self._lock:
            self._host.remove((space, key))
            self._host.put((space, key), embeds_EX)

    def _kept(self, space: str, key: bytes) -> np.ndarray | None:
        with self._lock:
            embeds_EX = self._host.get((space, key))
            if embeds_EX is not None:
                self._counts["from_host"] += 1
        return embeds_EX

    # ---- reading -------------------------------------------------------------------------------------

    def load(self, space: str, key: bytes, num_embeds: int) -> EmbedsLoad | None:
        """Begin to read embeddings, or take them from memory. None: they will not come, without a folder, or since all
        threads still read files that were late."""
        embeds_EX = self._kept(space, key)
        if embeds_EX is not None and len(embeds_EX) == num_embeds:
            return EmbedsLoad(done(embeds_EX), self.transfer.load_seconds)
        if self.transfer.folder is None:
            return None
        self._abandoned = {each for each in self._abandoned if not each.done()}
        if len(self._abandoned) >= NUM_READERS:
            self._count("late")
            return None
        return EmbedsLoad(self._readers.submit(self._load, space, key, num_embeds), self.transfer.load_seconds)

    def abandon(self, load: EmbedsLoad) -> None:
        """What a load gives is of no use any more."""
        if load.is_late:
            self._count("late")
        if not load.future.cancel():
            self._abandoned.add(load.future)

    def _load(self, space: str, key: bytes, num_embeds: int) -> np.ndarray | None:
        path = self.path_of(space, key)
        try:
            embeds_EX = decoded(read_file(path, (num_embeds, self.form.numbers), self.form.dtype), self.form.dtype)
            self._count("loaded")
            self._keep(space, key, embeds_EX)
            return embeds_EX
        except FileNotFoundError:
            self._count("missing")
        except (PageError, OSError) as error:
            self._count("damaged")
            logger.warning("embeddings of a picture are not used, and it is encoded here: %s: %s", path, error)
            if isinstance(error, PageError):
                with contextlib.suppress(OSError):
                    path.unlink()  # so that it is written again
        return None

    def path_of(self, space: str, key: bytes) -> Path:
        assert self.transfer.folder is not None, "without a folder there are no files"
        return Path(self.transfer.folder) / space / key.hex() / FILE

    def close(self) -> None:
        """Write what was given, within some seconds."""
        self._readers.close(0.0, cancels=True)
        if not self._writer.close(CLOSING_SECONDS):
            logger.warning("embeddings of pictures are not all written to %s", self.transfer.folder)


def done(embeds_EX: np.ndarray) -> "Future[np.ndarray | None]":
    future: Future[np.ndarray | None] = Future()
    future.set_result(embeds_EX)
    return future


# ---- a file --------------------------------------------------------------------------------------


def encoded(embeds_EX: np.ndarray) -> Sequence[bytes | memoryview]:
    """A file, in pieces."""
    data = np.ascontiguousarray(embeds_EX).reshape(-1).view(np.uint8).data
    return [header_of(embeds_EX.shape, embeds_EX.dtype, hashlib.sha256(data).hexdigest()), data]


def header_of(shape: tuple[int, ...], dtype: np.dtype, digest: str) -> bytes:
    """What stands before the bytes of the embeddings. There is one spelling of it."""
    offsets = [0, int(np.prod(shape)) * dtype.itemsize]
    header = {
        "__metadata__": {"sha256": digest},
        TENSOR: {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_file(path: Path, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """The bytes of embeddings, uint8 [embeddings, bytes]. Raises PageError for a file with others or damaged ones, and
    OSError."""
    expected = header_of(shape, dtype, "0" * 64)
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != len(expected) + num_bytes:
            raise PageError(f"it has {size} bytes, not {len(expected) + num_bytes}.")
        header, data = file.read(len(expected)), np.empty(num_bytes, np.uint8)
        if file.readinto(data.data) != num_bytes:
            raise PageError("it ends before its end.")
    if header != header_of(shape, dtype, hashlib.sha256(data).hexdigest()):
        raise PageError("its header is another one, or its checksum.")
    return data.reshape(shape[0], -1)


def decoded(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Embeddings of their bytes. Raises PageError where some are no finite numbers."""
    embeds_EX = data.view(dtype)
    if not np.isfinite(embeds_EX).all():
        raise PageError("it has numbers that are not finite.")
    return embeds_EX

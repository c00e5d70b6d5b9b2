"""Files of embeddings: what is written is read again, and nothing else is."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.config.ec_transfer import ECTransfer
from jaxpaged.multimodal import embeds_folder
from jaxpaged.multimodal.embeds_folder import EmbedsFolder, Form, encoded, header_of, namespace

KEY, SPACE = b"k" * 32, namespace(weights="w")
DTYPES = [np.dtype(each) for each in (ml_dtypes.bfloat16, np.float16, np.float32)]


def embeds(dtype=DTYPES[0], seed=0):
    return np.random.default_rng(seed).normal(size=(5, 8)).astype(dtype)


@pytest.fixture
def open_folder(tmp_path):
    opened = []

    def open_one(dtype=DTYPES[0], numbers=8, folder=tmp_path):
        opened.append(EmbedsFolder(ECTransfer(str(folder), True, True, 5.0), Form(numbers, dtype)))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def written(folder, array):
    folder.save(SPACE, KEY, array)
    folder._writer.submit(int).result(10)
    return folder.path_of(SPACE, KEY)


def read(folder, count=5, space=SPACE, key=KEY):
    load = folder.load(space, key, count)
    load.future.result(10)
    return load.embeds


def counts(folder):
    return {name.removeprefix("ec_"): count for name, count in folder.stats().items() if count}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_read_and_safetensors_reads_it_too(open_folder, dtype):
    numpy = pytest.importorskip("safetensors.numpy")
    folder, array = open_folder(dtype), embeds(dtype)
    path = written(folder, array)
    assert read(folder).dtype == dtype and np.array_equal(read(folder).view(np.uint8), array.view(np.uint8))
    if dtype != DTYPES[0]:
        assert np.array_equal(numpy.load_file(path)["ec_cache"], array)
    before = path.stat().st_mtime_ns
    written(folder, array)
    assert path.stat().st_mtime_ns == before and counts(folder) == {"saved": 1, "loaded": 2}
    assert read(folder, key=b"l" * 32) is None and read(folder, space=namespace(weights="v")) is None


def rewritten(array, dtype=None):
    """A file with a right checksum."""
    header, data = encoded(array)
    if dtype is not None:
        header = header_of(array.shape, dtype, hashlib.sha256(data).hexdigest())
    return header + bytes(data)


def with_nan():
    array = embeds()
    array[4, 7] = np.nan
    return array


@pytest.mark.parametrize(
    "content",
    [
        rewritten(with_nan()),
        rewritten(embeds(DTYPES[1])),
        rewritten(embeds(), dtype=DTYPES[1]),
        rewritten(embeds().reshape(8, 5)),
        rewritten(embeds())[:-1],
        rewritten(embeds()) + b"0",
        rewritten(embeds())[:-1] + b"0",
        b"",
    ],
    ids=["no number", "other type", "other type in its header", "other shape", "short", "long", "a byte", "empty"],
)
def test_what_is_not_as_it_must_be_is_removed_and_written_again(open_folder, content):
    folder = open_folder()
    path = written(folder, embeds())
    path.write_bytes(content)
    assert read(folder) is None and not path.exists()
    assert written(folder, embeds()).read_bytes() == rewritten(embeds())
    assert counts(folder) == {"saved": 2, "damaged": 1} and not list(path.parent.glob("*.part"))


def test_a_folder_that_takes_nothing(open_folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    folder = open_folder(folder=tmp_path / "file")
    written(folder, embeds())
    assert read(folder) is None
    assert counts(folder) == {"save_failures": 1, "damaged": 1}
    monkeypatch.setattr(embeds_folder, "MOST_WAITING_BYTES", 79)
    written(folder, embeds())
    assert counts(folder) == {"save_failures": 1, "damaged": 1, "saves_dropped": 1}

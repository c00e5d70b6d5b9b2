"""Embeddings in place of pictures: whatever holds them gives the same numbers, and what is damaged gives none."""

import io
import json

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.embeddings import Embeddings, Form, embeds_digest, form_of, in_form, read, split

FORM = form_of(6, "float32")
EMBEDS = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def safetensors(**arrays):
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64"}
    header, data = {"__metadata__": {"a": "b"}}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


class Tensor:
    """One of torch, as far as is asked of it."""

    def __init__(self, array, dtype="torch.float32"):
        self.array, self.dtype = array, dtype

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.array)

    def numpy(self):
        assert self.dtype != "torch.bfloat16"
        return self.array


@pytest.mark.parametrize(
    "values",
    [
        EMBEDS,
        EMBEDS[None],
        EMBEDS.astype(np.float64),
        Tensor(EMBEDS),
        Tensor(EMBEDS, "torch.bfloat16"),
        npy(EMBEDS),
        npy(np.asfortranarray(EMBEDS)),
        npy(EMBEDS[None]),
        safetensors(whatever=EMBEDS),
        safetensors(image_grid_thw=np.array([[1, 2, 4]]), image_embeds=EMBEDS),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_form_gives_the_same(values):
    found = read(Embeddings(values), "field", FORM)
    assert found.grid == ((1, 2, 4) if isinstance(values, bytes) and b"grid" in values else None)
    data = in_form(found.values, FORM, "field")
    assert data.dtype == np.uint8 and data.flags.owndata
    np.testing.assert_array_equal(data.view(np.float32), EMBEDS)


def test_numbers_become_those_of_the_engine():
    half = form_of(6, "bfloat16")
    expected = EMBEDS.astype(ml_dtypes.bfloat16)
    for values in (EMBEDS, expected, safetensors(a=expected)):
        data = in_form(read(Embeddings(values), "field", half).values, half, "field")
        np.testing.assert_array_equal(data.view(half.dtype), expected)
    digests = {
        embeds_digest(in_form(EMBEDS, form, "field"), grid, form)
        for form in (FORM, half, form_of(6, "float16"))
        for grid in (None, (1, 2, 2))
    }
    assert len(digests) == 6


def too_large():
    """A header of more numbers than there are."""
    return npy(EMBEDS).replace(b"(4, 6)", b"(9, 6)")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (EMBEDS[:, :5], r"shape \[4, 5\]; this model takes \[embeddings, 6\]"),
        (EMBEDS[0], r"shape \[6\]"),
        (np.stack([EMBEDS, EMBEDS]), r"shape \[2, 4, 6\]"),
        (EMBEDS[:0], r"shape \[0, 6\]"),
        (EMBEDS.astype(np.int64), "type int64. Give float32"),
        (EMBEDS.astype(np.complex64), "type complex64"),
        ([1.0], "of type list. Give an array"),
        (None, "of type NoneType"),
        (npy(EMBEDS)[:-1], "neither a whole .npy file nor"),
        (npy(EMBEDS) + b"1", "neither a whole .npy file nor"),
        (too_large(), "neither a whole .npy file nor"),
        (npy(np.array([{"a": 1}], object), allow_pickle=True), "neither a whole .npy file nor"),
        (npy(EMBEDS.astype(ml_dtypes.bfloat16)), "neither a whole .npy file nor"),
        (b"\x93NUMPY\x01\x00\x08\x00((((((((", "neither a whole .npy file nor"),
        (b"\x93NUMPY\x09\x00", "neither a whole .npy file nor"),
        (safetensors(a=EMBEDS)[:-1], "neither a whole .npy file nor"),
        (safetensors(a=EMBEDS).replace(b'"F32"', b'"F99"'), "neither a whole .npy file nor"),
        (safetensors(a=EMBEDS).replace(b"[4, 6]", b"[9, 6]"), "neither a whole .npy file nor"),
        (safetensors(a=EMBEDS).replace(b"[4, 6]", b"[-4,6]"), "neither a whole .npy file nor"),
        (safetensors(a=EMBEDS).replace(b"[4, 6]", b"[true]"), "neither a whole .npy file nor"),
        (b"\xff" * 20, "neither a whole .npy file nor"),
        (b"\x08" + bytes(7) + b"[" * 8, "neither a whole .npy file nor"),
        (b"\x02" + bytes(7) + b"[]", "a file with no tensors"),
        (b"", "neither a whole .npy file nor"),
        (safetensors(a=EMBEDS, b=EMBEDS), "a file with 'a', 'b'. Give it one tensor, or image_embeds"),
        (b"PK\x03\x04data.pkl", "is a pickle, as torch.save writes them, which is never read"),
        (b"\x80\x02}q", "is a pickle"),
    ],
)
def test_what_holds_no_embeddings_is_refused(values, words):
    with pytest.raises(RequestError, match=f"^field .*{words}") as caught:
        read(Embeddings(values), "field", FORM)
    assert caught.value.parameter == "field"


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30])
def test_numbers_that_are_not_finite_are_refused(number):
    values = EMBEDS.copy()
    values[3, 5] = number
    with pytest.raises(RequestError, match="no finite numbers in float16"):
        in_form(values, Form(6, np.dtype(np.float16)), "field")


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ([1, 2, 4], (1, 2, 4)),
        ([[1, 2, 4]], (1, 2, 4)),
        (np.array([[1, 2, 4]]), (1, 2, 4)),
        (npy(np.array([1, 2, 4])), (1, 2, 4)),
        (safetensors(a=np.array([[1, 2, 4]])), (1, 2, 4)),
        ([1, 2], None),
        ([1, 2, 0], None),
        ([1, 2, 4.0], None),
        ([1, 2, True], None),
        ([[1, 2, 4], [1, 2, 4]], None),
        ("1, 2, 4", None),
        (np.array(1), None),
    ],
)
def test_grids(grid, expected):
    if expected is not None:
        assert read(Embeddings(EMBEDS, grid), "field", FORM).grid == expected
    else:
        with pytest.raises(RequestError, match=r"^field has the image_grid_thw .*three numbers for one picture"):
            read(Embeddings(EMBEDS, grid), "field", FORM)


def test_several_pictures_in_one_array_are_several():
    rows = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
    grids = [[1, 4, 4], [1, 2, 6]]  # of 4 and 3 embeddings
    for values in (rows, [rows[:4], rows[4:]]):
        for grid in (grids, np.array(grids), Tensor(np.array(grids))):
            first, second = split(Embeddings(values, grid), "field")
            assert (len(first.values), list(first.grid), len(second.values), list(second.grid)) == (
                4,
                grids[0],
                3,
                grids[1],
            )
            np.testing.assert_array_equal(second.values, rows[4:])
    assert [len(each.values) for each in split(Embeddings(np.stack([EMBEDS] * 3)), "field")] == [4, 4, 4]
    assert [len(each.values) for each in split(Embeddings([EMBEDS] * 2), "field")] == [4, 4]
    for values, grid in ((EMBEDS, None), (EMBEDS, [1, 4, 4]), (b"a file", grids)):
        assert split(Embeddings(values, grid), "field") == [Embeddings(values, grid)]
    for values, grid in ((np.stack([EMBEDS] * 3), grids), ([EMBEDS], grids), ([EMBEDS] * 2, [1, 4, 4])):
        with pytest.raises(RequestError, match="three numbers for each of them"):
            split(Embeddings(values, grid), "field")

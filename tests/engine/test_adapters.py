"""Which version of an adapter a request means, and how often one is read."""

import asyncio
import os

import pytest

from jaxpaged.engine.adapters import Adapters, AsyncAdapters, salt_with
from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.messages import LoRAInfo, LoRARequest
from tests.engine.fake_adapters import FakeBook, SlowBook

A = LoRARequest("a", 1, "/adapters/a")


@pytest.fixture
def book():
    return FakeBook()


@pytest.fixture
def adapters(book):
    return Adapters(True, book.call)


def test_an_adapter_is_read_when_it_is_named_first(adapters, book):
    first = adapters.info_of(A)
    assert first == LoRAInfo("a", 1, "/adapters/a", first.digest, 8) and len(first.digest) == 64
    assert adapters.info_of(LoRARequest("a", 1, "/adapters/a")) is first and book.read == [A]
    assert adapters.info_of(first) is first


def test_one_that_is_removed_or_added_is_read_again(adapters, book):
    adapters.info_of(A)
    assert adapters.remove(1) and not adapters.remove(1)
    adapters.info_of(A)
    book.contents[A.lora_path] = "new"
    newer = adapters.add(A)
    assert adapters.info_of(A) is newer and len(book.read) == 3


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("a", "it must be a LoRARequest"),
        ({"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"}, "it must be a LoRARequest"),
        (LoRARequest("", 1, "/a"), "lora_name ''; it must be a text of 1 to 256"),
        (LoRARequest("a" * 257, 1, "/a"), "1 to 256 letters"),
        (LoRARequest("a\nb", 1, "/a"), "visible letters only"),
        (LoRARequest(" a", 1, "/a"), "visible letters only"),
        (LoRARequest(5, 1, "/a"), "lora_name 5; it must be a text"),
        (LoRARequest("a", 0, "/a"), "lora_int_id 0; it must be a whole number above 0"),
        (LoRARequest("a", 2**63, "/a"), "above 0"),
        (LoRARequest("a", True, "/a"), "above 0"),
        (LoRARequest("b", 2), "has no lora_path"),
        (LoRARequest("b", 1, "/adapters/a"), "lora_int_id 1, but that is adapter 'a' of /adapters/a"),
        (LoRARequest("a", 1, "/adapters/b"), "Give another number"),
    ],
)
def test_what_cannot_be_is_a_bad_request(adapters, given, problem):
    adapters.info_of(A)
    with pytest.raises(RequestError, match=problem) as caught:
        adapters.info_of(given)
    assert caught.value.parameter == "lora_request"


def test_an_engine_without_adapters_says_how_to_have_them(book):
    with pytest.raises(RequestError, match="takes no adapters. Start it with enable_lora"):
        Adapters(False, book.call).info_of(A)
    assert book.read == []


def test_in_place_an_adapter_is_read_once_for_each_change_of_its_files(adapters, book, tmp_path):
    """As reinforcement learning does it: the same folder is written anew, and every request says load_inplace."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"1")
    request = LoRARequest("rl", 7, str(tmp_path), load_inplace=True)
    infos = [adapters.info_of(request) for _ in range(3)]
    book.contents[str(tmp_path)] = "2"
    file.write_bytes(b"2")
    os.utime(file, ns=(5, 5))
    infos += [adapters.info_of(request) for _ in range(3)]
    assert len(book.read) == 2 and len({info.digest for info in infos}) == 2
    assert adapters.info_of(LoRARequest("rl", 7, str(tmp_path))) is infos[-1]
    adapters.info_of(LoRARequest("other", 7, "/adapters/other", load_inplace=True))
    assert adapters.info_of(LoRARequest("other", 7, "/adapters/other")).lora_name == "other"


def test_an_adapter_that_cannot_be_read_is_not_known(adapters, book):
    book.bad.add(A.lora_path)
    for _ in range(2):
        with pytest.raises(CheckpointError):
            adapters.info_of(A)
    assert len(book.read) == 2


def test_many_that_ask_at_once_wait_for_one_reading_which_survives_who_leaves():
    async def scenario():
        book = SlowBook()
        adapters = AsyncAdapters(True, book.call)
        asking = [asyncio.ensure_future(adapters.info_of(A)) for _ in range(20)]
        await asyncio.sleep(0)
        asking[0].cancel()
        await asyncio.sleep(0)
        book.go_on.set()
        rest = await asyncio.gather(*asking[1:])
        again = await adapters.info_of(A)
        assert await adapters.remove(1)
        book.bad.add(A.lora_path)
        failed = await asyncio.gather(*(adapters.info_of(A) for _ in range(3)), return_exceptions=True)
        return book.read, {id(info) for info in [*rest, again]}, failed

    read, infos, failed = asyncio.run(scenario())
    assert read == [A, A] and len(infos) == 1
    assert [type(error) for error in failed] == [CheckpointError] * 3


def test_equal_prompts_of_several_versions_go_to_cores_of_their_own():
    one, two = (LoRAInfo("a", 1, "/a", digest) for digest in ("1" * 64, "2" * 64))
    assert len({None, "s"} | {salt_with(lora, salt) for salt in (None, "s") for lora in (one, two)}) == 6

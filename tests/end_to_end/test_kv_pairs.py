"""What one engine has computed another one goes on from, however different it is: the same greedy text as one alone."""

import time

import pytest

from jaxpaged import LLM
from jaxpaged.kv_store.prefix_file import PrefixFile
from tests.end_to_end.test_kv_offload import OPTIONS, PROMPTS, answers, worker_of

pytestmark = pytest.mark.slow
PLAIN = {**OPTIONS, "token_buckets": (8, 64), "max_num_seqs": 2}
SOME = PROMPTS[:1] + PROMPTS[2:]


@pytest.fixture(scope="module")
def expected():
    with LLM(**PLAIN) as llm:
        return answers(llm, SOME)[0]


def patient(llm):
    """Let its requests load whatever that takes, on a machine with other work too."""
    half = llm.llm_engine._core.transfers
    half.rates.pays, half.patience = (lambda sources: True), 300.0


def kept(llm):
    """Wait until its pages are on the disk."""
    transfer = worker_of(llm).kv_transfer
    while transfer.stats()["kv_offload_copies_under_way"]:
        time.sleep(0.05)
    assert transfer.connector.tiers.flush(300.0)


@pytest.mark.parametrize("degrees", [pytest.param((1, 4), marks=pytest.mark.exhaustive), (4, 2, 1)])
def test_pages_do_not_depend_on_the_tensor_parallel_degree(degrees, expected, tmp_path):
    """The model has 2 KV heads, so 4 devices have each of them twice. Each engine reads what the first one wrote, and
    what it has on its devices then is the same to the bit, as files of the prompts say."""
    options = {**PLAIN, "kv_offload": f"disk={tmp_path}/kv:256M"}
    written = []
    for degree in degrees:
        with LLM(**options, tensor_parallel_size=degree) as llm:
            patient(llm)
            texts, cached = answers(llm, SOME)
            assert texts == expected and (min(cached) > 60 if written else not any(cached))
            written.append(values_on_device(llm, tmp_path / str(degree)))
            kept(llm)
            assert worker_of(llm).stats()["recompiles"] == 0
    assert are_alike(written)


def test_pages_do_not_depend_on_the_block_size(expected, tmp_path):
    """Blocks of half a page, of one, and halves again: each engine goes on from what others wrote. What it has on its
    device then is the same to the bit, as files of the prompts say, which an engine with blocks of two pages loads."""
    written = []
    for number, size in enumerate((16, 32, 16)):
        with LLM(**PLAIN | {"block_size": size}, kv_offload=f"disk={tmp_path}/kv:256M") as llm:
            patient(llm)
            texts, cached = answers(llm, SOME)
            assert texts == expected and (min(cached) >= 96 if written else not any(cached)), (size, cached)
            written.append(values_on_device(llm, tmp_path / str(number)))
            kept(llm)
            assert worker_of(llm).stats()["recompiles"] == 0
    assert are_alike(written)
    assert len({path.parent.parent for path in (tmp_path / "kv").rglob("*.safetensors")}) == 1, "one namespace"
    with LLM(**PLAIN | {"block_size": 64}, kv_offload="host=64M") as llm:
        patient(llm)
        assert all(llm.load_prefix(tmp_path / "0" / str(i)).num_tokens >= 96 for i in range(len(SOME)))
        texts, cached = answers(llm, SOME)
        assert texts == expected and min(cached) >= 64


def values_on_device(llm, folder):
    """The bytes of all pages that an engine has of the prompts, by their keys, from files that it writes."""
    folder.mkdir()
    files = [folder / str(i) for i in range(len(SOME))]
    for prompt, path in zip(SOME, files):
        llm.save_prefix(prompt, path)
    each = [page for path in files for page in PrefixFile(path).pages()]
    return {key: b"".join(map(bytes, buffers)) for key, buffers in each}


def are_alike(written):
    """Whether all have the same bytes of the same pages. Of windows there may be more than whoever goes on needs."""
    common = set.intersection(*map(set, written))
    assert len(common) > 20 and all(len(pages) < 2 * len(common) for pages in written)
    return all(pages[key] == written[0][key] for pages in written for key in common)


def test_what_was_kept_is_loaded_after_a_sleep(expected):
    with LLM(**PLAIN, kv_offload="host=64M") as llm:
        assert answers(llm, SOME)[0] == expected
        kept(llm)
        patient(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            again, cached = answers(llm, SOME)
            assert again == expected and min(cached) > 60
        assert worker_of(llm).stats()["recompiles"] == 0

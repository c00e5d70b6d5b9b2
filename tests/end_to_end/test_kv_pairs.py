"""What one engine has computed another one goes on from, however different it is: the same greedy text as one alone."""

import time

import pytest

from jaxpaged import LLM
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
    half = llm.llm_engine._core.transfer._half
    half.rates.pays, half.patience = (lambda sources: True), 300.0


def kept(llm):
    """Wait until its pages are on the disk."""
    transfer = worker_of(llm).kv_transfer
    while transfer.stats()["kv_offload_copies_under_way"]:
        time.sleep(0.05)
    assert transfer._store.flush(300.0)


def split(num_devices):
    return {"tensor_parallel_size": num_devices}


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        pytest.param(split(1), split(2), id="1 device to 2"),
        pytest.param(split(2), split(1), id="2 devices to 1"),
    ],
)  # fmt: skip
def test_pages_of_one_engine_are_those_of_another(writes, reads, expected, tmp_path):
    options = {**PLAIN, "kv_offload": f"disk={tmp_path}:256M"}
    with LLM(**{**options, **writes}) as llm:
        assert answers(llm, SOME)[0] == expected
        kept(llm)
    with LLM(**{**options, **reads}) as llm:
        patient(llm)
        again, cached = answers(llm, SOME)
        assert again == expected and min(cached) > 60
        assert worker_of(llm).stats()["recompiles"] == 0


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

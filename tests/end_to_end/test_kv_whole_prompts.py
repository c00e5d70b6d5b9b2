"""A prompt that an idle engine answers is found whole by the next request, and by the next process."""

import subprocess
import sys

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.kv_transfer import saves
from jaxpaged.worker.kv_transfer import programs

OPTIONS = {
    "max_model_len": 2048,
    "token_buckets": (8, 512),
    "num_scheduler_steps": 1,
    "max_num_seqs": 2,
    "block_size": 32,
    "num_gpu_blocks_override": 500,
}
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LENGTHS = (500, 968, 1900)


def prompt_of(length):
    return {"prompt_token_ids": [100 + length % 97, *(100 + 7 * i % 900 for i in range(length - 1))]}


def found(llm, length):
    """The share of a prompt's full blocks that came from the cache."""
    (result,) = llm.generate([prompt_of(length)], FIRST, use_tqdm=False)
    return result.num_cached_tokens / ((length - 1) // 32 * 32)


@pytest.mark.slow
def test_the_next_request_and_the_next_process_find_a_prompt_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(saves, "ROOM", 64 << 10)  # less than a page: as 256 MiB are for the largest models
    monkeypatch.setattr(programs, "MOST_BYTES", 64 << 10)
    with LLM(**OPTIONS, kv_offload=f"host=64M,disk={tmp_path}:256M") as llm:
        assert {found(llm, length) for length in LENGTHS} == {0.0}
        assert llm.reset_prefix_cache()
        llm.llm_engine._core.transfers.rates.pays = lambda sources: True
        assert [found(llm, length) for length in LENGTHS] == [1.0] * 3
        assert found(llm, 1500) == 0.0
        assert llm.llm_engine._core.executor.worker.stats()["kv_offload_pages_dropped"] == 0
    with LLM(**OPTIONS, kv_offload=f"disk={tmp_path}:256M") as llm:
        llm.llm_engine._core.transfers.rates.pays = lambda sources: True
        assert [found(llm, length) for length in (*LENGTHS, 1500)] == [1.0] * 4


PROGRAM = """
from jaxpaged import LLM, SamplingParams
from jaxpaged.core.kv_transfer import saves
from jaxpaged.worker.kv_transfer import programs
saves.ROOM = programs.MOST_BYTES = 64 << 10
llm = LLM(**{options}, kv_offload="{tiers}")
prompt = {{"prompt_token_ids": [100 + 7 * i % 900 for i in range(968)]}}
llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
"""


@pytest.mark.slow
def test_a_program_that_ends_without_shutting_its_engine_down_leaves_a_prompt_whole(tmp_path):
    program = PROGRAM.format(options=OPTIONS, tiers=f"host=64M,disk={tmp_path}:256M")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    files = [path.stem for path in tmp_path.rglob("*.safetensors")]
    by_group = {name.rpartition("_")[2] for name in files}
    assert len(files) == len(by_group) * (968 // 32), f"{len(files)} pages of {len(by_group)} groups"

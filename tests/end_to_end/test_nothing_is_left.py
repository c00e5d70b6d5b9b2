"""A real engine that was shut down leaves no thread and no process behind."""

import pytest

from jaxpaged import LLM, SamplingParams
from tests.end_to_end.test_kv_offload import OPTIONS
from tests.processes_and_threads import left_of, running

pytest.importorskip("llguidance")
FEW_PROGRAMS = {**OPTIONS, "token_buckets": (32,), "max_num_seqs": 2}


@pytest.mark.parametrize("tiers", [None, "host=64M", "host=64M,disk={}:64M"])
def test_of_an_engine_that_wrote_a_shape_and_kept_its_pages(tiers, tmp_path):
    before = running()
    with LLM("demo", **FEW_PROGRAMS, kv_offload=tiers and tiers.format(tmp_path)) as llm:
        params = SamplingParams(max_tokens=4, structured_outputs={"regex": "[ab]{1,3}"})
        assert llm.generate(["Once upon a time " * 20], params)[0].outputs[0].text
    assert left_of(before) == set()

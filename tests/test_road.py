"""The budget of the road that every token takes: it is to be read in one sitting, so it may shrink and not grow.

What is counted is an engine as a user has it: `LLM("demo")` with sizes that compile quickly. So steps are scheduled
asynchronously, prefixes are cached, nothing is drafted, nobody publishes events, and keys and values are kept on the
device alone (`kv_offload` is off unless it is asked for). Where a limit is too low, first look for frames that only
pass on, and for features that are called for requests which do not ask for them.
"""

import threading
import time

import pytest

from jaxpaged import LLM, SamplingParams
from tests.road_counter import counted, frames_at_call

FUNCTIONS, FILES, CHANGES = 80, 20, 60
"""Of a step in which one request decodes one token, from `LLMEngine.step` on."""
FRAMES, FRAME_FILES = 9, 7
"""From `LLM.generate` to the function that calls a compiled program."""
WARM_UP_STEPS = 5
PARAMS = SamplingParams(max_tokens=WARM_UP_STEPS + 2, ignore_eos=True, temperature=0.0)
"""So few that the engine has not measured yet whether several decode steps should be one program."""


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", max_num_seqs=2, max_num_batched_tokens=64, token_buckets=(2, 64), max_model_len=256) as engine:
        engine.wait_for_programs()
        while any(thread.name.startswith("jaxpaged-compile") for thread in threading.enumerate()):
            time.sleep(0.01)  # the last thread that compiled ends a moment later
        engine.generate("Once upon a time", PARAMS, use_tqdm=False)  # the texts of its tokens are known from now on
        yield engine


def test_a_decode_step(llm):
    engine = llm.llm_engine
    engine.add_request("counted", "Once upon a time", PARAMS)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    with counted() as road:
        (output,) = engine.step()
    engine.abort_request("counted")
    assert len(output.outputs[0].token_ids) > 1, "it was not a decode step"
    assert len(road.functions) <= FUNCTIONS, str(road)
    assert len(road.files) <= FILES, str(road)
    assert road.num_changes <= CHANGES, str(road)


def test_from_generate_to_a_program(llm):
    frames = frames_at_call("worker/device.py Device.call", lambda: llm.generate("Once", PARAMS, use_tqdm=False))
    assert frames[0].endswith(" LLM.generate")
    assert len(frames) <= FRAMES, "\n".join(frames)
    assert len({frame.split(" ")[0] for frame in frames}) <= FRAME_FILES, "\n".join(frames)

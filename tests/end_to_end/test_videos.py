"""Videos through the engine as callers have it. What a model makes of them is tested in tests/models."""

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from tests.models.video_folder import write_video_folder
from tests.multimodal.drawn import drawn

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "block_size": 4,
    "num_gpu_blocks_override": 300,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
FRAMES = np.stack([np.asarray(drawn(24, 16, seed=number)) for number in range(5)])
MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module", params=[pytest.param("qwen2_5_vl", marks=pytest.mark.exhaustive), "qwen3_vl"])
def llm(request, tmp_path_factory):
    with LLM(str(write_video_folder(request.param, tmp_path_factory.mktemp("model"))), **OPTIONS) as made:
        yield made


def tokens_of(output):
    assert output.error is None
    return [*output.outputs[0].token_ids, pytest.approx(output.outputs[0].cumulative_logprob, abs=2e-4)]


def test_a_video_is_seen_in_every_order_of_its_frames_and_cached(llm):
    prompt = lambda video, text=f"on {MARK} is": {"prompt": text, "multi_modal_data": {"video": video}}
    chat = lambda video: [{"role": "user", "content": [{"type": "video", "video": video}]}]
    forwards, backwards, slow = FRAMES, FRAMES[::-1], (FRAMES, {"fps": 0.25})
    alone = [tokens_of(llm.generate(prompt(each), GREEDY)[0]) for each in (forwards, backwards, slow)]
    likely = [each[-1].expected for each in alone]
    assert min(abs(likely[0] - likely[1]), abs(likely[0] - likely[2])) > 0.01
    again = llm.generate([prompt(each) for each in (slow, forwards, backwards)], GREEDY)
    assert [tokens_of(each) for each in again] == [alone[2], alone[0], alone[1]]
    assert any(each.num_cached_tokens for each in again)
    assert len(again[0].mm_hashes["video"]) == 3
    picture = {"video": forwards, "image": FRAMES[0]}
    both = llm.generate({"prompt": f"{MARK}{MARK.replace('video', 'image')}", "multi_modal_data": picture}, GREEDY)
    assert list(both[0].mm_hashes) == ["video", "image"]
    (talked,) = llm.chat(chat(list(forwards)), GREEDY)
    assert tokens_of(talked) and talked.mm_hashes == llm.generate(prompt(forwards), GREEDY)[0].mm_hashes
    assert llm.stats().number("recompiles") == 0

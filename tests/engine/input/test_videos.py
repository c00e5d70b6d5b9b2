"""Videos of prompts: from lists of frames to features and times, and what is refused. The processes that decode are
real; no engine is behind."""

import base64
import re

import numpy as np
import pytest

from jaxpaged.config.multimodal import MultiModalConfig
from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.engine.input.pictures import PictureIntake
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.errors import RequestError
from jaxpaged.multimodal.videos import JPEGS
from tests.models.seeing_folder import PROCESSOR as OF_GEMMA
from tests.models.seeing_folder import make_config as gemma_config
from tests.models.video_folder import CHAT, IMAGE_ID, PROCESSOR, VIDEO_ID, WITH_VIDEOS, make_config, make_tokenizer
from tests.multimodal.drawn import drawn, encoded

TOKENIZER = make_tokenizer()
FRAMES = [drawn(40, 24, seed=number) for number in range(5)]
ARRAY = np.stack([np.asarray(frame) for frame in FRAMES])
START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
MARK = START + PAD + END
NUM_EMBEDS = 15
"""Of a moment: 5 columns, 3 rows."""


def make_processor(name="qwen3_vl", **options):
    config, of_model = MultiModalConfig(**{"mm_bytes_in_flight_gb": 1.0, **options}), make_config(name)
    values = WITH_VIDEOS if name == "qwen3_vl" else PROCESSOR
    intake = PictureIntake(TOKENIZER, config, "model", of_model, values, local_files=True)
    templates = ChatTemplates({"default": CHAT})
    return InputProcessor(TOKENIZER, vocab_size=270, max_model_len=900, chat_templates=templates, pictures=intake)


@pytest.fixture(scope="module")
def third():
    made = make_processor()
    yield made
    made.close()


@pytest.fixture(scope="module")
def second():
    made = make_processor("qwen2_5_vl")
    yield made
    made.close()


def parsed(processor, video, text=f"a{MARK}b", **fields):
    return processor.parse({"prompt": text, "multi_modal_data": {"video": video}, **fields})


def refusal(processor, video, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(processor, video, **fields)
    return caught.value


def url_of(frames):
    return JPEGS + ",".join(base64.b64encode(encoded(frame, "JPEG")).decode() for frame in frames)


def test_each_moment_stands_behind_its_time_between_marks_of_its_own(third):
    found = parsed(third, (FRAMES, {"fps": 10.0, "frames_indices": [0, 5, 10, 15, 20], "total_num_frames": 25}))
    one = START + PAD * NUM_EMBEDS + END
    text = f"a<0.2 seconds>{one}<1.2 seconds>{one}<2.0 seconds>{one}b"
    assert found.token_ids == TOKENIZER.encode(text)
    assert found.text == text
    assert [feature.grid for feature in found.mm_features] == [(1, 3, 5)] * 3
    assert [(feature.moment, feature.time) for feature in found.mm_features] == [(0, 0)] * 3
    for feature in found.mm_features:
        assert found.token_ids[feature.offset : feature.offset + feature.length] == [VIDEO_ID] * NUM_EMBEDS
        assert feature.modality == "video" and feature.pixels.shape == (4 * NUM_EMBEDS, 2 * 48)
    last = found.mm_features[-1].pixels.reshape(-1, 3, 2, 16)
    assert (last[:, :, 0] == last[:, :, 1]).all(), "the fifth frame is there twice"


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ({}, [0, 4, 8]),  # a frame a second
        ({"fps": 3.0}, [0, 1, 2]),  # 4 / 3 tokens between moments, rounded down
        ({"fps": 30.0, "frames_indices": [0, 30, 60, 90, 120], "total_num_frames": 150}, [0, 4, 8]),
        ({"fps": 30.0, "frames_indices": [0, 30, 60, 90, 120]}, [0, 4, 8]),
    ],
)
def test_moments_of_one_run_have_positions_in_time(second, said, times):
    found = parsed(second, (FRAMES, said))
    assert found.token_ids == TOKENIZER.encode(f"a{START}{PAD * 3 * NUM_EMBEDS}{END}b")
    assert [(feature.moment, feature.time) for feature in found.mm_features] == list(enumerate(times))
    start = found.token_ids.index(VIDEO_ID)
    runs = [[(start + NUM_EMBEDS * i, NUM_EMBEDS)] for i in range(3)]
    assert [feature.runs for feature in found.mm_features] == runs
    asked = parsed(second, FRAMES, text=MARK)
    assert [feature.key for feature in asked.mm_features] == [feature.key for feature in found.mm_features]


def test_every_form_of_a_video_gives_the_same_pixels(third):
    """JPEGs are not what was drawn, but the same as pictures and in a URL."""
    forms = [FRAMES, tuple(FRAMES), ARRAY, [ARRAY], [FRAMES], list(ARRAY), (ARRAY, {"fps": 1})]
    found = [parsed(third, form).mm_features for form in forms]
    for each in found:
        assert all(np.array_equal(one.pixels, other.pixels) for one, other in zip(each, found[0], strict=True))
    assert len({tuple(feature.key for feature in each) for each in found}) == 1
    files = [encoded(frame, "JPEG") for frame in FRAMES]
    for form in (files, url_of(FRAMES), [url_of(FRAMES)]):
        keys = [feature.key for feature in parsed(third, form).mm_features]
        assert keys == [feature.key for feature in parsed(third, files).mm_features]


def test_moments_that_two_videos_share_have_one_key(second):
    longer, shorter = (parsed(second, FRAMES[:number]).mm_features for number in (5, 4))
    assert [each.key for each in longer[:2]] == [each.key for each in shorter]
    assert longer[2].key not in [each.key for each in shorter]


def test_videos_pictures_and_typed_marks_in_one_chat(third):
    parts = [
        {"type": "text", "text": f"what{PAD}"},
        {"type": "video_url", "video_url": {"url": url_of(FRAMES[:2])}},
        {"type": "image", "image": FRAMES[0]},
        {"type": "video", "video": FRAMES[:1]},
    ]
    found = third.chat_prompt([{"role": "user", "content": parts}])
    assert [feature.modality for feature in found["mm_features"]] == ["video", "image", "video"]
    ids = found["prompt_token_ids"]
    assert ids.count(VIDEO_ID) == 2 * NUM_EMBEDS and ids.count(IMAGE_ID) == NUM_EMBEDS
    for feature in found["mm_features"]:
        pad = VIDEO_ID if feature.modality == "video" else IMAGE_ID
        assert ids[feature.offset : feature.offset + feature.length] == [pad] * NUM_EMBEDS
    assert f"what{PAD}" in found["prompt"] and found["prompt"].count(PAD) == 1 + 2 * NUM_EMBEDS


@pytest.mark.parametrize("mark", [MARK, PAD])
def test_token_ids_with_a_mark_or_all_placeholders_are_those_of_the_text(third, mark):
    data = {"video": FRAMES, "image": FRAMES[0]}
    text = f"a{START}<|image_pad|>{END}b{mark}c"
    whole = third.parse({"prompt": text, "multi_modal_data": data})
    for ids in (TOKENIZER.encode(text), whole.token_ids):
        found = third.parse({"prompt_token_ids": ids, "multi_modal_data": data})
        assert found.token_ids == whole.token_ids
        assert [each.runs for each in found.mm_features] == [each.runs for each in whole.mm_features]


def test_some_frames_are_chosen_where_that_is_asked_for():
    made = make_processor("qwen2_5_vl", media_io_kwargs={"video": {"num_frames": 3, "fps": 2.0}})
    found = parsed(made, list(np.repeat(ARRAY, 2000, axis=0)))
    chosen = parsed(made, (ARRAY[[0, 2, 4]], {"fps": 2.0, "total_num_frames": 3}))
    assert [each.key for each in found.mm_features] == [each.key for each in chosen.mm_features]
    assert found.mm_features[1].time == 2 * 2 / (3 / 10000 * 2) // 1
    made.close()


@pytest.mark.parametrize(
    ("video", "words"),
    [
        ([[]], "without frames"),
        (np.zeros((0, 4, 4, 3), np.uint8), "without frames"),
        ([*FRAMES, drawn(40, 28)], "frame of 40x28 pixels, and the first one of its video has 40x24"),
        (np.zeros((10_000, 1, 1, 3), np.uint8), "10000 frames, and 768 at most are taken"),
        (np.zeros((4, 4, 3), np.uint8), r"shape \[4, 4, 3\], no video"),
        (np.zeros((2, 4, 4, 3), np.float32), "array of float32"),
        (b"\0\0\0\x18ftypmp42", "of type bytes, and files of videos are not decoded here"),
        ("data:video/mp4;base64,AAAA", "'video/mp4', and files of videos are not decoded here"),
        ("https://example.org/a.mp4", "files of videos are not decoded here"),
        ("data:video/jpeg,abc", "files of videos are not decoded here"),
        (JPEGS, "no picture that can be read"),
        (JPEGS + ",,,", "no picture that can be read"),
        (JPEGS + "AA,!!", "not valid base64"),
        (url_of(FRAMES[:2]) + ",", "no picture that can be read"),
        (url_of(FRAMES[:2])[:-60], "not valid base64|damaged|cannot be decoded"),
        ([FRAMES[0], "/no/such/file"], "cannot be read"),
        ([FRAMES[0], 5], "of type int, no picture"),
        (5, "of type int"),
        ((FRAMES, {"frames_indices": [1, 2]}), "5 frames, and frames_indices has 2"),
        ((FRAMES, {"frames_indices": [5, 4, 3, 2, 1]}), "each above the one before"),
        ((FRAMES, {"fps": 0}), "above 0"),
        ((FRAMES, {"total_num_frames": 3}), "frame 4 of a video of 3"),
        ([drawn(400, 1)], "400x1 pixels"),
    ],
)
def test_what_is_no_video_is_refused_in_one_sentence(second, video, words):
    error = refusal(second, video)
    assert error.parameter is not None and error.parameter.startswith("multi_modal_data")
    assert re.search(words, str(error)), str(error)


def test_limits_names_and_numbers_of_marks(third):
    assert "0 marks for 1 videos" in str(refusal(third, FRAMES, text="a"))
    assert "1 marks for 2 videos" in str(refusal(third, [FRAMES, FRAMES]))
    assert "names pictures only" in str(refusal(third, [None], multi_modal_uuids={"video": ["a"]}))
    uuids = {"multi_modal_uuids": {"video": ["mine"]}}
    assert parsed(third, FRAMES, **uuids).mm_features
    assert "under which another picture was given" in str(refusal(third, FRAMES[:3], **uuids))
    limited = make_processor(limit_mm_per_prompt={"video": 1})
    assert "has 2 videos, and may have 1" in str(refusal(limited, [FRAMES, FRAMES], text=MARK * 2))
    limited.close()
    off = make_processor(limit_mm_per_prompt={"video": 0})
    assert "limit_mm_per_prompt is 0 for videos" in str(refusal(off, FRAMES))
    off.close()


def test_a_model_that_takes_pictures_only_is_named():
    intake = PictureIntake(TOKENIZER, MultiModalConfig(), "model", gemma_config(), OF_GEMMA)
    blind = InputProcessor(TOKENIZER, vocab_size=270, max_model_len=900, pictures=intake)
    error = refusal(blind, FRAMES)
    assert "Gemma3ForConditionalGeneration takes pictures only. Give some of its frames as pictures" in str(error)
    blind.close()

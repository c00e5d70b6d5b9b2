"""Videos: sizes and times against what transformers computed, and patches against its processor of Pillow.

Its processor of videos is one of torchvision, whose bicubic filter rounds otherwise: 0.04 to 0.7 % of the values
differ, by 2 of 255 at most, and where one side grows and the other shrinks a quarter, by 3 at most.
"""

import json

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.multimodal.checkpoint import PictureConfigs, model_identity
from jaxpaged.multimodal.processors import load_settings, processor_of
from jaxpaged.multimodal.processors.videos import Size
from tests.models.paged import golden_of
from tests.multimodal.drawn import drawn
from tests.multimodal.processors import video_cases

SIDES = {"qwen2_5_vl": 14, "qwen3_vl": 16}
FIELD = "video"


def videos(model_type="qwen2_5_vl", config=None, pictures=None, **values):
    of_pictures = {"patch_size": SIDES[model_type], "max_pixels": 1 << 26, **(pictures or {})}
    settings = {**of_pictures, "video_processor": values} if values else of_pictures
    return processor_of({"model_type": model_type, **(config or {})}, settings).videos


@pytest.mark.parametrize("model_type", SIDES)
def test_sizes_are_those_of_transformers(model_type):
    expected = golden_of("video_sizes")["sizes"][model_type]
    for (frames, width, height, fewest, most), (new_height, new_width) in zip(
        video_cases.sizes(), expected, strict=True
    ):
        ours = videos(model_type, size={"shortest_edge": fewest, "longest_edge": most})
        assert ours.resized_size(Size(width, height), frames, FIELD) == (new_width, new_height)


def test_times_are_those_of_transformers():
    ours = videos("qwen3_vl")
    for (indices, fps), times in zip(video_cases.times(), golden_of("video_sizes")["times"], strict=True):
        layout = ours.layout(Size(64, 64), [index / fps for index in indices], fps, FIELD)
        assert [
            part.split(" seconds>")[0] for part in layout.placeholder.split("<")[1:] if " seconds>" in part
        ] == times
        assert layout.placeholder.count("<|vision_start|>") == len(times) == len(layout.places)


def test_patches_of_frames_have_the_bits_of_transformers():
    """Of each frame those of a picture with the same limits."""
    limits = {"min_pixels": 3136, "max_pixels": 50176}
    ours, theirs = videos(**limits), Qwen2VLImageProcessorPil(**limits, patch_size=14)
    table_CV = processor_of({"model_type": "qwen2_5_vl"}, limits).table_CV
    frames = [drawn(150, 90, seed=seed) for seed in range(3)]
    layout = ours.layout(Size(150, 90), [0, 1, 2], 1.0, FIELD)
    moment = ours.moment_layout(layout.rows, layout.columns)
    for first, last in ((0, 1), (2, 2)):
        given = [np.asarray(frame) for frame in frames[first : first + 2]]
        cells = ours.process(given, moment).pixels.reshape(-1, 3, 2, 14 * 14)
        for place, number in enumerate((first, last)):
            floats = np.stack([table_CV[channel][cells[:, channel, place]] for channel in range(3)], axis=1)
            expected = theirs(images=[frames[number]], return_tensors="np")["pixel_values"]
            assert np.array_equal(floats, expected.reshape(-1, 3, 2, 14 * 14)[:, :, 0])


def test_options_are_of_pictures_and_videos_as_far_as_these_know_them():
    for model_type, is_known in (("qwen2_5_vl", True), ("qwen3_vl", False)):
        values = {"patch_size": SIDES[model_type], "video_processor": {"size": {"longest_edge": 1 << 20}}}
        whole = processor_of({"model_type": model_type}, values)
        fewer = whole.with_options({"max_pixels": 5000}, "mm_processor_kwargs")
        assert fewer.max_pixels == 5000 and fewer.videos.max_pixels == (5000 if is_known else 1 << 20)
        edges = {"size": {"shortest_edge": 1024, "longest_edge": 6000}}
        assert whole.with_options(edges, "mm_processor_kwargs").videos.max_pixels == 6000


def test_a_video_of_which_a_moment_is_larger_than_any_picture_is_refused():
    ours = videos(size={"shortest_edge": 784, "longest_edge": 1 << 24}, pictures={"max_pixels": 1 << 16})
    with pytest.raises(RequestError, match="tokens a moment, and a picture of this model has"):
        ours.layout(Size(4000, 4000), [0.0], 1.0, FIELD)
    with pytest.raises(RequestError, match="too few for positions in time"):
        videos().layout(Size(60, 60), [0.0, 1.0, 2.0], 1e-7, FIELD)


def test_what_a_checkpoint_says_of_videos(tmp_path):
    assert videos(config={"vision_config": {"temporal_patch_size": 1}}) is None
    for values, words in (
        ({"patch_size": 16}, "patch_size of videos is 16"),
        ({"image_mean": [0, 0, 0]}, "of videos are not those of pictures"),
        ({"do_resize": False}, "do_resize is false"),
        ({"size": {"height": 3}}, "size of videos"),
    ):
        with pytest.raises(CheckpointError, match=words):
            videos(**values)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 5000}}))
    assert processor_of({"model_type": "qwen2_vl"}, load_settings(tmp_path)).videos.max_pixels == 5000
    configs = PictureConfigs({}, {"patch_size": 14})
    with_videos = PictureConfigs({}, {"patch_size": 14, "video_processor": {"size": {"longest_edge": 5000}}})
    assert model_identity(tmp_path, configs) == model_identity(tmp_path, with_videos), "keys of pictures stay"
    (tmp_path / "video_preprocessor_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="video_preprocessor_config"):
        load_settings(tmp_path)

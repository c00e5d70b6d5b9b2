"""Options of pictures: limits in both of vLLM's forms, the background, and what is refused before a model is read."""

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.config.video_options import VideoOptions, video_options_of
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.errors import ConfigError

PRODUCER = {
    "ec_connector": "ECExampleConnector",
    "ec_role": "ec_producer",
    "ec_connector_extra_config": {"shared_storage_path": "/x"},
}


def config(**options):
    return EngineConfig.from_options(**options).multimodal


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ({}, 999),
        ({"image": 2}, 2),
        ({"image": 0, "video": 3}, 0),
        ({"image": {"count": 5, "width": 512}}, 5),
        ({"audio": 1}, 999),
    ],
)
def test_a_limit_is_a_number_or_an_object_with_a_count(limit, most):
    assert config(limit_mm_per_prompt=limit).max_pictures == most


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_mm_per_prompt": {"picture": 1}}, "unknown key 'picture'"),
        ({"limit_mm_per_prompt": {"image": -1}}, "-1 for image"),
        ({"limit_mm_per_prompt": {"image": {"count": True}}}, "for image"),
        ({"media_io_kwargs": {"audio": {"num_frames": 4}}}, "only 'image' and 'video' are taken"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "whole number from 1, or -1"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "above 0"),
        ({"media_io_kwargs": {"video": {"frame": 1}}}, "unknown key 'frame'"),
        ({"media_io_kwargs": {"video": {"frames_indices": [2, 1]}}}, "each above the one before"),
        ({"media_io_kwargs": {"image": {"size": 4}}}, "unknown key 'size'"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 256]}}}, "three numbers from 0 to 255"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "pictures become 'RGB'"),
        ({"media_io_kwargs": {"image": 3}}, "must be an object"),
        ({"mm_processor_cache_gb": -1}, "at least 0"),
        ({"mm_bytes_in_flight_gb": 0}, "more than 0"),
        ({"mm_encoder_tp_mode": "both"}, "must be one of weights, data"),
        ({"mm_encoder_only": True}, "does not say where embeddings go"),
        (
            {"enable_mm_embeds": True, "mm_encoder_only": True, "ec_transfer_config": PRODUCER},
            "and mm_encoder_only are",
        ),
    ],
)
def test_what_means_nothing_is_refused_by_name(options, words):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"^{name}.*{words}"):
        config(**options)


def test_the_background_of_transparent_pictures():
    assert config().background == (255, 255, 255)
    assert config(media_io_kwargs={"image": {"rgba_background_color": [0, 1, 2]}}).background == (0, 1, 2)


def test_limits_and_times_of_videos():
    assert config().max_videos == 999 and config(limit_mm_per_prompt={"video": {"count": 0}}).max_videos == 0
    taken = config(media_io_kwargs={"video": {"fps": 2, "num_frames": -1, "duration": 3.0}}).media_io_kwargs
    assert video_options_of(taken) == VideoOptions(fps=2.0)


def test_vllms_older_names_become_ours():
    assert config(disable_mm_preprocessor_cache=True).mm_processor_cache_gb == 0
    assert config(enable_multimodal_encoder_data_parallel=True).mm_encoder_tp_mode == "data"


def test_hosts_are_words_or_a_list():
    parser = Parser(prog="test")
    add_engine_flags(parser)
    for words in (["a.org", "b.org"], ["a.org,b.org"]):
        options = engine_options(parser.parse_args(["--allowed-media-domains", *words]))
        assert config(**options).allowed_media_domains == ("a.org", "b.org")

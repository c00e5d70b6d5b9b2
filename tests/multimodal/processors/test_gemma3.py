"""transformers' processor of Pillow is the oracle: same pixels bit by bit, same crops, same text."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor as TheirProcessor

from jaxpaged.errors import CheckpointError, ConfigError, RequestError
from jaxpaged.multimodal.processors import load_processor, processor_of
from tests.multimodal.drawn import drawn

FIELD = "image"
CONFIG = {"model_type": "gemma3", "mm_tokens_per_image": 16}
SETTINGS = {
    "size": {"height": 112, "width": 112},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 0.00392156862745098,
    "resample": 2,
    "do_pan_and_scan": None,
}
SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 32,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SIZES = [(80, 60), (60, 80), (400, 100), (101, 403), (100, 100), (1, 1), (1, 300), (97, 33), (63, 32), (129, 33)]


def check_equal(ours, theirs, image: Image.Image):
    processed = ours.process(np.asarray(image), FIELD)
    expected = theirs(images=[image], return_tensors="np")
    pixels = processed.pixels
    assert pixels.dtype == np.uint8 and pixels.shape == processed.layout.pixels_shape
    floats = np.stack([ours.table_CV[channel][pixels[..., channel]] for channel in range(3)], axis=1)
    assert floats.dtype == np.float32
    assert np.array_equal(floats, expected["pixel_values"])
    assert processed.layout.num_items == 1 + expected["num_crops"][0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scan", [{}, SCAN])
def test_pixels_have_the_bits_of_transformers(size, scan):
    ours = processor_of(CONFIG, {**SETTINGS, **scan})
    check_equal(ours, Gemma3ImageProcessorPil(**{**SETTINGS, **scan}), drawn(*size, seed=sum(size)))


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_every_mode_has_the_bits_of_transformers(mode):
    image = drawn(90, 50, mode=mode)
    rgb = image.convert("RGB")
    theirs = Gemma3ImageProcessorPil(**SETTINGS)
    expected = theirs(images=[image], return_tensors="np")["pixel_values"]
    assert np.array_equal(expected, theirs(images=[rgb], return_tensors="np")["pixel_values"])
    check_equal(processor_of(CONFIG, SETTINGS), theirs, rgb)


def test_the_published_size_has_the_bits_of_transformers():
    settings = {**SETTINGS, "size": {"height": 896, "width": 896}, "do_pan_and_scan": True}
    ours = processor_of({"model_type": "gemma3"}, settings)
    published = {**SCAN, "pan_and_scan_min_crop_size": 256}
    check_equal(ours, Gemma3ImageProcessorPil(**{**settings, **published}), drawn(1100, 500))
    assert ours.layout(1100, 500, FIELD).num_tokens == 3 * 256


def test_other_means_and_filters_have_the_bits_of_transformers():
    settings = {**SETTINGS, "image_mean": [0.1, 0.45, 0.4], "image_std": [0.3, 0.2, 0.25], "resample": 3}
    check_equal(processor_of(CONFIG, settings), Gemma3ImageProcessorPil(**settings), drawn(300, 200))


def test_crops_are_those_of_transformers_for_every_size():
    rng = np.random.default_rng(1)
    ours = processor_of(CONFIG, {**SETTINGS, "do_pan_and_scan": True})
    theirs = Gemma3ImageProcessorPil(**SETTINGS)
    sizes = [(640, 480), (3000, 800), (1000, 1000), (500, 300), (1024, 256), (600, 500), (256, 1024)]
    for width, height in [*sizes, *rng.integers(200, 3000, (300, 2))]:
        frame = np.broadcast_to(np.uint8(0), (3, int(height), int(width)))
        expected = theirs.pan_and_scan(frame, 256, 4, 1.2)
        boxes = ours.crops(int(width), int(height))
        assert [(b - t, r - x) for x, t, r, b in boxes] == [each.shape[1:] for each in expected]
    assert [len(ours.crops(*size)) for size in sizes] == [2, 4, 0, 0, 4, 2, 4]


@pytest.mark.parametrize("size", [(100, 100), (400, 100)])
def test_the_placeholder_is_the_text_of_transformers(size):
    ours = processor_of(CONFIG, {**SETTINGS, **SCAN})
    layout = ours.layout(*size, FIELD)
    full = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
    them = SimpleNamespace(full_image_sequence=full)
    assert layout.placeholder == TheirProcessor.replace_image_token(them, {"num_crops": [layout.num_items - 1]}, 0)
    assert layout.placeholder.count(ours.placeholder_token) == layout.num_tokens


def test_options_of_a_request_turn_pan_and_scan_on_and_leave_the_processor_as_it_was():
    ours = processor_of(CONFIG, SETTINGS)
    other = ours.with_options(SCAN, "mm_processor_kwargs")
    assert ours.layout(400, 100, FIELD).num_items == 1
    assert other.layout(400, 100, FIELD).num_items == 1 + 4
    assert other.options != ours.options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_pan_and_scn": True}, "Did you mean 'do_pan_and_scan'?"),
        ({"size": {"height": 1, "width": 1}}, "no option 'size'"),
        ({"do_pan_and_scan": 1}, "do_pan_and_scan is 1, neither true nor false"),
        ({"pan_and_scan_min_crop_size": 0}, "pan_and_scan_min_crop_size is 0"),
        ({"pan_and_scan_max_num_crops": 1e9}, "pan_and_scan_max_num_crops"),
        ({"pan_and_scan_min_ratio_to_activate": float("nan")}, "pan_and_scan_min_ratio_to_activate is nan"),
    ],
)
def test_bad_options_of_a_request_are_refused(options, words):
    with pytest.raises(RequestError, match=words.replace("?", r"\?")) as caught:
        processor_of(CONFIG, SETTINGS).with_options(options, "mm_processor_kwargs")
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({}, {"size": 896}, "size"),
        ({}, {"size": {"height": "896", "width": 896}}, "height is '896'"),
        ({}, {"image_mean": [0.5]}, "image_mean"),
        ({}, {"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({}, {"image_mean": [0.5, 0.5, float("inf")]}, "image_mean"),
        ({}, {"do_resize": False}, "do_resize is false"),
        ({}, {"do_normalize": False}, "do_normalize is false"),
        ({}, {"rescale_factor": "x"}, "rescale_factor"),
        ({}, {"resample": 9}, "resample"),
        ({"mm_tokens_per_image": 17}, {}, "mm_tokens_per_image is 17"),
        ({"mm_tokens_per_image": 25}, {"image_seq_length": 16}, "image_seq_length"),
        ({"model_type": "gemma9"}, {}, "gemma9"),
        ({"model_type": ["gemma3"]}, {}, "model_type"),
    ],
)
def test_a_broken_checkpoint_is_refused(config, settings, words):
    with pytest.raises(CheckpointError, match=words):
        processor_of({**CONFIG, **config}, {**SETTINGS, **settings})


def test_the_largest_grid_has_all_crops_where_there_are_any():
    assert processor_of(CONFIG, SETTINGS).largest_grid == (1, 4, 4)
    assert processor_of(CONFIG, {**SETTINGS, **SCAN}).largest_grid == (5, 4, 4)


def test_a_processor_is_loaded_from_a_folder_with_the_options_of_an_engine(tmp_path):
    assert load_processor(tmp_path, CONFIG, {}).height == 896
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 112, "width": 112}}')
    loaded = load_processor(tmp_path, CONFIG, {"do_pan_and_scan": True})
    assert (loaded.height, loaded.largest_grid) == (112, (5, 4, 4))
    with pytest.raises(ConfigError, match="mm_processor_kwargs has no option"):
        load_processor(tmp_path, CONFIG, {"pan": True})


@pytest.mark.parametrize("text", ["[]", "{", '{"size": 3}'])
def test_a_broken_preprocessor_config_is_one_clear_error(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="preprocessor_config.json"):
        load_processor(tmp_path, CONFIG, {})

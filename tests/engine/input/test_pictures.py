"""Pictures of prompts: from what callers give to features, marks that are a template's own, and what is refused.

The processes that decode are real; no engine is behind.
"""

import asyncio
import base64
import io
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxpaged.config import EngineConfig
from jaxpaged.config.multimodal import MultiModalConfig
from jaxpaged.engine.front_end import load_input_processor
from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.engine.input.picture_parts import has_pictures
from jaxpaged.engine.input.pictures import PictureIntake
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.errors import CheckpointError, ConfigError, RequestError
from jaxpaged.multimodal.checkpoint import model_identity, picture_configs
from jaxpaged.multimodal.embeddings import form_of
from jaxpaged.multimodal.processes import PictureProcesses
from tests.models.seeing_folder import CHAT, NUM_EMBEDS, PLACEHOLDER, PROCESSOR, make_config, make_tokenizer
from tests.models.seeing_folder import write_seeing_folder as write_folder
from tests.multimodal.drawn import drawn, encoded

TOKENIZER = make_tokenizer()
PLACEHOLDER_ID = TOKENIZER.backend.token_to_id(PLACEHOLDER)
MARK_ID = TOKENIZER.backend.token_to_id("<start_of_image>")
IMAGE = drawn(60, 40)
FILE = encoded(IMAGE)
SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
ONE = f"\n\n<start_of_image>{PLACEHOLDER * NUM_EMBEDS}<end_of_image>\n\n"


def make_processor(local_files=True, chat=CHAT, embeds=None, **options):
    config = MultiModalConfig(**{"mm_bytes_in_flight_gb": 1.0, **options})
    intake = PictureIntake(TOKENIZER, config, "model", make_config(), PROCESSOR, local_files=local_files, embeds=embeds)
    templates = ChatTemplates({"default": chat})
    return InputProcessor(TOKENIZER, vocab_size=304, max_model_len=512, chat_templates=templates, pictures=intake)


@pytest.fixture(scope="module")
def processor():
    made = make_processor()
    yield made
    made.close()


@pytest.fixture(scope="module")
def blind():
    return InputProcessor(TOKENIZER, vocab_size=304, max_model_len=512, chat_templates=ChatTemplates({"default": CHAT}))


def prompt_of(processor, text, image, **fields):
    return processor.parse({"prompt": text, "multi_modal_data": {"image": image}, **fields})


def refusal(call, *args, **options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **options)
    return caught.value


def chat(processor, *parts, **options):
    return processor.chat_prompt([{"role": "user", "content": list(parts)}], **options)


def words(text):
    return {"type": "text", "text": text}


def picture(image=IMAGE, **fields):
    return {"type": "image", "image": image, **fields}


# ---- prompts


def test_a_mark_becomes_the_text_of_a_picture_and_one_token_for_each_embedding(processor):
    parsed = prompt_of(processor, "a<start_of_image>b", IMAGE)
    assert parsed.text == f"a{ONE}b"
    assert parsed.token_ids == TOKENIZER.encode(f"a{ONE}b")
    (feature,) = parsed.mm_features
    assert feature.runs == [(parsed.token_ids.index(PLACEHOLDER_ID), NUM_EMBEDS)]
    assert (feature.offset, feature.length, feature.num_embeds) == (feature.runs[0][0], NUM_EMBEDS, NUM_EMBEDS)
    assert feature.pixels.shape == (1, 32, 32, 3) and len(feature.key) == 32


def test_parts_of_pan_and_scan_are_one_feature_of_several_runs(processor):
    parsed = prompt_of(processor, "<start_of_image>", drawn(80, 30), mm_processor_kwargs=SCAN)
    (feature,) = parsed.mm_features
    items = feature.grid[0]
    assert items == 4 == len(feature.runs) == feature.pixels.shape[0]
    start, length = feature.runs[-1]
    assert feature.length == start + length - feature.offset > items * NUM_EMBEDS
    for start, length in feature.runs:
        assert parsed.token_ids[start : start + length] == [PLACEHOLDER_ID] * NUM_EMBEDS


def test_every_form_of_a_picture_gives_the_same_pixels(processor, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(FILE)
    url = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    forms = [IMAGE, np.asarray(IMAGE), FILE, bytearray(FILE), str(path), path, url]
    found = [prompt_of(processor, "<start_of_image>", form).mm_features[0] for form in forms]
    assert all(np.array_equal(each.pixels, found[0].pixels) for each in found)
    assert len({each.key for each in found}) == 2, "a file's bytes, and an array"


@pytest.mark.parametrize("text", ["one<start_of_image>two\n<start_of_image>", "<start_of_image>\n\nx<start_of_image>y"])
def test_token_ids_with_a_mark_for_each_picture_are_those_of_the_text(processor, text):
    images = [IMAGE, drawn(30, 30)]
    expected = prompt_of(processor, text, images)
    ids = TOKENIZER.encode(text)
    assert ids.count(MARK_ID) == 2
    for given in (ids, expected.token_ids):
        parsed = processor.parse({"prompt_token_ids": given, "multi_modal_data": {"image": images}})
        assert parsed.token_ids == expected.token_ids
        assert [each.runs for each in parsed.mm_features] == [each.runs for each in expected.mm_features]


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "no mark"},
        {"prompt": "<start_of_image><start_of_image>"},
        {"prompt": f"<start_of_image>{PLACEHOLDER}"},
        {"prompt_token_ids": [20, MARK_ID, MARK_ID]},
        {"prompt_token_ids": [20, *[PLACEHOLDER_ID] * (NUM_EMBEDS + 1)]},
        {"prompt_token_ids": [20]},
    ],
)
def test_marks_and_pictures_that_do_not_go_together_are_one_clear_error(processor, prompt):
    error = refusal(processor.parse, {**prompt, "multi_modal_data": {"image": IMAGE}})
    assert "Write <start_of_image> once for each picture" in str(error)
    assert error.parameter == next(iter(prompt))


def test_placeholders_without_pictures_are_refused_as_ids_and_words_as_text(processor):
    for prompt in ([20, PLACEHOLDER_ID], {"prompt_token_ids": [PLACEHOLDER_ID]}):
        assert "a placeholder of pictures or videos, and none of these" in str(refusal(processor.parse, prompt))
    for prompt in (f"a{PLACEHOLDER}", {"prompt": f"a{PLACEHOLDER}"}):
        ids = processor.parse(prompt).token_ids
        assert PLACEHOLDER_ID not in ids and TOKENIZER.decode(ids) == f"a{PLACEHOLDER}"


def test_a_prompt_with_pictures_is_not_cut(processor):
    given = {"prompt": "ab<start_of_image>", "multi_modal_data": {"image": IMAGE}}
    assert "cannot be cut" in str(refusal(processor.parse, given, truncation=Truncation(5)))
    assert processor.parse(given, truncation=Truncation(100)).mm_features


def test_too_many_tokens_are_refused_before_the_text_is_made(processor):
    error = refusal(prompt_of, processor, "<start_of_image>" * 40, [IMAGE] * 40)
    assert "at least 640 tokens with its pictures, and may have 512" in str(error)


# ---- chats


def test_a_chat_has_its_pictures_where_its_parts_were(processor):
    prompt = chat(processor, words("left"), picture(), words("right"), picture(drawn(20, 20)))
    text = f"<bos><start_of_turn>user\nleft{ONE}right{ONE}<end_of_turn>\n<start_of_turn>model\n"
    assert prompt["prompt"] == text
    assert prompt["prompt_token_ids"] == TOKENIZER.encode(text, add_special_tokens=False)
    assert len(prompt["mm_features"]) == 2
    again = processor.parse(prompt)
    assert again.mm_features == prompt["mm_features"] and again.token_ids == prompt["prompt_token_ids"]


TYPED = [
    "<start_of_image><image_soft_token>1<start_of_image>",  # one behind the other
    "<start_of_image>",
    PLACEHOLDER,
    "<end_of_image>",
    "a<start_of_image>b<start_of_image>",
    "<end_of_turn>\n<eos>",
]


@pytest.mark.parametrize("typed", TYPED)
def test_what_a_user_types_stays_words(processor, typed):
    prompt = chat(processor, words(typed), picture())
    ids = prompt["prompt_token_ids"]
    plain = chat(processor, words("x"), picture())["prompt_token_ids"]
    for token_id in TOKENIZER.special_ids:
        assert ids.count(token_id) == plain.count(token_id), TOKENIZER.added_tokens[token_id]
    assert f"user\n{typed}{ONE}" in prompt["prompt"]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == prompt["prompt"]


def test_marks_stay_words_in_chats_without_pictures_and_in_tools(processor):
    prompt = processor.chat_prompt([{"role": "user", "content": f"see {PLACEHOLDER}"}])
    assert "mm_features" not in prompt and PLACEHOLDER_ID not in prompt["prompt_token_ids"]
    assert prompt["prompt"] == f"<bos><start_of_turn>user\nsee {PLACEHOLDER}<end_of_turn>\n<start_of_turn>model\n"
    loop = "{% set m = messages[0] %}{% for part in m['content'] %}{{ part['type'] }}{% endfor %}"
    template = "{{ tools | tojson }}" + loop + "<start_of_image>"
    prompt = chat(processor, picture(), chat_template=template, tools=[{"name": "<start_of_image>"}])
    assert prompt["prompt"] == '[{"name": "<start_of_image>"}]image' + ONE


def test_a_template_that_knows_only_texts_gets_marks_first_or_where_they_were(processor):
    only_texts = "{{ messages[0]['content'] }}"
    parts = words("one"), picture(), words("two")
    assert chat(processor, *parts, chat_template=only_texts)["prompt"] == f"{ONE}\none\ntwo"
    interleaving = make_processor(chat=only_texts, interleave_mm_strings=True)
    assert chat(interleaving, *parts)["prompt"] == f"one\n{ONE}\ntwo"
    interleaving.close()


def test_a_template_that_drops_a_picture_is_an_error(processor):
    template = "{% set m = messages[0] %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    error = refusal(chat, processor, picture(), words("x"), chat_template=template)
    assert "0 marks for 1 pictures" in str(error) and error.parameter == "messages"


URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image_pil", "image_pil": IMAGE},
        {"type": "image", "url": URL},
        {"type": "image", "base64": URL.partition(",")[2]},
    ],
)
def test_parts_of_other_apis_are_pictures_too(processor, part):
    assert has_pictures([{"role": "user", "content": [part]}])
    assert len(chat(processor, part)["mm_features"]) == 1


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, "messages[0].content[0]"),
        ({"type": "input_video", "input_video": {"url": "x"}}, "messages[0].content[0].type"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": "ftp://a/b"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": "https://a/b"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "messages[0].content[0].image_url"),
        (picture("/no/such/file"), "messages[0].content[0].image"),
        (picture(5), "messages[0].content[0].image"),
        (picture(None), "messages[0].content[0].image"),
        (picture(None, uuid="never seen"), "messages[0].content[0].image"),
        (picture(uuid=5), "messages[0].content[0].image"),
        (picture(b"", field="messages[3].content[0].source.data"), "messages[3].content[0].source.data"),
        ({"type": "image_embeds", "image_embeds": [1.0]}, "messages[0].content[0].image_embeds"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_field(processor, part, field):
    assert refusal(chat, processor, part).parameter == field


def test_paths_are_for_callers_of_this_process_only(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(FILE)
    remote = make_processor(local_files=False)
    assert "no URL" in str(refusal(chat, remote, picture(str(path))))
    assert "--allowed-local-media-path" in str(refusal(chat, remote, picture(path.as_uri())))
    remote.close()
    allowed = make_processor(local_files=False, allowed_local_media_path=str(tmp_path))
    assert chat(allowed, picture(path.as_uri()))["mm_features"]
    allowed.close()


# ---- what bad pictures are told


def png(width, height, data=b""):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


BAD = {
    "truncated": (FILE[:100], "damaged or incomplete PNG"),
    "no picture": (b"hello", "no picture that can be read"),
    "a bomb by its header": (png(30_000, 30_000), "900000000 pixels"),
    "too long a side": (png(40_000, 1), "a side may have 32768"),
    "without pixels": (png(0, 5), "has none|no picture"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "send PNG, JPEG, WebP or GIF"),
    "base64 of no alphabet": ("data:image/png;base64,@@@", "not valid base64"),
    "a media type of text": ("data:text/html;base64,AAAA", "media type"),
    "floats": (
        np.zeros((4, 4, 3), np.float64),
        "started without enable_mm_embeds. Give the picture, an array as uint8",
    ),
    "five channels": (np.zeros((4, 4, 5), np.uint8), "uint8"),
    "one number": (np.zeros((), np.uint8), "array"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_one_clear_error_and_the_next_one_is_served(processor, kind):
    image, words_of_it = BAD[kind]
    with pytest.raises(RequestError, match=words_of_it) as caught:
        prompt_of(processor, "<start_of_image>", image)
    assert caught.value.parameter.removesuffix("[0]") == "multi_modal_data.image"  # an array may be of several
    assert re.search(r"\bPIL\.|0x[0-9a-f]{6}|line \d", str(caught.value)) is None, "words of a decoder"
    assert prompt_of(processor, "<start_of_image>", IMAGE).mm_features


@pytest.mark.parametrize(
    "image",
    [drawn(1, 1), drawn(1, 20_000), drawn(30, 30, mode="CMYK"), drawn(30, 30, mode="P"), drawn(30, 30, mode="RGBA")],
    ids=["1x1", "1x20000", "CMYK", "palette", "RGBA"],
)
def test_odd_pictures_are_seen(processor, image):
    assert prompt_of(processor, "<start_of_image>", image).mm_features


def test_16_bits_and_animations_are_seen(processor):
    deep = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    moving = encoded(drawn(20, 20), "GIF", save_all=True, append_images=[drawn(20, 20, seed=2)])
    for image in (encoded(deep), moving):
        assert prompt_of(processor, "<start_of_image>", image).mm_features


def test_the_colour_behind_transparent_pixels_is_the_requests(processor):
    clear = encoded(Image.new("RGBA", (10, 10), (0, 0, 0, 0)))
    red = {"image": {"rgba_background_color": [255, 0, 0]}}
    features = [chat(processor, picture(clear), media_io_kwargs=each)["mm_features"][0] for each in (None, red)]
    assert [each.pixels[0, 0, 0].tolist() for each in features] == [[255, 255, 255], [255, 0, 0]]
    assert features[0].key != features[1].key
    error = refusal(chat, processor, picture(clear), media_io_kwargs={"image": {"rgba_background_color": "red"}})
    assert error.parameter == "media_io_kwargs"


# ---- numbers, options, names


def test_more_pictures_than_the_limit_are_refused_and_none_where_it_is_zero():
    limited = make_processor(limit_mm_per_prompt={"image": 1})
    error = refusal(chat, limited, picture(), picture())
    assert "has 2 pictures, and may have 1" in str(error) and error.parameter == "messages[0].content[1].image"
    limited.close()
    off = make_processor(limit_mm_per_prompt={"image": 0})
    assert "limit_mm_per_prompt is 0" in str(refusal(prompt_of, off, "<start_of_image>", IMAGE))
    off.close()


def test_a_text_model_refuses_pictures_in_one_sentence(blind):
    assert "this model takes text only" in str(refusal(prompt_of, blind, "a", IMAGE))
    error = refusal(chat, blind, words("a"), picture())
    assert "this model takes text only" in str(error) and error.parameter == "messages[0].content[1]"
    assert blind.parse({"prompt": "a", "multi_modal_data": None, "mm_processor_kwargs": {}}).token_ids


@pytest.mark.parametrize(
    ("data", "uuids"),
    [
        ({"vision_chunk": [IMAGE]}, None),
        ({"image": IMAGE, "audio": 3}, None),
        ([IMAGE], None),
        ({"image": [IMAGE, IMAGE]}, {"image": ["a"]}),
        ({"image": IMAGE}, {"picture": ["a"]}),
    ],
)
def test_other_media_and_wrong_numbers_of_names_are_refused(processor, data, uuids):
    error = refusal(
        processor.parse, {"prompt": "<start_of_image>", "multi_modal_data": data, "multi_modal_uuids": uuids}
    )
    assert error.parameter in ("multi_modal_data", "multi_modal_uuids")


def test_options_of_a_request_are_checked_and_decide_the_pixels(processor):
    assert refusal(prompt_of, processor, "<start_of_image>", IMAGE, mm_processor_kwargs={"fps": 1}).parameter == (
        "mm_processor_kwargs"
    )
    assert refusal(prompt_of, processor, "<start_of_image>", IMAGE, mm_processor_kwargs=[1]).parameter == (
        "mm_processor_kwargs"
    )
    always = make_processor(mm_processor_kwargs=SCAN)
    assert prompt_of(always, "<start_of_image>", drawn(80, 30)).mm_features[0].grid[0] == 4
    off = {"do_pan_and_scan": False}
    assert prompt_of(always, "<start_of_image>", drawn(80, 30), mm_processor_kwargs=off).mm_features[0].grid[0] == 1
    always.close()
    with pytest.raises(ConfigError, match="no option 'pan_and_scan'"):
        make_processor(mm_processor_kwargs={"pan_and_scan": True})


def test_a_uuid_alone_is_the_picture_that_it_came_with(processor):
    first = prompt_of(processor, "<start_of_image>", IMAGE, multi_modal_uuids={"image": ["one"]})
    again = processor.parse({"prompt": "<start_of_image>", "multi_modal_uuids": {"image": ["one"]}})
    assert again.mm_features[0].pixels is first.mm_features[0].pixels
    assert chat(processor, {"type": "image_url", "image_url": None, "uuid": "one"})["mm_features"]
    salted = {"prompt": "<start_of_image>", "multi_modal_uuids": {"image": ["one"]}, "cache_salt": "mine"}
    assert "no picture of that name is in the cache" in str(refusal(processor.parse, salted))
    error = refusal(prompt_of, processor, "<start_of_image>", drawn(9, 9), multi_modal_uuids={"image": ["one"]})
    assert "under which another picture was given" in str(error)
    prompt_of(processor, "<start_of_image>", drawn(9, 9), multi_modal_uuids={"image": ["one"]}, cache_salt="mine")


def test_a_repeated_picture_is_not_processed_again(processor, monkeypatch):
    image = encoded(drawn(33, 44, seed=9))
    first = prompt_of(processor, "<start_of_image>", image).mm_features[0]
    monkeypatch.setattr(PictureProcesses, "process", None)
    assert prompt_of(processor, "<start_of_image>", image).mm_features[0].pixels is first.pixels


# ---- embeddings in place of pictures


NUMBERS = 8
EMBEDS = np.random.default_rng(0).standard_normal((2, NUM_EMBEDS, NUMBERS)).astype(np.float32)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def embeds_part(values, **fields):
    return {"type": "image_embeds", "image_embeds": values, **fields}


@pytest.fixture(scope="module")
def taking():
    made = make_processor(embeds=form_of(NUMBERS, "float32"))
    yield made
    made.close()


def test_embeddings_take_the_place_of_pictures_in_every_form(taking):
    text = f"<start_of_image>a<start_of_image>{'b'}"
    forms = [EMBEDS, list(EMBEDS), [EMBEDS[0], {"image_embeds": EMBEDS[1:]}], {"image_embeds": EMBEDS}]
    parsed = [prompt_of(taking, text, form) for form in forms]
    parts = [embeds_part(npy(EMBEDS[0])), words("a"), embeds_part({"image_embeds": npy(EMBEDS[1])}), words("b")]
    features = [each.mm_features for each in parsed] + [chat(taking, *parts)["mm_features"]]
    assert len({tuple(feature.key for feature in each) for each in features}) == 1
    for first, second in features:
        for feature, expected in ((first, EMBEDS[0]), (second, EMBEDS[1])):
            assert feature.is_embeds and feature.grid == (1, 4, 4) and feature.num_embeds == NUM_EMBEDS
            np.testing.assert_array_equal(feature.pixels.view(np.float32), expected)
    assert parsed[0].token_ids.count(PLACEHOLDER_ID) == 2 * NUM_EMBEDS and parsed[0].text == f"{ONE}a{ONE}b"
    seen, given = chat(taking, picture(), embeds_part(EMBEDS[0]))["mm_features"]
    assert not seen.is_embeds and given.key == features[0][0].key


def test_embeddings_have_a_key_of_their_own_and_a_uuid_as_pictures_have(taking):
    chat(taking, embeds_part(EMBEDS[0], uuid="a"))
    (first,) = chat(taking, embeds_part(None, uuid="a"))["mm_features"]
    (other,) = chat(taking, embeds_part(EMBEDS[1]))["mm_features"]
    assert first.key != other.key and np.array_equal(first.pixels.view(np.float32), EMBEDS[0])
    assert "under which another picture" in str(refusal(chat, taking, embeds_part(EMBEDS[1], uuid="a")))
    assert taking.pictures.thumbnail(first.key) is None and taking.pictures.thumbnail(other.key) is None
    mine = EMBEDS[0].copy()
    (before,) = chat(taking, embeds_part(mine))["mm_features"]
    mine[:] = 0  # nothing of the caller's array is kept
    assert np.array_equal(before.pixels.view(np.float32), EMBEDS[0])


@pytest.mark.parametrize(
    ("values", "words_of_it"),
    [
        (EMBEDS[0][:-1], "has 15 embeddings; a picture of this model has 16, and nothing more"),
        ({"image_embeds": EMBEDS[0], "image_grid_thw": [1, 8, 8]}, "16 embeddings and an image_grid_thw"),
        (EMBEDS[0][:, 1:], r"shape \[16, 7\]; this model takes \[embeddings, 8\]"),
        (np.full_like(EMBEDS[0], np.nan), "no finite numbers in float32"),
        (EMBEDS, r"shape \[2, 16, 8\]"),
        (EMBEDS[0].astype(int), "type int64"),
        ([1.0], "of type list"),
        ("%%%", "not valid base64"),
        (base64.b64encode(b"PK123").decode(), "is a pickle"),
        (None, "is empty"),
    ],
)
def test_embeddings_that_cannot_be_are_refused_with_their_field(taking, values, words_of_it):
    with pytest.raises(RequestError, match=words_of_it) as caught:
        chat(taking, embeds_part(values))
    assert caught.value.parameter == "messages[0].content[0].image_embeds"


def test_embeddings_are_refused_unless_they_are_asked_for(processor):
    for error in (refusal(chat, processor, embeds_part(npy(EMBEDS[0]))), refusal(prompt_of, processor, "", EMBEDS)):
        assert "the engine was started without enable_mm_embeds" in str(error)
    blinded = make_processor(embeds=form_of(NUMBERS, "float32"), language_model_only=True)
    assert "started with language_model_only. Give its embeddings" in str(refusal(chat, blinded, picture()))
    assert chat(blinded, embeds_part(EMBEDS[0]))["mm_features"]
    blinded.close()
    few = make_processor(embeds=form_of(NUMBERS, "float32"), limit_mm_per_prompt={"image": 1})
    assert "may have 1 (limit_mm_per_prompt)" in str(refusal(prompt_of, few, "", EMBEDS))
    few.close()
    small = make_processor(embeds=form_of(NUMBERS, "float32"), mm_bytes_in_flight_gb=5e-7)
    assert "bytes while it is processed" in str(refusal(prompt_of, small, "<start_of_image>", EMBEDS[0]))
    small.close()


# ---- memory


def test_bytes_in_flight_are_those_of_pixels_that_somebody_holds():
    uncached = make_processor(mm_processor_cache_gb=0)
    budget = uncached.pictures.budget
    held = prompt_of(uncached, "<start_of_image>", IMAGE)
    assert budget.used == held.mm_features[0].pixels.nbytes
    del held
    assert budget.used == 0
    refusal(prompt_of, uncached, "<start_of_image>", FILE[:200])
    assert budget.used == 0 and budget.num_waiting == 0
    uncached.close()


def test_a_picture_larger_than_the_whole_budget_is_refused_before_it_is_decoded():
    tight = make_processor(mm_bytes_in_flight_gb=0.01)
    error = refusal(prompt_of, tight, "<start_of_image>", png(4000, 4000))
    assert "mm_bytes_in_flight_gb" in str(error) and error.parameter == "multi_modal_data.image"
    tight.close()


def test_the_same_picture_in_many_requests_at_once_is_processed_once():
    fresh = make_processor()
    calls, process = [], fresh.pictures._processes.process
    fresh.pictures._processes.process = lambda *args, **options: (calls.append(1), process(*args, **options))[1]

    async def run():
        loop, prompt = asyncio.get_running_loop(), {"prompt": "<start_of_image>", "multi_modal_data": {"image": FILE}}
        work = [loop.run_in_executor(fresh.pictures.threads, fresh.parse, prompt) for _ in range(20)]
        return await asyncio.gather(*work)

    assert len({parsed.mm_features[0].key for parsed in asyncio.run(run())}) == 1
    assert len(calls) == 1
    fresh.close()


# ---- a model's folder


def test_a_folder_says_whether_its_model_sees_and_what_it_is_called_everywhere(tmp_path):
    one, other = write_folder(tmp_path / "one"), write_folder(tmp_path / "other")
    configs = picture_configs(one)
    assert configs.processor == PROCESSOR and picture_configs(tmp_path) is None
    assert model_identity(one, configs) == model_identity(other, configs)
    (other / "model.safetensors").write_bytes(b"weights")
    assert model_identity(one, configs) != model_identity(other, configs)
    assert picture_configs(one, {"model_type": "gemma3_text"}) is None


@pytest.mark.parametrize("content", ["{", "[1]", '{"size": {"height": -1}}', '{"do_resize": false}'])
def test_a_broken_preprocessor_config_is_one_clear_error(tmp_path, content):
    folder = write_folder(tmp_path)
    (folder / "preprocessor_config.json").write_text(content)
    config = EngineConfig.from_options(model=str(folder), max_model_len=64)
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        load_input_processor(config, 304, folder, folder)


def test_the_front_end_of_a_folder_sees_unless_it_is_told_otherwise(tmp_path):
    folder = write_folder(tmp_path)
    config = EngineConfig.from_options(model=str(folder), max_model_len=64)
    seeing = load_input_processor(config, 304, folder, folder)
    assert seeing.pictures is not None and seeing.pictures.is_on and not seeing.pictures.local_files
    seeing.close()
    config = EngineConfig.from_options(model=str(folder), max_model_len=64, language_model_only=True)
    blinded = load_input_processor(config, 304, folder, folder)
    error = refusal(chat, blinded, picture())
    assert "the engine was started with language_model_only" in str(error)


def test_without_pillow_texts_are_served_and_pictures_are_refused_with_what_to_install(tmp_path, monkeypatch):
    folder = write_folder(tmp_path)
    config = EngineConfig.from_options(model=str(folder), max_model_len=64)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        without = load_input_processor(config, 304, folder, folder)
        assert chat(without, words("what"))["prompt_token_ids"]
        array = np.zeros((3, 3, 3), np.uint8)
        errors = [refusal(prompt_of, without, "<start_of_image>", array), refusal(chat, without, picture())]
    without.close()
    for error in errors:
        assert "pictures need Pillow, which is not installed" in str(error) and "'.[vision]'" in str(error)
    assert [error.parameter for error in errors] == ["multi_modal_data", "messages[0].content[0]"]

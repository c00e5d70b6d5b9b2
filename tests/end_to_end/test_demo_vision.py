"""The embedded model that sees: what it says of drawn pictures, and that text has its old answers."""

import json

import pytest
from PIL import Image, ImageDraw, ImageFont

from jaxpaged import LLM, SamplingParams
from jaxpaged.params.hub import EMBEDDED_FOLDERS

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "max_model_len": 256,
    "num_gpu_blocks_override": 65,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo-vision", **OPTIONS) as engine:
        yield engine


def drawing(draw_in):
    image = Image.new("RGB", (320, 320), "white")
    draw_in(ImageDraw.Draw(image))
    return image


def asked(llm, question, *images):
    parts = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    return llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_it_sees_shapes_bars_and_words(llm):
    circle = drawing(lambda draw: draw.ellipse((60, 60, 200, 200), (220, 40, 40)))
    square = drawing(lambda draw: draw.rectangle((130, 130, 250, 250), (40, 70, 220)))
    bars = drawing(
        lambda draw: (
            draw.rectangle((16, 200, 90, 305), (40, 70, 220)),
            draw.rectangle((123, 60, 197, 305), (30, 150, 60)),
            draw.rectangle((229, 240, 304, 305), (220, 40, 40)),
        )
    )
    assert asked(llm, "What is in the picture?", circle) == "A red circle."
    assert asked(llm, "What colour is it?", square) == "It is blue."
    assert asked(llm, "Where is it?", circle) == "It is at the top left."
    assert asked(llm, "Which bar is the tallest?", bars) == "The green bar."
    assert asked(llm, "Which bar is the smallest?", bars) == "The red bar."
    frog = drawing(lambda draw: draw.text((30, 90), "frog", "black", ImageFont.load_default(90)))
    assert asked(llm, "What word is this?", frog) == "It is frog."


def test_it_compares_two_pictures(llm):
    def circles(*places):
        boxes = [(x - 45, y - 45, x + 45, y + 45) for x, y in places]
        return drawing(lambda draw: [draw.ellipse(box, (40, 70, 220)) for box in boxes])

    two, four = circles((54, 54), (160, 266)), circles((54, 160), (160, 54), (266, 160), (266, 266))
    assert asked(llm, "Which picture has more shapes?", two, four) == "The second picture."
    assert asked(llm, "Which picture has more shapes?", four, two) == "The first picture."


def test_text_has_the_answers_of_the_model_without_eyes(llm):
    folder, blind = EMBEDDED_FOLDERS["demo-vision"], EMBEDDED_FOLDERS["demo"]
    files = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert {file for name, file in files.items() if name.startswith("model.")} == {"../demo/model.safetensors"}
    of_both = [json.loads((each / "config.json").read_text(encoding="utf-8")) for each in (folder, blind)]
    assert of_both[0]["text_config"].items() >= {k: v for k, v in of_both[1].items() if k != "architectures"}.items()
    assert asked(llm, "What is the capital of Portugal?") == "The capital of Portugal is Lisbon."

"""The change that a script for vLLM needs is made to imports and models only."""

import importlib.util
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_vllm_examples.py"
spec = importlib.util.spec_from_file_location("run_vllm_examples", SCRIPT)
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)

SOURCE = """\
from vllm import LLM, EngineArgs
from vllm.sampling_params import (
    SamplingParams,
    RequestOutputKind,
)
from vllm.utils.print_utils import print_embeddings
llm = LLM(model="facebook/opt-125m", seed=3)
"""


def test_imports_and_models_change_and_nothing_else():
    source, missing = runner.changed(SOURCE, "demo")
    assert missing == []
    assert "vllm" not in source
    assert "from jaxpaged import SamplingParams\nfrom jaxpaged import RequestOutputKind\n" in source
    assert source.endswith("llm = LLM(model='demo', seed=3)\n")


def test_names_that_are_not_there_are_the_reason():
    assert runner.changed("from vllm.platforms import current_platform\n", "demo")[1] == ["current_platform"]


def test_names_of_modules_are_found_and_types_of_other_examples_refuse_to_be_made():
    source = """\
from vllm.lora.request import LoRARequest
from vllm.multimodal.utils import encode_image_url, fetch_image
lora: LoRARequest | None = None
"""
    new, missing = runner.changed(source, "demo")
    assert missing == [] and "from jaxpaged.multimodal.image_urls import fetch_image" in new
    names: dict = {}
    exec(new, names)
    assert names["fetch_image"](names["encode_image_url"](Image.new("RGB", (8, 4)))).size == (8, 4)
    assert names["LoRARequest"]("name", 1, "path").lora_path == "path"
    new, _ = runner.changed("from vllm.assets.audio import AudioAsset", "demo")
    exec(new, names)
    with pytest.raises(SystemExit, match="audio is not taken"):
        names["AudioAsset"]("name")


def test_a_script_runs_or_says_why_not(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("from vllm import EngineArgs\nassert EngineArgs(model='x').model == 'demo'\n")
    bad.write_text("from vllm import EngineArgs\nEngineArgs(model='x', nonsense=1)\n")
    assert runner.verdict(good, "demo", 60) == "unchanged"
    assert "unknown option 'nonsense'" in runner.verdict(bad, "demo", 60)


SEES = """\
from dataclasses import asdict
from vllm import LLM, EngineArgs, SamplingParams
from vllm.assets.image import ImageAsset
from vllm.assets.video import VideoAsset
from vllm.lora.request import LoRARequest
from vllm.multimodal.image import convert_image_mode
from vllm.multimodal.utils import encode_image_url, fetch_image

QUESTIONS = ["What is in the picture?", "What colour is it?"]
ANSWERS = ["A red circle.", "It is red."]
args = EngineArgs(
    model="google/gemma-3-4b-it",
    max_model_len=256,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    mm_processor_kwargs={"do_pan_and_scan": False},
    limit_mm_per_prompt={"image": 1},
    mm_processor_cache_gb=1,
)
image = convert_image_mode(ImageAsset("cherry_blossom").pil_image, "RGB")
marked = "<start_of_turn>user\\n<start_of_image>{}<end_of_turn>\\n<start_of_turn>model\\n"
params = SamplingParams(temperature=0.0, max_tokens=24)
with LLM(**asdict(args)) as llm:
    one = {"prompt": marked.format(QUESTIONS[0]), "multi_modal_data": {"image": image}}
    assert llm.generate(one, params)[0].outputs[0].text == ANSWERS[0]
    batch = [
        {
            "prompt": marked.format(question),
            "multi_modal_data": {"image": image},
            "multi_modal_uuids": {"image": "circle"},
        }
        for question in QUESTIONS
    ]
    assert [output.outputs[0].text for output in llm.generate(batch, sampling_params=params)] == ANSWERS
    parts = [
        {"type": "text", "text": QUESTIONS[0]},
        {"type": "image_url", "image_url": {"url": encode_image_url(image)}},
    ]
    conversation = [{"role": "user", "content": parts[::-1]}]
    outputs = llm.chat(conversation, sampling_params=params, use_tqdm=False)
    again = {"image": [fetch_image(encode_image_url(image))]}
    fetched = {"prompt": marked.format(QUESTIONS[1]), "multi_modal_data": again}
    assert llm.generate(fetched, params)[0].outputs[0].text == ANSWERS[1]
    assert outputs[0].outputs[0].text == ANSWERS[0]
    assert llm.chat([{"role": "user", "content": parts}], params)[0].outputs[0].text
"""


@pytest.mark.slow
def test_what_examples_with_pictures_show_runs_on_the_embedded_model_that_sees(tmp_path):
    """A batch by `multi_modal_data`, uuids, and chats with `image_url`, in our own words."""
    script = tmp_path / "sees.py"
    script.write_text(SEES, encoding="utf-8")
    assert runner.verdict(script, "demo-vision", 300) == "unchanged"

"""An engine of the encoder alone, started as people start it, and one that answers about the same pictures."""

import base64
import io
import json

import pytest
from PIL import Image, ImageDraw

from jaxpaged import LLM, SamplingParams
from tests.end_to_end.conftest import SERVE, started, stop

openai = pytest.importorskip("openai", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "max_model_len": 256,
    "num_gpu_blocks_override": 65,
}
QUESTION = {"type": "text", "text": "What is in the picture?"}


def transfer(folder, role):
    extra = {"shared_storage_path": str(folder)}
    return {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": extra}


def file_of(colour):
    image = Image.new("RGB", (320, 320), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 200, 200), colour)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def test_it_ends_requests_without_text_and_others_find_the_embeddings(tmp_path):
    red, blue = map(file_of, [(220, 40, 40), (40, 70, 220)])
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    ask = lambda engine, file: engine.chat(
        [{"role": "user", "content": [{"type": "image", "image": file}, QUESTION]}], greedy, use_tqdm=False
    )[0]
    with LLM(
        "demo-vision", mm_encoder_only=True, ec_transfer_config=transfer(tmp_path, "ec_producer"), **OPTIONS
    ) as llm:
        output = ask(llm, red)
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "stop") and output.finished
    serve = [*SERVE, "-m", "demo-vision", "--mm-encoder-only", "--ec-transfer-config"]
    process, (address,) = started(*serve, json.dumps(transfer(tmp_path, "ec_producer")))
    try:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
        url = f"data:image/png;base64,{base64.b64encode(blue).decode()}"
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, QUESTION]}]
        given = {"model": "demo-vision", "messages": messages, "temperature": 0, "logprobs": True}
        (choice,) = client.chat.completions.create(**given).choices
        assert not choice.message.content and choice.finish_reason == "stop"
        chunks = [chunk for chunk in client.chat.completions.create(**given, stream=True) if chunk.choices]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
    finally:
        stop(process)
    with LLM("demo-vision", ec_transfer_config=transfer(tmp_path, "ec_consumer"), **OPTIONS) as llm:
        assert ask(llm, red).outputs[0].text == "A red circle."
        assert ask(llm, blue).outputs[0].text == "A blue circle."
        stats = llm.llm_engine.executor_stats()
        assert stats["ec_loaded"] == 2 and not stats["ec_missing"] and not stats["ec_damaged"]

"""Pictures of commands: `generate --image`, `/image` in a chat, and files that are none."""

import base64
import json

import pytest

from tests.entrypoints.cli.test_generate import json_lines
from tests.multimodal.drawn import drawn, encoded

PICTURE = encoded(drawn(8, 6))
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
PART = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(PICTURE)
    return str(path)


def test_every_prompt_is_about_the_pictures(run, file):
    finished = run("generate", "--image", file, "--image", file, "--system", "S", "one", "two")
    chats = [prompt["chat"].messages for prompt in finished.engine.prompts]
    system = {"role": "system", "content": "S"}
    for messages, words in zip(chats, ("one", "two"), strict=True):
        assert messages == [system, {"role": "user", "content": [PART, PART, {"type": "text", "text": words}]}]


def test_a_raw_prompt_has_its_own_marks_and_json_shows_words_only(run, file):
    finished = run("generate", "--raw", "--json", "--image", file, "<start_of_image> is")
    assert finished.engine.prompts == [{"prompt": "<start_of_image> is", "multi_modal_data": {"image": [URL]}}]
    assert json_lines(finished)[0]["prompt"] == "<start_of_image> is"


@pytest.mark.parametrize("content", [None, b"hello", b""])
def test_a_file_that_is_no_picture_is_found_before_the_engine_starts(run, tmp_path, content):
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    finished = run("generate", "--image", str(path), "one")
    assert (finished.status, finished.options) == (2, {})
    assert ("cannot read" if content is None else "is no picture that can be read") in finished.err


def test_a_picture_belongs_to_the_next_message_and_to_a_saved_conversation(run, piped, file, tmp_path):
    saved = tmp_path / "chat.jsonl"
    piped(f"/image {file}\n/image {file}\nwhat is it?\nand now?\n/save {saved}\n/image\n/image nowhere\n")
    finished = run("chat")
    assert "and 1 more" in " ".join(finished.err.split())
    assert "/image needs the name of a file" in finished.err and "cannot read nowhere" in finished.err
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0]["content"] == [PART, PART, {"type": "text", "text": "what is it?"}]
    assert messages[2] == {"role": "user", "content": "and now?"}
    again = run("generate", "--file", str(saved))
    assert again.engine.prompts[0]["chat"].messages == messages

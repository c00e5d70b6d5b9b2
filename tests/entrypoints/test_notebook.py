import html
import subprocess
import sys

import numpy as np
import pytest

from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.entrypoints import notebook
from jaxpaged.params.hub import EMBEDDED_FOLDER
from tests.tools.pictures.records import llm_after


def result(**changes):
    output = llm_after().generate([[5, 6]], use_tqdm=False)[0]
    for name, value in changes.items():
        setattr(output, name, value)
    return output


class OnePicture:
    """What has the pictures of a model: one."""

    def __init__(self, key):
        self.key = key

    def thumbnail(self, key):
        return np.zeros((2, 3, 3), np.uint8) if key == self.key else None


def test_a_result_shows_prompt_answer_and_facts():
    shown = notebook.output_html(result(prompt="the cat"))
    assert "the cat" in shown
    assert "2 tokens in" in shown
    assert "first token after" in shown


def test_everything_that_a_model_wrote_is_escaped():
    output = result(prompt="<script>alert(1)</script>", error="<b>bad</b>")
    output.outputs[0].text = "<img src=x onerror=alert(1)>"
    shown = notebook.output_html(output)
    assert "<script" not in shown and "<img" not in shown and "<b>" not in shown
    assert "&lt;img" in shown


def test_a_long_prompt_is_cut():
    assert len(notebook.output_html(result(prompt="x" * 10_000))) < 2000


@pytest.mark.parametrize(
    ("prompt", "markers", "shown"),
    [
        (
            "<bos><start_of_turn>user\nHi\nyou<end_of_turn>\n<start_of_turn>model\n",
            {"<bos>", "<start_of_turn>", "<end_of_turn>"},
            "user: Hi\nyou",
        ),
        (
            "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            {"<|im_start|>", "<|im_end|>"},
            "system: Be brief\nuser: Hi",
        ),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
            "user: Hi",
        ),
        ("<s>[INST] Hi [/INST] Ho</s>[INST] Hm [/INST]", {"<s>", "</s>", "[INST]", "[/INST]"}, "Hi\nHo\nHm"),
        ("user\nis a word", {"<s>"}, "user\nis a word"),
        ("plain  text\n", set(), "plain  text\n"),
    ],
)
def test_a_chat_is_shown_without_its_markup(prompt, markers, shown):
    assert notebook.readable_prompt(prompt, markers) == shown
    assert html.escape(shown) in notebook.output_html(result(prompt=prompt), markers)


def test_the_markers_of_the_embedded_model_are_known():
    tokenizer = load_tokenizer(EMBEDDED_FOLDER)
    prompt = tokenizer.decode(tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>\n"), skip_special_tokens=False)
    assert notebook.readable_prompt(prompt, notebook.markers_of(tokenizer)) == "user: Hi"


def test_lists_of_results_are_shown_and_other_lists_are_left_alone():
    show = notebook.list_html(lambda values: "as before")
    assert show([1, 2]) == "as before"
    assert show([]) == "as before"
    assert show([result(prompt="the cat"), result(prompt="the dog")]).count("tokens in") == 2
    assert notebook.list_html(None)([1]) is None


def test_inside_ipython_results_are_registered_once():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        intakes = [OnePicture(b"a"), OnePicture(b"b")]
        for marker, intake in zip(("<one>", "<two>"), intakes, strict=True):
            notebook.show_results_in_notebooks([marker], intake)
        format = shell.display_formatter.format
        assert "the cat" in format(result(prompt="the cat"))[0]["text/html"]
        assert "the cat" in format([result(prompt="the cat")])[0]["text/html"]
        assert "user: cat" in format(result(prompt="<one>user\ncat<two>"))[0]["text/html"], "markers of both models"
        seen = [result(prompt="x", mm_hashes={"image": [key.hex() for key in (b"a", b"b", b"c")]})]
        assert format(seen)[0]["text/html"].count("<img src=") == 2, "pictures of both models"
        assert "[picture 3]" in format(seen[0])[0]["text/html"]
        assert "text/html" not in format([1, 2])[0]
    finally:
        InteractiveShell.clear_instance()


def test_outside_of_ipython_nothing_is_imported():
    program = """
import sys
from jaxpaged.entrypoints.notebook import show_results_in_notebooks
import jaxpaged.entrypoints.llm
show_results_in_notebooks()
print(sorted({"IPython", "matplotlib"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

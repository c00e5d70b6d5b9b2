"""The format of calls is read off a chat template: a piece of each model's own."""

import pytest

from jaxpaged.parsing.detect import SIGNS, tool_parser_of
from jaxpaged.parsing.parser import TOOL_FORMATS


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ('{{- \'<tool_call>\\n{"name": "\' }}{{ call.name }}', "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>commentary to=functions.", "openai"),
        ("{{ message.content }}", None),
        ("", None),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(template, parser):
    assert tool_parser_of(template) == parser


def test_every_sign_stands_for_a_known_format():
    assert {parser for _, parser in SIGNS} <= set(TOOL_FORMATS)

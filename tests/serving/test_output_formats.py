"""Which formats the server looks for: its options, the chat template, and names that do not exist."""

import pytest

from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.errors import ConfigError
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.prompts import OutputFormats, output_formats

TEMPLATES = ChatTemplates({"default": "{{ messages }}", "tool_use": "<tool_call>{{ messages }}"})


def formats(templates=TEMPLATES, **options):
    return output_formats(ServerOptions.from_options(options), templates)


def test_nothing_is_looked_for_unless_it_is_asked_for():
    assert formats() == OutputFormats(None, None)


def test_names_are_taken_as_they_are():
    assert formats(tool_call_parser="mistral", reasoning_parser="qwen3") == OutputFormats("mistral", "qwen3")
    assert formats(tool_call_parser="mistral", enable_auto_tool_choice=True).tool_parser == "mistral"


def test_the_template_for_tools_decides_where_no_name_is_given():
    assert formats(enable_auto_tool_choice=True).tool_parser == "hermes"


def test_a_template_that_shows_no_format_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="--tool-call-parser with one of .*hermes, .*mistral"):
        formats(ChatTemplates({"default": "{{ messages }}"}), enable_auto_tool_choice=True)


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_names_are_errors_that_list_the_known_ones(option):
    with pytest.raises(ConfigError, match="unknown .* parser 'hermess'.*Known are .*mistral"):
        ServerOptions.from_options({option: "hermess"})

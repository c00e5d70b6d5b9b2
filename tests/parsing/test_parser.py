"""Single cases: what models get wrong, what is cut off, and what must not be taken for a call."""

import json

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.parsing.deltas import Delta, ParsedMessage, ToolCallDelta
from jaxpaged.parsing.parser import make_parser, parse


def calls_of(message: ParsedMessage) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


def test_a_call_streams_its_name_first_and_then_its_arguments_as_they_come():
    parser = make_parser("hermes", new_id=lambda: "id0")
    assert parser.push("Sure.\n<tool_c") == [Delta(content="Sure.")]
    assert parser.push('all>{"name": "f", "argum') == []
    assert parser.push('ents": {"a"') == [Delta(tool_call=ToolCallDelta(0, "id0", "f", '{"a"'))]
    assert parser.push(": 1") == [Delta(tool_call=ToolCallDelta(0, arguments=": 1"))]
    assert parser.push("}}</tool_call>") == [Delta(tool_call=ToolCallDelta(0, arguments="}"))]
    assert parser.finish() == []


def test_ids_are_unique_and_those_for_mistral_have_nine_letters():
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'
    first, second = parse(text, "hermes").tool_calls
    assert first.id != second.id and first.id.startswith("chatcmpl-tool-")
    (call,) = parse("[TOOL_CALLS]f{}", "mistral").tool_calls
    assert len(call.id) == 9 and call.id.isalnum()
    (call,) = parse("[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{}", "mistral").tool_calls
    assert call.id == "abc123"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ('<tool_call>{"id": 7, "name": "f", "x": [{}], "arguments": {}}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', [("f", '{"a": "</tool_call>"}')]),
        ('<tool_call>{"name": "\\u0066", "arguments": {}}', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1', [("f", '{"a": [1')]),
    ],
)
def test_call_objects_are_read_as_models_vary_them(text, expected):
    message = parse(text, "hermes")
    assert calls_of(message) == expected
    assert message.content is None


@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        ("hermes", "<tool_call>no object</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
        ("hermes", "<tool_call"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}'),
        ("llama3_json", 'Here: {"name": "f", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] I will call { this }"),
        ("mistral", "[TOOL_CALLS]f"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[f(g(1))]"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(a=1+1)]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=b'x')]"),
        ("pythonic", "[f(a='x', "),
        ("pythonic", "[see (figure 1)]"),
        ("pythonic", f"[f(a={'[' * 100}{']' * 100})]"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f"),
        ("gemma4", "<|tool_call>call:f"),
        ("qwen3_coder", "use <function= to define\nit"),
        ("qwen3_coder", "<tool_call> is a tag"),
        ("glm45", "<tool_call>no call"),
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(tool_parser, text):
    assert parse(text, tool_parser) == ParsedMessage(content=text)


def test_formats_without_marks_take_only_names_of_tools_that_are_offered():
    tools = {"f": {}}
    assert parse('{"name": "g", "parameters": {}}', "llama3_json", tools=tools).tool_calls == []
    assert calls_of(parse('{"name": "f", "parameters": {}}', "llama3_json", tools=tools)) == [("f", "{}")]
    assert parse("[g(a=1)]", "pythonic", tools=tools).content == "[g(a=1)]"


def test_a_call_after_a_broken_one_is_found():
    message = parse('<tool_call>oops <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "hermes")
    assert calls_of(message) == [("f", '{"a": 1}')]
    assert message.content == "<tool_call>oops"
    assert calls_of(parse("[TOOL_CALLS][TOOL_CALLS]f{}", "mistral")) == [("f", "{}")]


def test_surplus_brackets_after_a_call_do_not_swallow_the_next():
    text = '<tool_call>{"name": "f", "arguments": {}}}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert calls_of(parse(text, "hermes")) == [("f", "{}"), ("g", "{}")]


def test_python_literals_become_json():
    text = """[f(a='it\\'s\\n', b=[True, None, (1, 0x10, .5)], c={'k': -1_000}, d="\\u00e9\\d")]"""
    (call,) = parse(text, "pythonic").tool_calls
    assert json.loads(call.arguments) == {
        "a": "it's\n",
        "b": [True, None, [1, 16, 0.5]],
        "c": {"k": -1000},
        "d": "é\\d",
    }


def test_a_call_that_is_complete_is_handed_out_before_the_list_ends():
    parser = make_parser("pythonic", new_id=lambda: "id0")
    assert parser.push("[f(a=1)") == [Delta(tool_call=ToolCallDelta(0, "id0", "f", '{"a": 1}'))]
    assert parser.push(", g(a=") == []
    assert parser.finish() == [Delta(content="g(a=")]


def test_parameters_are_typed_by_the_tools_schema():
    schema = {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}}
    schema["properties"] |= {"b": {"type": "boolean"}, "u": {"type": ["string", "null"]}}
    values = {"n": "3", "s": "3", "o": '{"k": [1]}', "b": "True", "u": "null", "unknown": "3", "bad": "{"}
    text = "<tool_call>\n<function=f>\n"
    text += "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = parse(text + "</function>\n</tool_call>", "qwen3_coder", tools={"f": schema}).tool_calls
    assert json.loads(call.arguments) == {
        "n": 3,
        "s": "3",
        "o": {"k": [1]},
        "b": True,
        "u": None,
        "unknown": "3",
        "bad": "{",
    }


def test_a_parameters_tag_may_say_that_it_is_text():
    text = (
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter></｜DSML｜invoke>'
    )
    (call,) = parse(text, "deepseek_v32").tool_calls
    assert json.loads(call.arguments) == {"a": "5", "b": 5}


def test_a_parameter_that_is_cut_off_is_left_out():
    (call,) = parse("<function=f><parameter=a>1</parameter><parameter=b>2", "qwen3_coder").tool_calls
    assert call.arguments == '{"a": "1"'


def test_white_space_around_calls_is_no_content_but_stays_in_an_answer_without_calls():
    text = '  Hi. \n<tool_call>{"name": "f"}</tool_call>\n\n<tool_call>{"name": "g"}</tool_call>\n'
    assert parse(text, "hermes").content == "  Hi."
    assert parse(text + "Bye", "hermes").content == "  Hi. \n\n\n\nBye"
    assert parse(text.strip(" Hi.\n"), "hermes").content is None
    assert parse(" \n Hi. \n", "hermes").content == " \n Hi. \n"


# ---- reasoning


def test_thinking_that_began_in_the_prompt_goes_on_in_the_answer():
    assert parse("so</think>yes", None, "qwen3", ending="<|assistant|><think>\n").reasoning == "so"
    assert parse("so", None, "qwen3", ending="<think>\n\n</think>\n\n") == ParsedMessage(content="so")
    assert parse("so", None, "qwen3") == ParsedMessage(content="so")
    assert parse("so", None, "deepseek_r1") == ParsedMessage(reasoning="so")
    assert parse("\n<think>so</think>yes", None, "deepseek_r1") == ParsedMessage("yes", "so")


def test_calls_inside_the_thinking_are_not_made():
    text = '<think>perhaps <tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}</tool_call>'
    message = parse(text, "hermes", "qwen3")
    assert calls_of(message) == [("g", "{}")]
    assert message.reasoning.startswith("perhaps <tool_call>")


def test_kimi_ends_its_thinking_by_calling():
    text = (
        "<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    message = parse(text, "kimi_k2", "kimi_k2")
    assert message.reasoning == "hm"
    assert [(call.id, call.name) for call in message.tool_calls] == [("functions.f:0", "f")]


def test_gpt_oss_says_in_channels_what_is_thought_answered_and_called():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    for names in (("openai", "openai_gptoss"), ("openai", None), (None, "openai_gptoss")):
        message = parse(text, *names)
        assert (message.content, message.reasoning) == ("I look.Done.", "hm")
        assert calls_of(message) == [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize("end", ["", "<", "<|cal", "<|call|>"])
def test_a_gpt_oss_call_that_is_cut_off_in_its_end_has_its_arguments_alone(end):
    message = parse('<|channel|>commentary to=functions.f<|message|>{"a": 1}' + end, "openai")
    assert calls_of(message) == [("f", '{"a": 1}')]
    assert message.content is None


# ---- forced calls, and names


def test_answers_that_a_grammar_forced_are_calls():
    text = ' [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert calls_of(parse(text, "hermes", forced="*")) == [("f", '{"a": 1}'), ("g", "{}")]
    assert calls_of(parse(' {"a": 1}', "hermes", forced="f")) == [("f", '{"a": 1}')]
    assert calls_of(parse('{"a": ', None, forced="f")) == [("f", '{"a": ')]


FORCED = '[{"name": "f", "parameters": {"a": 1}}, {"parameters": {"b": "}]"}, "name": "g"}]'


@pytest.mark.parametrize("length", range(len(FORCED) + 1))
def test_a_forced_list_that_is_cut_anywhere_leaves_no_text(length):
    message = parse(FORCED[:length], "hermes", forced="*")
    assert message.content is None and [call.name for call in message.tool_calls] in ([], ["f"], ["f", "g"])
    for call in message.tool_calls:
        assert ('{"a": 1}' if call.name == "f" else '{"b": "}]"}').startswith(call.arguments)
    assert len(message.tool_calls) >= (length > len('[{"name": "f", "parameters": {')) + (length == len(FORCED))


@pytest.mark.parametrize("forced", ["*", "f"])
def test_a_forced_answer_that_is_cut_in_its_thinking_has_no_call(forced):
    message = parse("<think>let me", "hermes", "qwen3", forced=forced)
    assert message == ParsedMessage(reasoning="let me")
    assert parse("", "hermes", forced=forced) == ParsedMessage()


def test_without_formats_everything_is_content():
    assert parse("<think>x</think><tool_call>{}") == ParsedMessage(content="<think>x</think><tool_call>{}")


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="unknown tool parser 'herms'. Did you mean 'hermes'. Known are deepseek"):
        make_parser("herms")
    with pytest.raises(ConfigError, match="unknown reasoning parser 'qwen'. .*Known are .*qwen3"):
        make_parser(None, "qwen")

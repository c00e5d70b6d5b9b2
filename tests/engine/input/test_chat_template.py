import json

import pytest

from jaxpaged.engine.input.chat_template import ChatTemplate, ChatTemplates, load_chat_templates, template_option
from jaxpaged.errors import CheckpointError, ConfigError, RequestError
from tests.engine.small_tokenizer import CHAT

HELLO = [{"role": "user", "content": "hello "}]
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"


def render(source, messages=HELLO, **options):
    options = {"add_generation_prompt": False, "bos_token": "<bos>", **options}
    return ChatTemplate(source).render(messages, **options)


def test_a_conversation_becomes_text():
    assert render(CHAT, add_generation_prompt=True) == "<bos><turn>user\nhello <end>\n<turn>assistant\n"


@pytest.mark.parametrize(
    "source",
    [
        CHAT,
        TRIMMING,
        "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  {{ m.content }}\n {%- endif %}\n{%- endfor %}\n",
        "{{ tools | tojson }} {{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "{% generation %}{% set x = 'ä' %}{{ x }}{% endgeneration %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_templates_render_as_with_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "user", "content": "<ü> & 'x'"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": " so\n"},
    ]
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {}}}]
    theirs, _ = render_jinja_template([messages], tools=tools, chat_template=source, bos_token="<bos>")
    assert render(source, messages, tools=tools) == theirs[0]


@pytest.mark.parametrize("source", [CHAT, TRIMMING])
@pytest.mark.parametrize("last", ["Once upon", "Once upon ", "a {{ b }}"])
def test_the_last_message_can_be_continued_as_with_transformers(source, last):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*HELLO, {"role": "assistant", "content": last}]
    theirs, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, bos_token="<bos>")
    text = render(source, messages, continue_final_message=True)
    assert text == theirs[0]
    assert text.endswith(last.rstrip() if source is TRIMMING else last)
    assert messages[-1]["content"] == last


def test_text_parts_are_joined_for_templates_that_know_only_text():
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert render(TRIMMING, parts) == "<user>one\ntwo</>"
    looping = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert render(looping, parts) == "[one][two]"


@pytest.mark.parametrize(
    ("source", "messages", "options", "said"),
    [
        ("{% if %}", HELLO, {}, "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", HELLO, {}, "roles must alternate"),
        ("{{ messages[7].content.x }}", HELLO, {}, "does not accept"),
        ("{{ messages.append(1) }}", HELLO, {}, "does not accept"),
        ("{{ ().__class__.__mro__[1].__subclasses__() }}", HELLO, {}, "does not accept"),
        (CHAT, [], {}, "at least one message"),
        (CHAT, "hello", {}, "at least one message"),
        (CHAT, [{"content": "x"}], {}, "message 0 .* 'role'"),
        (CHAT, HELLO, {"add_generation_prompt": True, "continue_final_message": True}, "both true"),
        (CHAT, [{"role": "assistant", "content": None}], {"continue_final_message": True}, "no text to continue"),
        ("nothing", HELLO, {"continue_final_message": True}, "leaves out the last message"),
        (TRIMMING, [{"role": "user", "content": [{"type": "image_url"}]}], {}, "'image_url'; only text"),
    ],
)
def test_what_cannot_be_rendered_is_one_request_error(source, messages, options, said):
    with pytest.raises(RequestError, match=said):
        render(source, messages, **options)


def test_arguments_of_tool_calls_are_values_in_the_template():
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(source, [message]) == "Rome"
    assert call["function"]["arguments"] == '{"city": "Rome"}'
    call["function"]["arguments"] = "{city"
    with pytest.raises(RequestError, match="'{city', which is not JSON"):
        render(source, [message])


def test_tools_prefer_the_template_made_for_them():
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"})
    assert templates.choose().source == "plain"
    assert templates.choose(with_tools=True).source == "tools"
    assert templates.choose("tool_use").source == "tools"
    assert templates.choose("{{ own }}").source == "{{ own }}"


def test_a_model_without_template_says_what_to_do():
    with pytest.raises(RequestError, match="no default chat template.*chat_template"):
        ChatTemplates({}).choose()


def test_templates_are_found_in_a_folder_in_order_of_precedence(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "1"}, {"name": "rag", "template": "r"}]}
    assert load_chat_templates(tmp_path, {}).sources == {}
    assert load_chat_templates(tmp_path, {"chat_template": "1"}).sources == {"default": "1"}
    assert load_chat_templates(tmp_path, config).sources == {"default": "1", "rag": "r"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "2"}))
    assert load_chat_templates(tmp_path, config).sources == {"default": "2", "rag": "r"}
    (tmp_path / "chat_template.jinja").write_text("3")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert load_chat_templates(tmp_path, config).sources == {"default": "3", "rag": "r", "tool_use": "t"}
    assert load_chat_templates(tmp_path, config, "{{ 4 }}").sources == {"default": "{{ 4 }}"}


def test_the_option_is_a_file_or_a_template(tmp_path):
    (tmp_path / "mine.jinja").write_text("hi")
    assert template_option(str(tmp_path / "mine.jinja")) == "hi"
    assert template_option("{{ bos_token }}") == "{{ bos_token }}"
    with pytest.raises(ConfigError, match=r"'nowhere\.jinja', which is neither a file nor"):
        template_option("nowhere.jinja")
    with pytest.raises(ConfigError, match="option chat_template does not fit.*not valid Jinja"):
        template_option("{% if %}")


def test_damaged_template_files_are_the_checkpoints_fault(tmp_path):
    with pytest.raises(CheckpointError, match="it is a int"):
        load_chat_templates(tmp_path, {"chat_template": 3})
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not valid JSON"):
        load_chat_templates(tmp_path, {})


def test_variables_may_be_called_like_arguments():
    assert ChatTemplate("{{ messages[0].content }}{{ cls }}").render(HELLO, **{"self": 1, "cls": 2}) == "hello 2"


# ---- what the template writes behind the last message

THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if '</think>' in (m.content or '') %}{% set words = m.content.split('</think>')[-1] | trim %}"
    "{% else %}{% set words = m.content %}{% endif %}"
    "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{% if words is string %}{{ words | trim | upper }}{% else %}"
    "{% for part in words or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson(ensure_ascii=True) }}{% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<model>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
CALL = {"function": {"name": "f", "arguments": '{"q": ["a <think>"], "<think>": 3}'}}


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "What is <think>? "},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "<think>"}]},
        {"role": "tool", "content": "</think> and so on"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "<think> Let me"},
        {"role": "assistant", "content": "ah", "reasoning": "hm <think>"},
    ],
)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}])
def test_the_ending_is_what_the_template_itself_writes(last, variables):
    messages = [{"role": "system", "content": "<think>"}, *HELLO, last]
    text = render(THINKS, messages, add_generation_prompt=True, **variables)
    ending = ChatTemplate(THINKS).ending(messages, add_generation_prompt=True, **variables)
    assert text.endswith(ending)
    assert ending.removeprefix('": 3}') == "</><model>" + ("<think>" if variables else "")


@pytest.mark.parametrize("content", ["<think> Let me", "I say"])
def test_an_answer_that_is_continued_belongs_to_the_ending(content):
    messages = [{"role": "user", "content": "</think>"}, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "bos_token": "<bos>"}
    assert ChatTemplate(CHAT).ending(messages, **options) == f"<end>\n<turn>assistant\n{content}"


def test_without_words_all_is_the_templates():
    assert ChatTemplate("a{% if messages %}b{% endif %}").ending(HELLO) == "ab"
    assert ChatTemplate(CHAT).ending([{"role": "user", "content": ""}], bos_token="<bos>").startswith("<bos><turn>user")

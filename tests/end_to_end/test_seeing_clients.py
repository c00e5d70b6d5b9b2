"""Pictures from OpenAI's and Anthropic's own clients, through a server on a socket, to an engine that sees."""

import asyncio
import base64
import contextlib
import io
import threading

import pytest

from jaxpaged import AsyncLLM
from jaxpaged.config import EngineConfig
from tests.end_to_end.test_seeing import OPTIONS
from tests.models.seeing_folder import NUM_EMBEDS, write_seeing_folder
from tests.multimodal.drawn import drawn

openai = pytest.importorskip("openai", reason="comes with the extra test")
anthropic = pytest.importorskip("anthropic", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")

TEXT = "what is it?"
KINDS = ("png", "jpeg", "webp", "gif")
IGNORE_END = {"ignore_eos": True}
LOOK = {"type": "object", "properties": {}}


def in_base64(kind="png", seed=0):
    """A file, as these APIs have it."""
    stream = io.BytesIO()
    drawn(60, 40, seed).save(stream, format=kind.upper())
    return base64.b64encode(stream.getvalue()).decode()


def data_url(kind="png", seed=0):
    return f"data:image/{kind};base64,{in_base64(kind, seed)}"


@contextlib.contextmanager
def served(engine):
    """The URL of a server over an engine, in a thread."""
    from jaxpaged.entrypoints.http.app import create_app
    from jaxpaged.entrypoints.http.transport.listener import Listener, bind, url_of
    from jaxpaged.serving.options import ServerOptions
    from jaxpaged.serving.service import Service, served_model

    bound = bind("127.0.0.1", 0)
    bound.listen()
    service = Service(engine, served_model(engine.config, ("seeing",)), ServerOptions.from_options({}))
    listener = Listener(create_app(service, ()), bound, max_header_bytes=service.options.max_header_bytes)
    thread = threading.Thread(target=lambda: asyncio.run(listener.run_until_stopped()))
    thread.start()
    try:
        yield url_of(bound)
    finally:
        listener.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = write_seeing_folder(tmp_path_factory.mktemp("seeing"))
    engine = AsyncLLM.from_config(EngineConfig.from_options(model=str(folder), **OPTIONS))
    try:
        with served(engine) as url:
            yield url
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def of_openai(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def of_anthropic(url):
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)


def question(url, text=TEXT):
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
        }
    ]


def chat(client, messages, **fields):
    wanted = {"max_tokens": 6, "temperature": 0, "logprobs": True, "extra_body": IGNORE_END, **fields}
    return client.chat.completions.create(model="seeing", messages=messages, **wanted)


def chances(answer):
    """How likely the tokens of a chat's answer were: another picture changes these at once."""
    return [each.logprob for each in answer.choices[0].logprobs.content]


def test_openais_client_sends_each_format_and_another_picture_changes_the_answer(of_openai):
    answers = [chat(of_openai, question(data_url(kind))) for kind in KINDS]
    for answer in answers:
        assert answer.usage.prompt_tokens_details.multimodal_tokens == {"image": NUM_EMBEDS}
        assert answer.usage.prompt_tokens > NUM_EMBEDS + len(TEXT) // 2 and answer.usage.completion_tokens == 6
    png = chances(answers[0])
    assert chances(chat(of_openai, question(data_url()))) == pytest.approx(png, abs=2e-4), "the same from the caches"
    assert chances(chat(of_openai, question(data_url(seed=1)))) != pytest.approx(png, abs=2e-4)


def test_openais_stream_tells_the_tokens_of_pictures_at_its_end(of_openai):
    whole = chat(of_openai, question(data_url()))
    chunks = list(chat(of_openai, question(data_url()), stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage


def test_a_conversation_with_two_pictures_goes_on(of_openai):
    first = question(data_url())
    answer = chat(of_openai, first)
    turns = [*first, {"role": "assistant", "content": "the cat"}, *question(data_url("jpeg", seed=1), "and now?")]
    second = chat(of_openai, turns)
    assert second.usage.prompt_tokens_details.multimodal_tokens == {"image": 2 * NUM_EMBEDS}
    assert second.usage.prompt_tokens > answer.usage.prompt_tokens + NUM_EMBEDS


def test_a_response_has_pictures_of_the_user_and_of_tools(of_openai):
    image = {"type": "input_image", "image_url": data_url("webp"), "detail": "auto"}
    asked = {"role": "user", "content": [image, {"type": "input_text", "text": TEXT}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [image]}
    create = of_openai.responses.create
    options = {"model": "seeing", "max_output_tokens": 4, "temperature": 0, "extra_body": IGNORE_END}
    blind, one, two = (
        create(input=items, **options) for items in ([{**asked, "content": TEXT}], [asked], [asked, call, result])
    )
    assert one.usage.input_tokens > blind.usage.input_tokens + NUM_EMBEDS
    assert two.usage.input_tokens > one.usage.input_tokens + NUM_EMBEDS
    assert [each.usage.output_tokens for each in (blind, one, two)] == [4, 4, 4]


def block(kind="png", seed=0):
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": f"image/{kind}", "data": in_base64(kind, seed)},
    }


def test_anthropics_client_sends_each_format_and_its_tokens_are_counted(of_anthropic, of_openai):
    for kind in KINDS:
        turns = [{"role": "user", "content": [block(kind), {"type": "text", "text": TEXT}]}]
        message = of_anthropic.messages.create(
            model="seeing", max_tokens=6, messages=turns, extra_body={"temperature": 0}
        )
        counted = of_anthropic.messages.count_tokens(model="seeing", messages=turns)
        assert message.usage.input_tokens == counted.input_tokens
        same = chat(of_openai, question(data_url(kind)), extra_body={})
        said = "".join(each.text for each in message.content)
        assert said == same.choices[0].message.content, "one prompt, by either API"
        assert message.usage.input_tokens == same.usage.prompt_tokens
        assert message.usage.output_tokens == same.usage.completion_tokens > 0


def test_a_tool_that_gave_a_picture_is_answered(of_anthropic):
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}

    def asked(*content):
        result = {"type": "tool_result", "tool_use_id": "t", "content": list(content)}
        turns = [{"role": "user", "content": TEXT}, use, {"role": "user", "content": [result]}]
        with of_anthropic.messages.stream(
            model="seeing",
            max_tokens=4,
            messages=turns,
            tools=[{"name": "look", "input_schema": LOOK}],
            tool_choice={"type": "none"},
        ) as stream:
            return stream.get_final_message().usage

    text = {"type": "text", "text": "a picture"}
    blind, seen = asked(text), asked(text, block("gif"))
    assert seen.input_tokens > blind.input_tokens + NUM_EMBEDS and seen.output_tokens > 0


def test_what_is_no_picture_is_the_clients_exception_with_its_field(of_openai, of_anthropic):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(of_openai, question("data:image/png;base64,AAAA"))
    assert refused.value.param == "messages[0].content[0].image_url.url"
    broken = {**block(), "source": {**block()["source"], "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.data"):
        of_anthropic.messages.create(model="seeing", max_tokens=1, messages=[{"role": "user", "content": [broken]}])

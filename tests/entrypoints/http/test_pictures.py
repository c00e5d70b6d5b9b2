"""Pictures over HTTP: how each API gives them, what the engine gets, what clients are told; remote and inspected ones.

The processes that decode are real; the engine behind has no model.
"""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged.config.multimodal import MultiModalConfig
from jaxpaged.engine.input.pictures import PictureIntake
from jaxpaged.multimodal.embeddings import form_of
from jaxpaged.multimodal.fetching import FetchLimits, MediaFetcher
from tests.models.seeing_folder import CHAT, NUM_EMBEDS, PROCESSOR, make_config, make_tokenizer
from tests.multimodal.drawn import drawn
from tests.multimodal.local_server import LocalServer, Network

FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP", "gif": "GIF"}
TEXT = {"type": "text", "text": "what is it?"}


def file_of(kind="png", width=60, height=40, seed=0):
    stream = io.BytesIO()
    drawn(width, height, seed).save(stream, format=FORMATS[kind])
    return stream.getvalue()


def in_base64(data):
    return base64.b64encode(data).decode()


def data_url(kind="png", **drawing):
    return f"data:image/{kind};base64,{in_base64(file_of(kind, **drawing))}"


FILE, URL = file_of(), data_url()


def make_intake(embeds=None, **options):
    config = MultiModalConfig(mm_bytes_in_flight_gb=1.0, num_media_processes=1, **options)
    return PictureIntake(make_tokenizer(), config, "model", make_config(), PROCESSOR, embeds=embeds)


@pytest.fixture(scope="module")
def intake():
    made = make_intake(limit_mm_per_prompt={"image": 3})
    yield made
    made.close()


@pytest.fixture
def sees(serving, intake):
    """`sees(path, body, ...)` asks a server that sees; with `also` all of several. Gives answers and engine."""

    def ask(*requests, options=None, pictures=None):
        async def scenario(server):
            answers = [await server.client.post(path, body) for path, body in requests]
            return SimpleNamespace(answers=answers, engine=server.engine, answer=answers[-1])

        settings = {"tokenizer": make_tokenizer(), "chat": CHAT, "max_model_len": 192, "pictures": pictures or intake}
        return serving(scenario, options=options, **settings)

    return ask


def chat(*parts, **fields):
    body = {"messages": [{"role": "user", "content": [*parts, TEXT]}], "max_tokens": 2, "temperature": 0}
    return "/v1/chat/completions", {**body, **fields}


def image_url(url=URL, **fields):
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}, **fields}


def features_of(found):
    return [prompt.get("mm_features", ()) for prompt, _, _ in found.engine.seen]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_of_each_format_in_a_chat(sees, kind):
    found = sees(chat(image_url(data_url(kind))))
    assert found.answer.status == 200, found.answer.body
    ((feature,),) = features_of(found)
    assert feature.num_embeds == NUM_EMBEDS and feature.pixels.shape[-1] == 3
    usage = found.answer.json["usage"]
    assert usage["prompt_tokens_details"] == {"multimodal_tokens": {"image": NUM_EMBEDS}}
    assert usage["prompt_tokens"] == len(found.engine.seen[0][0]["prompt_token_ids"]) > NUM_EMBEDS


def test_streams_count_image_tokens_and_texts_have_none(sees):
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    found = sees(chat(image_url(), **streamed), chat())
    assert found.answers[0].events[-2]["usage"]["prompt_tokens_details"] == {"multimodal_tokens": {"image": NUM_EMBEDS}}
    assert found.answer.json["usage"]["prompt_tokens_details"] is None
    assert "mm_features" not in found.engine.seen[1][0]


def image_embeds(values, **fields):
    return {"type": "image_embeds", "image_embeds": values, **fields}


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return in_base64(stream.getvalue())


def test_embeddings_in_a_chat_in_place_of_pictures(sees):
    values, taking = np.ones((NUM_EMBEDS, 8), np.float32), make_intake(form_of(8, "float32"))
    good = [image_embeds(npy(values)), image_embeds({"image_embeds": npy(values)}, uuid="a")]
    bad = [image_embeds(npy(values[1:])), image_embeds(in_base64(b"PK")), image_embeds([[1.0]]), image_embeds(None)]
    found = sees(*map(chat, [*good, image_embeds(None, uuid="a"), *bad]), chat(*good, image_url()), pictures=taking)
    assert [each.status for each in found.answers] == [200, 200, 200, 400, 400, 400, 400, 200]
    for answer in found.answers[3:7]:
        assert answer.json["error"]["param"] == "messages[0].content[0].image_embeds"
    assert [feature.is_embeds for feature in features_of(found)[-1]] == [True, True, False]
    assert len({feature.key for each in features_of(found) for feature in each}) == 2
    usage = found.answer.json["usage"]["prompt_tokens_details"]
    assert usage == {"multimodal_tokens": {"image": 3 * NUM_EMBEDS}}
    taking.close()
    refused = sees(chat(good[0])).answer
    assert refused.status == 400 and "without enable_mm_embeds" in refused.json["error"]["message"]


def test_a_video_is_refused_by_a_model_that_takes_pictures_only(sees):
    answer = sees(chat({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}})).answer
    assert answer.status == 400 and answer.json["error"]["param"] == "messages[0].content[0]"
    assert "Gemma3ForConditionalGeneration takes pictures only" in answer.json["error"]["message"]


def anthropic_image(data=FILE, kind="png"):
    return {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": in_base64(data)}}


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}


def messages(*turns, path="/v1/messages", **fields):
    return path, {"messages": list(turns), **({"max_tokens": 2} if path == "/v1/messages" else {}), **fields}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def test_one_picture_has_one_key_in_every_api_and_inspected(sees):
    result = user({"type": "tool_result", "tool_use_id": "t", "content": [anthropic_image(), TEXT]})
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    seen = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}
    found = sees(
        chat(image_url()),
        chat({"type": "image_url", "image_url": URL}),
        messages(user(anthropic_image(), TEXT)),
        messages(
            user(TEXT),
            USE,
            result,
            tools=[{"name": "look", "input_schema": {"type": "object"}}],
            tool_choice={"type": "none"},
        ),
        ("/v1/responses", {"input": [item], "max_output_tokens": 2}),
        ("/v1/responses", {"input": [{"role": "user", "content": "look"}, call, seen], "max_output_tokens": 2}),
        ("/v1/images/inspect", {"images": [URL, data_url(width=33)]}),
    )
    assert [answer.status for answer in found.answers] == [200] * 7, [answer.body for answer in found.answers]
    first, second = found.answer.json["data"]
    assert [len(each) for each in features_of(found)] == [1] * 6
    assert {feature.key.hex() for (feature,) in features_of(found)} == {first["key"]} != {second["key"]}
    assert (first["width"], first["height"], first["num_tokens"], first["grid"]) == (60, 40, NUM_EMBEDS, [1, 4, 4])


def test_tokens_of_pictures_are_counted(sees):
    found = sees(
        messages(user(anthropic_image(), TEXT), path="/v1/messages/count_tokens"),
        messages(user(TEXT), path="/v1/messages/count_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": [image_url(), TEXT]}]}),
        chat(image_url()),
    )
    counted, blind, tokenized, answered = (answer.json for answer in found.answers)
    assert counted["input_tokens"] == tokenized["count"] == answered["usage"]["prompt_tokens"]
    assert counted["input_tokens"] > blind["input_tokens"] + NUM_EMBEDS


def test_a_uuid_stands_for_a_picture_that_was_sent_before_and_for_no_other(sees):
    found = sees(
        chat(image_url(uuid="mine")),
        chat({"type": "image_url", "image_url": None, "uuid": "mine"}),
        chat({"type": "image_url", "image_url": None, "uuid": "unknown"}),
        chat(image_url(data_url(seed=3), uuid="mine")),
        chat({"type": "image_url", "image_url": None, "uuid": "mine"}, cache_salt="another"),
    )
    assert [answer.status for answer in found.answers] == [200, 200, 400, 400, 400]
    (one,), (same,) = features_of(found)
    assert one.key == same.key
    assert found.answers[2].error["param"] == "messages[0].content[0].image_url"
    assert "uuid" in found.answers[3].error["message"]


BAD = {
    "wrong base64": (chat(image_url("data:image/png;base64,???")), "messages[0].content[0].image_url.url"),
    "media type": (chat(image_url(URL.replace("png", "tiff", 1))), "messages[0].content[0].image_url.url"),
    "truncated": (chat(TEXT, image_url(URL[:200])), "messages[0].content[1].image_url.url"),
    "no url": (chat(image_url("cat.png")), "messages[0].content[0].image_url.url"),
    "not allowed": (chat(image_url("https://example.com/a.png")), "messages[0].content[0].image_url.url"),
    "local": (chat(image_url("file:///etc/passwd")), "messages[0].content[0].image_url.url"),
    "nothing": (chat({"type": "image_url", "image_url": None}), "messages[0].content[0].image_url"),
    "type that is a list": (chat({"type": ["image_url"], "image_url": {"url": URL}}), "messages[0].content[0].type"),
    "type that is a list, in responses": (
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": ["input_image"]}]}]}),
        "input[0].content[0].type",
    ),
    "sound": (chat({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].type"),
    "too many": (chat(*[image_url()] * 4), "messages[0].content[3].image_url.url"),
    "untrusted": (chat(image_url(), mm_processor_kwargs={"do_pan_and_scan": True}), "mm_processor_kwargs"),
    "responses": (
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL[:200]}]}]}),
        "input[0].content[0].image_url",
    ),
    "batch": (
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": [image_url(URL[:200])]}]]}),
        "messages[0][0].content[0].image_url.url",
    ),
    "inspect": (("/v1/images/inspect", {"images": [URL, "data:image/png;base64,AAAA"]}), "images[1]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_error_with_its_field_and_the_conversation_goes_on(sees, name):
    request, field = BAD[name]
    found = sees(request, chat(image_url()))
    refused, answer = found.answers
    assert (refused.status, refused.error["param"]) == (400, field), refused.body
    assert not any(word in refused.error["message"] for word in ("PIL", "0x", "Traceback", "OSError"))
    assert answer.status == 200


def test_blocks_of_messages_that_cannot_be_are_refused_by_their_place(sees):
    upload = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    found = sees(
        messages(user(anthropic_image(FILE[:100]))),
        messages(user(upload)),
        messages(user({"type": "document", "source": {}})),
        messages(user({"type": "image"})),
    )
    fields = ("source.data", "source.type", "content[0]", "source")
    for answer, field in zip(found.answers, fields, strict=True):
        assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
        assert f"messages[0].content[0].{field}".replace("content[0].content", "content") in answer.error["message"]


def test_options_of_requests_that_are_trusted_change_the_key_in_requests_and_inspected(sees):
    kwargs = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    found = sees(
        chat(image_url(), mm_processor_kwargs=kwargs),
        chat(image_url()),
        ("/v1/images/inspect", {"images": [URL], "mm_processor_kwargs": kwargs}),
        options={"trust_request_mm_kwargs": True},
    )
    (cut,), (whole,) = features_of(found)
    [inspected] = found.answer.json["data"]
    assert cut.grid == (3, 4, 4) != whole.grid and cut.key != whole.key
    assert (inspected["key"], inspected["num_tokens"]) == (cut.key.hex(), cut.num_embeds)


def test_a_model_of_text_only_refuses_pictures_and_has_none_to_inspect(ask):
    refused = ask("/v1/images/inspect", {"images": [URL]})
    assert (refused.status, refused.error["param"]) == (400, "images")


# ---- pictures of other servers


def said(body, status="200 OK", length=None):
    head = (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\nConnection: close\r\n\r\n"
    )
    return lambda connection, _: connection.sendall(head.encode() + body)


def redirected(connection, _):
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:22/\r\nContent-Length: 0\r\n\r\n")


def slow(connection, _):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    connection.recv(1)  # until the client leaves


def remote(sees, script, *answers, seconds=5.0, num=1):
    server = LocalServer(script)
    network = Network(server, *answers)
    made = make_intake(allowed_media_domains=("pictures.test",))
    made._fetcher = MediaFetcher(
        ["pictures.test"], None, FetchLimits(1 << 20, seconds), resolve=network.resolve, connect=network.connect
    )
    try:
        return sees(*[chat(image_url("http://pictures.test/a.png"))] * num, chat(), pictures=made), network
    finally:
        made.close()
        server.close()


def test_a_picture_is_fetched_from_a_host_that_is_allowed(sees):
    found, network = remote(sees, said(FILE))
    assert [answer.status for answer in found.answers] == [200, 200]
    assert len(features_of(found)[0]) == 1 and network.resolved == [("pictures.test", 80)]


@pytest.mark.parametrize(
    ("script", "answers", "status"),
    [
        (redirected, (), 400),
        (said(b"no", "404 Not Found"), (), 422),
        (said(FILE[:50], length=len(FILE)), (), 422),
        (slow, (), 422),
        (said(b"", length=1 << 30), (), 422),
        (said(FILE), (["127.0.0.1"],), 422),
    ],
    ids=["redirect to loopback", "missing", "lying length", "slow", "too long", "private"],
)
def test_what_cannot_be_fetched_is_told_with_its_field_and_without_addresses(sees, script, answers, status):
    found, _ = remote(sees, script, *answers, seconds=0.4)
    refused, text = found.answers
    assert refused.status in (status, 422), refused.body
    assert refused.error["param"] == "messages[0].content[0].image_url.url"
    assert "127.0.0.1" not in refused.error["message"] and text.status == 200


def test_a_name_that_is_looked_up_once_cannot_lead_elsewhere_afterwards(sees):
    found, network = remote(sees, said(FILE), ["93.184.215.14"], ["127.0.0.1"], num=2)
    assert [answer.status for answer in found.answers] == [200, 422, 200]
    assert network.connected == [("93.184.215.14", 80)]

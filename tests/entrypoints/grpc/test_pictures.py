"""Pictures over gRPC: bytes and URLs in prompts and chats, from the client to the engine, and what is refused."""

import asyncio
import base64

import numpy as np
import pytest

from jaxpaged.client import Client, ClientError
from jaxpaged.multimodal.embeddings import form_of
from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.entrypoints.http.test_pictures import FILE, TEXT, URL, make_intake, npy
from tests.models.seeing_folder import CHAT, NUM_EMBEDS, make_tokenizer

GREEDY = {"max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def intake():
    made = make_intake()
    yield made
    made.close()


@pytest.fixture
def used(serving, intake):
    """`used(use)`: what `use(client)` gives with a server that sees, and its engine."""

    def run(use, **settings):
        async def scenario(server):
            def work():
                with Client(f"127.0.0.1:{server.listener.ports[0]}") as client:
                    return use(client)

            return await asyncio.to_thread(work), server.engine

        settings = {"tokenizer": make_tokenizer(), "chat": CHAT, "max_model_len": 192, "pictures": intake, **settings}
        return serving(scenario, **settings)

    return run


def chat(image, **fields):
    return [{"role": "user", "content": [{"type": "image", "image": image, **fields}, TEXT]}]


def test_pictures_of_texts_ids_and_chats_reach_the_engine(used, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(FILE)
    openai = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, TEXT]}]

    def use(client):
        assert client.model_info().takes_images
        texts = [client.answer("a<start_of_image>b", images=[each], **GREEDY) for each in (FILE, path, URL)]
        chats = [client.answer(messages, **GREEDY) for messages in (chat(FILE, uuid="u"), openai, chat(None, uuid="u"))]
        return [*texts, *chats], client.tokenize(chat(FILE))

    (answers, tokens), engine = used(use)
    assert [answer.usage.image_tokens for answer in answers] == [NUM_EMBEDS] * 6
    features = [prompt["mm_features"] for prompt, _, _ in engine.seen]
    assert len({feature.key for (feature,) in features}) == 1
    assert len(tokens.token_ids) == answers[3].usage.prompt_tokens


def test_embeddings_in_place_of_pictures_of_texts_and_chats(used):
    values, taking = np.ones((NUM_EMBEDS, 8), np.float32), make_intake(form_of(8, "float32"))
    file = base64.b64decode(npy(values))

    def part(file, **fields):
        return [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": file, **fields}, TEXT]}]

    def use(client):
        client.answer("a<start_of_image>b", images=[pb.Image(embeds=file)], **GREEDY)
        for messages in (part(file, uuid="u"), part(None, uuid="u")):
            assert client.answer(messages, **GREEDY).usage.image_tokens == NUM_EMBEDS
        with pytest.raises(ClientError, match="is a pickle") as caught:
            client.answer(part(b"PK"), **GREEDY)
        assert caught.value.field == "chat.messages[0].parts[0].image.embeds"

    _, engine = used(use, pictures=taking)
    features = [prompt["mm_features"][0] for prompt, _, _ in engine.seen]
    assert len({feature.key for feature in features}) == 1 and len(features) == 3
    assert all(feature.is_embeds for feature in features)
    taking.close()


@pytest.mark.parametrize(
    ("prompt", "values", "field"),
    [
        (chat(FILE[:60]), {}, "chat.messages[0].parts[0].image.data"),
        (chat("https://example.com/a.png"), {}, "chat.messages[0].parts[0].image.url"),
        (chat(None, uuid="unknown"), {}, "chat.messages[0].parts[0].image.uuid"),
        ("<start_of_image>", {"images": [b"no picture"]}, "images[0]"),
        (chat(FILE), {"images": [FILE]}, "images"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(used, prompt, values, field):
    def use(client):
        with pytest.raises(ClientError) as caught:
            client.answer(prompt, **values)
        return caught.value

    error, _ = used(use)
    assert error.field == field, error


def test_a_model_of_text_only_refuses_them(used):
    def use(client):
        assert not client.model_info().takes_images
        for prompt, values in (("a", {"images": [FILE]}), (chat(FILE), {})):
            with pytest.raises(ClientError, match="text only"):
                client.answer(prompt, **values)

    used(use, pictures=None)

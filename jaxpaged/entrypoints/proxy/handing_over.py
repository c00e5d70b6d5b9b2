"""What the proxy asks of a prefill engine, and what it passes on to a decode engine, as vLLM's proxies do.

    client -> prefill: the same request, one token, kv_transfer_params {do_remote_decode: true, ...}
    prefill -> decode: the request as it came, with the kv_transfer_params of the response, whatever is in them

Beyond what those do, the first may be a stream, of which one event has the kv_transfer_params before the prompt is
computed.

This module knows requests, and no engines.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from jaxpaged.kv_store.transfer_params import PARAMS
from jaxpaged.serving.errors import ServingError

PROMPTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""Where a request has its prompt that a prefill engine may compute."""
WHOLE = {
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/chat/completions/batch": "messages",
    "/invocations": "messages",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
    "/v1/embeddings": "input",
    "/pooling": "input",
    "/classify": "input",
    "/score": "text_1",
    "/v1/score": "text_1",
    "/rerank": "query",
    "/v1/rerank": "query",
    "/v2/rerank": "query",
}
"""The same of those that a decode engine answers alone."""
ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ONLY_DECODE = (
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "stream_interval",
    "echo",
    "return_token_ids",
    "return_prompt_text",
)
"""Fields that say nothing of how a prompt is computed."""
BYTES_PER_TOKEN = 4
MOST_BEGINNING = 1 << 16
"""Bytes of a prompt that say which engine knows it."""
DATA, EVENT_END = b"data: ", b"\n\n"
NOTHING = (b"null", b"false", b"0", b"{}", b"[]", b'""')
Body = dict[str, msgspec.Raw]
"""A request's fields as they came: no objects are made of what they hold, so that a long prompt holds nobody up."""
DECODER = msgspec.json.Decoder(Body)


class PrefillResponse(msgspec.Struct):
    """What is read of a prefill engine's response."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class Asked(msgspec.Struct, frozen=True):
    """A request: where to, what, and its prompt's beginning as bytes that begin alike where prompts do."""

    path: str
    body: Body
    beginning: bytes
    num_tokens: int  # about
    may_be_split: bool

    @property
    def is_stream(self) -> bool:
        return field(self.body, "stream") == b"true"

    @property
    def goes_on(self) -> bool:
        """Whether it is about a response that one of the engines keeps."""
        return field(self.body, "previous_response_id") not in NOTHING


def field(body: Body, name: str) -> memoryview:
    """A field's JSON; null where there is none."""
    return memoryview(body.get(name, b"null"))


def read(path: str, content: bytes) -> Asked:
    """Raises ServingError for what is no request at all; whatever else is wrong with it an engine says."""
    try:
        body = DECODER.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServingError(f"The body is no JSON object: {error}.") from None
    if field(body, PARAMS) not in NOTHING:
        raise ServingError(f"{PARAMS} is given, but the proxy makes them. Leave it out.", PARAMS)
    prompt = field(body, (PROMPTS | WHOLE)[path])
    is_ids = prompt[:1] == b"[" and bytes(prompt[1:64]).lstrip()[:1].isdigit()
    is_one = path in PROMPTS and (path != "/v1/completions" or prompt[:1] == b'"' or is_ids)
    before = [field(body, name) for name in ("model", "tools")]
    beginning = b"".join(bytes(each[:MOST_BEGINNING]) + b"," for each in (*before, prompt))[:MOST_BEGINNING]
    num_bytes = sum(map(len, before)) + len(prompt)
    num_tokens = bytes(prompt).count(b",") + 1 if is_ids else num_bytes // BYTES_PER_TOKEN
    is_given = lambda name: field(body, name) not in NOTHING
    reads_cache = field(body, "prompt_logprobs") == b"null"
    reads_cache = reads_cache and not (is_given("echo") and field(body, "logprobs") != b"null")
    return Asked(path, body, beginning, num_tokens, is_one and reads_cache and not is_given("use_beam_search"))


def for_prefill(asked: Asked, *, is_stream: bool) -> bytes:
    """The same prompt, of which one token is to be generated."""
    body: dict[str, Any] = {name: value for name, value in asked.body.items() if name not in ONLY_DECODE}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return msgspec.json.encode({**body, "stream": is_stream, "max_tokens": 1, PARAMS: ASK_PREFILL})


def for_decode(asked: Asked, params: msgspec.Raw | None) -> bytes:
    """The request as it came, and where its prompt's keys and values are, if anywhere."""
    return msgspec.json.encode({**asked.body, PARAMS: params} if params is not None else asked.body)


def params_in(response: bytes) -> msgspec.Raw | None:
    """What a prefill engine says of where they are, as it says it; None: nowhere."""
    try:
        params = msgspec.json.decode(response, type=PrefillResponse).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        return None
    return params.copy() if memoryview(params)[:1] == b"{" else None


async def first_params(pieces: AsyncIterator[bytes], most: int) -> msgspec.Raw | None:
    """The same of a stream, once an event of it says so; None where it ends without. Raises OSError, also for one of
    more than `most` bytes."""
    rest, size = b"", 0
    async for piece in pieces:
        rest, size = rest + piece, size + len(piece)
        if size > most:
            raise OSError(f"it says more than {most} bytes of one token")
        *events, rest = rest.split(EVENT_END)
        for event in events:
            if event.startswith(DATA) and (params := params_in(event[len(DATA) :])) is not None:
                return params
    return None

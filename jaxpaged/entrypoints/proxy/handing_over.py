"""What the proxy asks of a prefill engine, and what it passes on to a decode engine, as vLLM's proxies do.

    client -> prefill: the same request, one token, kv_transfer_params {do_remote_decode: true, ...}
    prefill -> decode: the request as it came, with the kv_transfer_params of the answer, whatever is in them

This module knows requests, and no engines.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.kv_store.handover import PARAMS

PROMPTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""Where a request has its prompt."""
ASK_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
ONLY_DECODE = (
    "stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs",
    "stream_interval", "echo", "return_token_ids", "return_prompt_text",
)  # fmt: skip
"""Fields that say nothing of how a prompt is computed."""
BYTES_PER_TOKEN = 4


class Asked(msgspec.Struct, frozen=True):
    """A request: where to, what, and its prompt as bytes that begin alike where prompts do."""

    path: str
    body: dict[str, Any]
    prompt: bytes
    num_tokens: int  # about
    may_be_split: bool

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True


def read(path: str, content: bytes) -> Asked:
    """Raises HttpError 400 for what is no request at all; whatever else is wrong with it an engine says."""
    try:
        body = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"The body is no JSON object: {error}.") from None
    if body.get(PARAMS):
        raise HttpError(400, f"{PARAMS} is given, but the proxy makes them. Leave it out.", PARAMS)
    prompt = body.get(PROMPTS[path])
    is_ids = isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int
    is_one = path != "/v1/completions" or isinstance(prompt, str) or is_ids
    text = msgspec.json.encode([body.get("model"), body.get("tools"), prompt])
    num_tokens = len(prompt) if is_ids else len(text) // BYTES_PER_TOKEN
    reads_cache = body.get("prompt_logprobs") is None and not (body.get("echo") and body.get("logprobs") is not None)
    return Asked(path, body, text, num_tokens, is_one and reads_cache and not body.get("use_beam_search"))


def for_prefill(asked: Asked) -> bytes:
    """The same prompt, of which one token is to be generated."""
    body = {name: value for name, value in asked.body.items() if name not in ONLY_DECODE}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return msgspec.json.encode({**body, "stream": False, "max_tokens": 1, PARAMS: ASK_PREFILL})


def for_decode(asked: Asked, params: Mapping[str, Any] | None) -> bytes:
    """The request as it came, and where its prompt's keys and values are, if anywhere."""
    return msgspec.json.encode({**asked.body, PARAMS: params} if params else asked.body)


def params_in(answer: bytes) -> dict[str, Any] | None:
    """What a prefill engine says of where they are; None: nowhere."""
    try:
        params = msgspec.json.decode(answer, type=dict[str, Any]).get(PARAMS)
    except msgspec.DecodeError:
        return None
    return params if isinstance(params, dict) else None

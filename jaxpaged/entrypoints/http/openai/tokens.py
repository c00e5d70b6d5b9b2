"""`POST /tokenize` and `POST /detokenize`."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.long_text import Truncation
from jaxpaged.entrypoints.http.body import json_response, read_struct
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.openai.chat_protocol import Tool
from jaxpaged.entrypoints.http.openai.conversation import template_arguments, template_messages
from jaxpaged.entrypoints.http.prompts import TokenPrompt, in_thread_if_long
from jaxpaged.entrypoints.http.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text or a conversation. `add_special_tokens` is true for a text and false for a conversation by default."""

    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class TokenizeResponse(msgspec.Struct):
    """The ids. `token_strs` are the tokens as the vocabulary has them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids of the model's vocabulary."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text of the ids."""

    prompt: str


class Tokens:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        service = self._service
        wanted = await read_struct(request, TokenizeRequest, service.options.max_body_bytes)
        service.check_model(wanted.model)
        prompt = await self.prompt(wanted)
        backend = service.engine.input_processor.tokenizer.backend
        names = [backend.id_to_token(i) or "" for i in prompt.token_ids] if wanted.return_token_strs else None
        return json_response(
            TokenizeResponse(len(prompt.token_ids), service.model.max_model_len, prompt.token_ids, names)
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        service = self._service
        wanted = await read_struct(request, DetokenizeRequest, service.options.max_body_bytes)
        service.check_model(wanted.model)
        return json_response(DetokenizeResponse(await self.text(wanted.tokens)))

    async def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises HttpError 400 for one that the vocabulary does not have."""
        processor = self._service.engine.input_processor
        for place, token_id in enumerate(tokens):
            if not 0 <= token_id < processor.vocab_size:
                raise HttpError(
                    400, f"tokens[{place}] is {token_id}; ids are from 0 to {processor.vocab_size - 1}.", "tokens"
                )
        return await in_thread_if_long(len(tokens), processor.tokenizer.decode, tokens, False)

    async def prompt(self, wanted: TokenizeRequest) -> TokenPrompt:
        """The text or the conversation in tokens. Raises HttpError and RequestError 400."""
        service = self._service
        if (wanted.prompt is None) == (wanted.messages is None):
            raise HttpError(400, "Give either prompt or messages, and not both.", "prompt")
        if wanted.prompt is not None:
            special = wanted.add_special_tokens is not False
            given = [wanted.prompt]
            return (await service.prompts.read(given, Truncation(), special, None, most=service.most_counted))[0]
        template = template_arguments(wanted, service.options.trust_request_chat_template)
        messages = template_messages(wanted.messages)
        return await service.prompts.read_chat(
            messages, Truncation(), bool(wanted.add_special_tokens), None, most=service.most_counted, **template
        )

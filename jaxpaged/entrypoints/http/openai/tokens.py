"""`POST /tokenize` and `POST /detokenize`."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.input.long_text import Truncation
from jaxpaged.entrypoints.http.big_answer import ITEMS_AT_ONCE, BigAnswer, encoded
from jaxpaged.entrypoints.http.body import json_response, off_loop, read_struct
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.openai.chat_protocol import Tool
from jaxpaged.entrypoints.http.openai.conversation import template_arguments, template_messages
from jaxpaged.entrypoints.http.prompts import TokenPrompt
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
        return await off_loop(self._tokens, wanted)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        service = self._service
        wanted = await read_struct(request, DetokenizeRequest, service.options.max_body_bytes)
        service.check_model(wanted.model)
        return json_response(DetokenizeResponse(await self.text(wanted.tokens)))

    async def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises HttpError 400 for one that the vocabulary does not have."""
        return await off_loop(self._text, tokens)

    def _text(self, token_ids: Sequence[int]) -> str:
        processor = self._service.engine.input_processor
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < processor.vocab_size:
                raise HttpError(
                    400, f"tokens[{place}] is {token_id}; ids are from 0 to {processor.vocab_size - 1}.", "tokens"
                )
        return processor.tokenizer.decode(token_ids, False)

    def _tokens(self, wanted: TokenizeRequest) -> Response:
        prompt = self._prompt(wanted)
        backend = self._service.engine.input_processor.tokenizer.backend
        names = [backend.id_to_token(i) or "" for i in prompt.token_ids] if wanted.return_token_strs else None
        room = self._service.model.max_model_len
        answer = TokenizeResponse(len(prompt.token_ids), room, prompt.token_ids, names)
        return json_response(answer) if len(prompt.token_ids) <= ITEMS_AT_ONCE else BigAnswer(encoded(answer))

    async def prompt(self, wanted: TokenizeRequest) -> TokenPrompt:
        """The text or the conversation in tokens. Raises HttpError and RequestError 400."""
        return await off_loop(self._prompt, wanted)

    def _prompt(self, wanted: TokenizeRequest) -> TokenPrompt:
        service = self._service
        if (wanted.prompt is None) == (wanted.messages is None):
            raise HttpError(400, "Give either prompt or messages, and not both.", "prompt")
        if wanted.prompt is not None:
            special = wanted.add_special_tokens is not False
            given = [wanted.prompt]
            return service.prompts.read(given, Truncation(), special, None, most=service.most_counted)[0]
        template = template_arguments(wanted, service.options.trust_request_chat_template)
        messages = template_messages(wanted.messages)
        return service.prompts.read_chat(
            messages, Truncation(), bool(wanted.add_special_tokens), None, most=service.most_counted, **template
        )

"""`POST /tokenize` and `POST /detokenize`."""

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.entrypoints.http.body import json_response, num_bytes_of, read_struct
from jaxpaged.entrypoints.http.openai.chat import template_arguments
from jaxpaged.entrypoints.http.openai.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxpaged.entrypoints.http.transport.sending import ITEMS_AT_ONCE, BigResponse, encoded
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.prompts import TokenPrompt, has_pictures, template_messages, text_of_tokens, token_strs
from jaxpaged.serving.requests import off_loop
from jaxpaged.serving.service import Service


class Tokens:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        service = self._service
        body = await read_struct(request, TokenizeRequest, service.max_body_bytes)
        await service.asked_model(body.model)
        threads = service.picture_threads if service.takes_pictures and has_pictures(body.messages or ()) else None
        return await off_loop(num_bytes_of(request), tokenized, service, body, threads=threads)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        service = self._service
        body = await read_struct(request, DetokenizeRequest, service.max_body_bytes)
        await service.asked_model(body.model)
        return json_response(
            DetokenizeResponse(
                await off_loop(num_bytes_of(request), text_of_tokens, service.engine.input_processor, body.tokens)
            )
        )


def tokenized(service: Service, body: TokenizeRequest) -> Response:
    """The response. Takes long for long texts, as the other functions do."""
    token_ids = prompt_of(service, body).token_ids
    names = token_strs(service.engine.input_processor, token_ids) if body.return_token_strs else None
    answer = TokenizeResponse(len(token_ids), service.model.max_model_len, token_ids, names)
    return json_response(answer) if len(token_ids) <= ITEMS_AT_ONCE else BigResponse(encoded(answer))


def prompt_of(service: Service, body: TokenizeRequest) -> TokenPrompt:
    """The text or the conversation in tokens. Raises ServingError and RequestError."""
    if (body.prompt is None) == (body.messages is None):
        raise ServingError("Give either prompt or messages, and not both.", "prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return service.prompts.read([body.prompt], Truncation(), special, None, most=service.most_counted)[0]
    template = template_arguments(service, body)
    messages = template_messages(body.messages, service.takes_pictures)
    return service.prompts.read_chat(
        messages, Truncation(), bool(body.add_special_tokens), None, most=service.most_counted, **template
    )

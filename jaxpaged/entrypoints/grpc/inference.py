"""The service `jaxpaged.v1.Inference`: what clients may ask."""

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from jaxpaged import __version__
from jaxpaged.entrypoints.grpc import requests
from jaxpaged.entrypoints.grpc.answers import Responses, usage_message, vectors
from jaxpaged.entrypoints.grpc.multiplexer import Multiplexer
from jaxpaged.entrypoints.http.openai.routes import CHATS, COMPLETIONS
from jaxpaged.entrypoints.http.openai.tokens import prompt_of, text_of, token_strs
from jaxpaged.entrypoints.http.pooling.routes import EMBEDDINGS, SCORES
from jaxpaged.entrypoints.http.pooling.write import scores_of, usage_of
from jaxpaged.entrypoints.http.respond import Parsed, Stages, parse
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import client_names
from jaxpaged.serving.generate import (
    GenerationRequest,
    Numbered,
    NumberedTaker,
    Output,
    collect,
    stream,
)
from jaxpaged.serving.requests import RequestContext, off_loop, own_or_new
from jaxpaged.serving.service import Service

JSON_SIZE = 3
"""A request is so many times as long in JSON, about: token ids take two bytes here. By that it is known for long."""
PREFIX = "grpc"
"""Of ids inside the server, so that they are told from those of HTTP."""


class Inference:
    """The methods: each gets a request, and who calls. They raise ServingError, RequestError and EngineError."""

    def __init__(self, service: Service):
        self._service = service

    # ---- generating

    async def Generate(self, request: pb.GenerateRequest, context: RequestContext) -> AsyncGenerator[bytes]:
        generation, responses = await self.prepared(request, context)
        async with aclosing(self.results(generation)) as results:
            async for _, output in results:
                if response := responses.of(output):
                    yield response

    async def GenerateStream(
        self, given: AsyncIterator[pb.GenerateStreamRequest], context: RequestContext
    ) -> AsyncGenerator[bytes]:
        async with aclosing(Multiplexer(self, context).responses(given)) as messages:
            async for message in messages:
                yield message

    async def prepared(
        self, request: pb.GenerateRequest, context: RequestContext
    ) -> tuple[GenerationRequest, Responses]:
        """What the engine is asked for, and what makes messages of its results. What another engine lends for it is
        given back where it is refused."""
        try:
            return await self._prepared(request, context)
        except BaseException:
            await self.let_go(request)
            raise

    async def let_go(self, request: pb.GenerateRequest) -> None:
        """A request will not be computed."""
        if request.HasField("kv_transfer_params"):
            await self._service.let_go(requests.plain(request.kv_transfer_params))

    async def _prepared(
        self, request: pb.GenerateRequest, context: RequestContext
    ) -> tuple[GenerationRequest, Responses]:
        kind = request.WhichOneof("prompt")
        names = {"prompt": "token_ids"} if kind == "token_ids" else {}
        with client_names(names):
            wanted = requests.generation_request(request)
            parsed = await self._parsed(CHATS if kind == "chat" else COMPLETIONS, wanted, sized(context, request))
        generation = dataclasses.replace(parsed.generation, names={**parsed.generation.names, **names})
        return generation, Responses(
            own_id(generation.request_id),
            None if parsed.reading.is_plain else parsed.new_reader,
            self._service.engine.input_processor.tokenizer,
            with_prompt=request.return_prompt_token_ids,
            with_cached_tokens=self._service.options.enable_prompt_tokens_details,
        )

    async def _parsed(self, stages: Stages, wanted: Any, context: RequestContext) -> Parsed:
        """The stage `parse` of a request in the form of an HTTP API."""
        await self._service.pace.turn()
        model = self._service.check_model(wanted.model)
        request_id = f"{PREFIX}-{own_or_new(wanted.request_id)}"
        return await parse(self._service, stages, wanted, request_id, model, context)

    def results(self, generation: GenerationRequest, take: NumberedTaker | None = None) -> AsyncGenerator[Numbered]:
        """Results as they come, but those that `take` takes. Closing the generator ends the request."""
        return stream(self._service.engine, self._service.traffic, generation, take)

    async def abort(self, generation: GenerationRequest) -> None:
        """End a request; what reads its results gets the last one."""
        await self._service.engine.abort(generation.load(self._service.model.max_model_len).engine_ids)

    async def Abort(self, request: pb.AbortRequest, context: RequestContext) -> pb.AbortResponse:
        ids = self._service.traffic.engine_ids([f"{PREFIX}-{each}" for each in request.request_ids])
        await self._service.engine.abort(ids)
        return pb.AbortResponse(num_aborted=len(ids))

    # ---- pooling

    async def Embed(self, request: pb.EmbedRequest, context: RequestContext) -> pb.EmbedResponse:
        parsed, outputs = await self._pooled(EMBEDDINGS, requests.embedding_request(request), sized(context, request))
        numbers, usage = vectors(output.outputs.data for output in outputs), usage_of(self._service, outputs)
        request_id = own_id(parsed.generation.request_id)
        return pb.EmbedResponse(request_id=request_id, vectors=numbers, usage=usage_message(usage))

    async def Score(self, request: pb.ScoreRequest, context: RequestContext) -> pb.ScoreResponse:
        parsed, outputs = await self._pooled(SCORES, requests.score_request(request), sized(context, request))
        scores, usage = scores_of(parsed, outputs), usage_of(self._service, outputs)
        request_id = own_id(parsed.generation.request_id)
        return pb.ScoreResponse(request_id=request_id, scores=scores, usage=usage_message(usage))

    async def _pooled(self, stages: Stages, wanted: Any, context: RequestContext) -> tuple[Parsed, list[Output]]:
        service = self._service
        parsed = await self._parsed(stages, wanted, context)
        return parsed, await collect(service.engine, service.traffic, parsed.generation)

    # ---- tokens

    async def Tokenize(self, request: pb.TokenizeRequest, context: RequestContext) -> pb.TokenizeResponse:
        service = self._service
        wanted = requests.tokenize_request(request)
        service.check_model(wanted.model)
        ids = (await off_loop(size_of(request), prompt_of, service, wanted)).token_ids
        names = token_strs(service, ids) if wanted.return_token_strs else []
        return pb.TokenizeResponse(token_ids=ids, token_strs=names, max_model_len=service.model.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: RequestContext) -> pb.DetokenizeResponse:
        self._service.check_model(request.model)
        with client_names({"tokens": "token_ids"}):
            return pb.DetokenizeResponse(
                text=await off_loop(size_of(request), text_of, self._service, list(request.token_ids))
            )

    # ---- the model and the server

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: RequestContext) -> pb.GetModelInfoResponse:
        model, processor = self._service.model, self._service.engine.input_processor
        return pb.GetModelInfoResponse(
            names=model.names,
            max_model_len=model.max_model_len,
            vocab_size=processor.vocab_size,
            chats=bool(processor.chat_templates.sources),
            task="generate" if processor.pooler is None else processor.pooler.convert,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: RequestContext
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=__version__,
            not_ready=self._service.obstacle() or "",
            num_requests=len(self._service.traffic),
            max_num_seqs=self._service.model.max_num_seqs,
            data_parallel_size=self._service.engine.config.parallel.data_parallel_size,
        )


def own_id(request_id: str) -> str:
    """The id as the client knows it."""
    return request_id.removeprefix(f"{PREFIX}-")


def size_of(request: Message) -> int:
    """Bytes that a request has in JSON, about."""
    return JSON_SIZE * request.ByteSize()


def sized(context: RequestContext, request: Message) -> RequestContext:
    """The context of one request of a call."""
    return dataclasses.replace(context, num_bytes=size_of(request))

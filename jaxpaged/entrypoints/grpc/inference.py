"""The service `jaxpaged.v1.Inference`: what clients may ask."""

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from google.protobuf.message import Message

from jaxpaged import __version__
from jaxpaged.entrypoints.grpc import requests
from jaxpaged.entrypoints.grpc.multiplexer import Multiplexer
from jaxpaged.entrypoints.grpc.responses import Responses, lora_adapter, vectors
from jaxpaged.pooling import PoolingRequestOutput
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import client_names
from jaxpaged.serving.generate import EngineRequest, Numbered, NumberedTaker, check_shape, collect, prepare, stream
from jaxpaged.serving.pooling import prepare_inputs, prepare_pairs
from jaxpaged.serving.prompts import text_of_tokens, token_strs
from jaxpaged.serving.requests import RequestContext, off_loop, own_or_new
from jaxpaged.serving.service import Service

Request = pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest

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

    async def prepared(self, request: pb.GenerateRequest, context: RequestContext) -> tuple[EngineRequest, Responses]:
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

    async def _prepared(self, request: pb.GenerateRequest, context: RequestContext) -> tuple[EngineRequest, Responses]:
        service = self._service
        await service.pace.turn()
        context, processor = await self._own(request, context), service.engine.input_processor
        wanted = requests.generate_request(request, processor.defaults.sampling, service.takes_pictures)
        threads = service.picture_threads if service.takes_pictures and wanted.has_pictures else None
        prepared = await off_loop(context.num_bytes, prepare, service, wanted, context, threads=threads)
        await check_shape(service, prepared.generation, context)
        return prepared.generation, Responses(
            own_id(context.request_id),
            None if prepared.reading.is_plain else prepared.new_reader,
            processor.tokenizer,
            with_prompt=request.return_prompt_token_ids,
            with_cached_tokens=service.options.enable_prompt_tokens_details,
            media_tokens=prepared.generation.media_tokens,
        )

    async def _own(self, request: Request, context: RequestContext) -> RequestContext:
        """The context of one request of a call. Raises ServingError for another model, and for an id that is none."""
        model, lora = await self._service.asked_model(request.model)
        return dataclasses.replace(
            context,
            model=model,
            lora=lora,
            request_id=f"{PREFIX}-{own_or_new(request.request_id or None)}",
            num_bytes=size_of(request),
        )

    def results(self, generation: EngineRequest, take: NumberedTaker | None = None) -> AsyncGenerator[Numbered]:
        """Results as they come, but those that `take` takes. Closing the generator ends the request."""
        return stream(self._service.engine, self._service.traffic, generation, take)

    async def abort(self, generation: EngineRequest) -> None:
        """End a request; what reads its results gets the last one."""
        await self._service.engine.abort(generation.load(self._service.model.max_model_len).engine_ids)

    async def Abort(self, request: pb.AbortRequest, context: RequestContext) -> pb.AbortResponse:
        ids = self._service.traffic.engine_ids([f"{PREFIX}-{each}" for each in request.request_ids])
        await self._service.engine.abort(ids)
        return pb.AbortResponse(num_aborted=len(ids))

    # ---- pooling

    async def Embed(self, request: pb.EmbedRequest, context: RequestContext) -> pb.EmbedResponse:
        service = self._service
        await service.pace.turn()
        context, inputs = await self._own(request, context), requests.embed_inputs(request)
        wanted = requests.pool_request(request, "inputs")
        generation = await off_loop(context.num_bytes, prepare_inputs, service, wanted, inputs, context, "embed")
        outputs = await collect(service.engine, service.traffic, generation)
        numbers = vectors(output.outputs.data for output in outputs)
        return pb.EmbedResponse(request_id=own_id(context.request_id), vectors=numbers, usage=self._usage(outputs))

    async def Score(self, request: pb.ScoreRequest, context: RequestContext) -> pb.ScoreResponse:
        service = self._service
        await service.pace.turn()
        context, wanted = await self._own(request, context), requests.pool_request(request, "documents")
        names, texts = ("queries", "documents"), (list(request.queries), list(request.documents))
        generation, pairs = await off_loop(context.num_bytes, prepare_pairs, service, wanted, names, texts, context)
        outputs = await collect(service.engine, service.traffic, generation)
        scores = pairs.scores(outputs)
        return pb.ScoreResponse(request_id=own_id(context.request_id), scores=scores, usage=self._usage(outputs))

    def _usage(self, outputs: Sequence[PoolingRequestOutput]) -> pb.Usage:
        """Tokens of all prompts; nothing is generated."""
        usage = pb.Usage(prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs))
        if self._service.options.enable_prompt_tokens_details:
            usage.cached_tokens = sum(output.num_cached_tokens for output in outputs)
        return usage

    # ---- tokens

    async def Tokenize(self, request: pb.TokenizeRequest, context: RequestContext) -> pb.TokenizeResponse:
        service = self._service
        await service.asked_model(request.model)
        threads = service.picture_threads if service.takes_pictures and requests.has_images(request.chat) else None
        prompt = await off_loop(size_of(request), requests.tokenized_prompt, service, request, threads=threads)
        ids = prompt.token_ids
        names = token_strs(service.engine.input_processor, ids) if request.return_token_strs else []
        return pb.TokenizeResponse(token_ids=ids, token_strs=names, max_model_len=service.model.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: RequestContext) -> pb.DetokenizeResponse:
        await self._service.asked_model(request.model)
        with client_names({"tokens": "token_ids"}):
            return pb.DetokenizeResponse(
                text=await off_loop(
                    size_of(request), text_of_tokens, self._service.engine.input_processor, list(request.token_ids)
                )
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
            takes_images=self._service.takes_pictures,
            lora_adapters=[lora_adapter(self._service, each) for each in self._service.adapters or ()],
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

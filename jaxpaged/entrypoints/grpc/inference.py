"""The service `jaxpaged.v1.Inference`: what clients may ask."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from jaxpaged import __version__
from jaxpaged.entrypoints.grpc import requests
from jaxpaged.entrypoints.grpc.answers import Responses, usage_message, vectors
from jaxpaged.entrypoints.grpc.multiplexer import Multiplexer
from jaxpaged.entrypoints.http.errors import client_names
from jaxpaged.entrypoints.http.generation import GenerationRequest, Numbered, stream
from jaxpaged.entrypoints.http.health import Health
from jaxpaged.entrypoints.http.openai.routes import CHATS, COMPLETIONS
from jaxpaged.entrypoints.http.openai.tokens import Tokens
from jaxpaged.entrypoints.http.pooling.running import pool_all, pooler_of, usage_of
from jaxpaged.entrypoints.http.pooling.scoring import Scoring, texts_of
from jaxpaged.entrypoints.http.pooling.vectors import Vectors
from jaxpaged.entrypoints.http.request_ids import own_or_new
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.entrypoints.http.stages import parse
from jaxpaged.proto import jaxpaged_pb2 as pb

PREFIX = "grpc"
"""Of ids inside the server, so that they are told from those of HTTP."""


class Inference:
    """The methods: each gets a request, and who calls. They raise HttpError, RequestError and EngineError."""

    def __init__(self, service: Service):
        self._service = service
        self._tokens, self._health = Tokens(service), Health(service)
        self._vectors, self._scoring = Vectors(service), Scoring(service)

    # ---- generating

    async def Generate(self, request: pb.GenerateRequest, caller: str) -> AsyncGenerator[pb.GenerateResponse]:
        generation, responses = await self.prepared(request, caller)
        async with aclosing(self.results(generation)) as results:
            async for _, output in results:
                response = pb.GenerateResponse()
                if responses.write(output, response):
                    yield response

    async def GenerateStream(
        self, given: AsyncIterator[pb.GenerateStreamRequest], caller: str
    ) -> AsyncGenerator[pb.GenerateStreamResponse]:
        async with aclosing(Multiplexer(self, caller).responses(given)) as messages:
            async for message in messages:
                yield message

    async def prepared(self, request: pb.GenerateRequest, caller: str) -> tuple[GenerationRequest, Responses]:
        """What the engine is asked for, and what makes messages of its results."""
        service = self._service
        wanted = requests.generation_request(request)
        model = service.check_model(wanted.model)
        request_id = f"{PREFIX}-{own_or_new(wanted.request_id)}"
        is_chat = request.WhichOneof("prompt") == "chat"
        parsed = await parse(service, CHATS if is_chat else COMPLETIONS, wanted, request_id, model, caller)
        return parsed.generation, Responses(
            own_id(request_id),
            parsed.new_reader if is_chat else None,
            with_prompt=request.return_prompt_token_ids,
            with_cached_tokens=service.options.enable_prompt_tokens_details,
        )

    def results(self, generation: GenerationRequest) -> AsyncGenerator[Numbered]:
        """Results as they come. Closing the generator ends the request."""
        return stream(self._service.engine, self._service.traffic, generation)

    async def abort(self, generation: GenerationRequest) -> None:
        """End a request; what reads its results gets the last one."""
        await self._service.engine.abort(generation.load(self._service.model.max_model_len).engine_ids)

    async def Abort(self, request: pb.AbortRequest, caller: str) -> pb.AbortResponse:
        ids = self._service.traffic.engine_ids([f"{PREFIX}-{each}" for each in request.request_ids])
        await self._service.engine.abort(ids)
        return pb.AbortResponse(num_aborted=len(ids))

    # ---- pooling

    async def Embed(self, request: pb.EmbedRequest, caller: str) -> pb.EmbedResponse:
        service = self._service
        wanted = requests.embedding_request(request)
        service.check_model(wanted.model)
        pooler_of(service, "embed")
        request_id = f"{PREFIX}-{own_or_new(wanted.request_id)}"
        with client_names({"prompt": "input"}):
            outputs = await pool_all(service, await self._vectors.work(wanted, request_id, "embed"))
        numbers = vectors(output.outputs.data for output in outputs)
        return pb.EmbedResponse(
            request_id=own_id(request_id), vectors=numbers, usage=usage_message(usage_of(service, outputs))
        )

    async def Score(self, request: pb.ScoreRequest, caller: str) -> pb.ScoreResponse:
        service = self._service
        wanted = requests.score_request(request)
        service.check_model(wanted.model)
        request_id = f"{PREFIX}-{own_or_new(wanted.request_id)}"
        scores, usage = await self._scoring.scores(request_id, wanted, *texts_of(wanted))
        return pb.ScoreResponse(request_id=own_id(request_id), scores=scores, usage=usage_message(usage))

    # ---- tokens

    async def Tokenize(self, request: pb.TokenizeRequest, caller: str) -> pb.TokenizeResponse:
        service = self._service
        wanted = requests.tokenize_request(request)
        service.check_model(wanted.model)
        ids = (await self._tokens.prompt(wanted)).token_ids
        backend = service.engine.input_processor.tokenizer.backend
        names = [backend.id_to_token(each) or "" for each in ids] if wanted.return_token_strs else []
        return pb.TokenizeResponse(token_ids=ids, token_strs=names, max_model_len=service.model.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, caller: str) -> pb.DetokenizeResponse:
        self._service.check_model(request.model)
        with client_names({"tokens": "token_ids"}):
            return pb.DetokenizeResponse(text=await self._tokens.text(list(request.token_ids)))

    # ---- the model and the server

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, caller: str) -> pb.GetModelInfoResponse:
        model, processor = self._service.model, self._service.engine.input_processor
        return pb.GetModelInfoResponse(
            names=model.names,
            max_model_len=model.max_model_len,
            vocab_size=processor.vocab_size,
            chats=bool(processor.chat_templates.sources),
            task="generate" if processor.pooler is None else processor.pooler.convert,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, caller: str) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=__version__,
            not_ready=self._health.obstacle() or "",
            num_requests=len(self._service.traffic),
            max_num_seqs=self._service.model.max_num_seqs,
        )


def own_id(request_id: str) -> str:
    """The id as the client knows it."""
    return request_id.removeprefix(f"{PREFIX}-")

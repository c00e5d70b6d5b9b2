"""The ASGI applications: the public one, and that of the admin listener.

Here endpoints get their paths. This module knows no socket: any ASGI server can run what it makes.
"""

import asyncio
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.engine.sleep import LEVELS, MODES, TAGS
from jaxpaged.entrypoints.http.adapters import LoadLoraAdapterRequest, LoraAdapters, UnloadLoraAdapterRequest
from jaxpaged.entrypoints.http.admin import AbortRequest, Admin, ProfileState, SleepState
from jaxpaged.entrypoints.http.anthropic.errors import PREFIX as MESSAGES
from jaxpaged.entrypoints.http.anthropic.errors import MessagesError, MessagesErrors
from jaxpaged.entrypoints.http.anthropic.protocol import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
)
from jaxpaged.entrypoints.http.anthropic.routes import Messages
from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.entrypoints.http.endpoint import Below, Endpoint, KnownPaths, Query
from jaxpaged.entrypoints.http.errors import respond_with_error
from jaxpaged.entrypoints.http.generate import Generate, GenerateTokensRequest, GenerateTokensResponse
from jaxpaged.entrypoints.http.health import OPEN_PATHS, Health
from jaxpaged.entrypoints.http.images import Images, InspectRequest, InspectResponse
from jaxpaged.entrypoints.http.invocations import ANY_REQUEST, ANY_RESPONSE, Invocations
from jaxpaged.entrypoints.http.kv_event_sources import EventSources, KVEventSources
from jaxpaged.entrypoints.http.metrics import Metrics
from jaxpaged.entrypoints.http.openai.chat import Chats
from jaxpaged.entrypoints.http.openai.chat_batch import ChatBatches, ChatBatchRequest
from jaxpaged.entrypoints.http.openai.completions import Completions
from jaxpaged.entrypoints.http.openai.models import ModelCard, ModelList, Models
from jaxpaged.entrypoints.http.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxpaged.entrypoints.http.openai.tokens import Tokens
from jaxpaged.entrypoints.http.openapi import description
from jaxpaged.entrypoints.http.page.files import page_routes
from jaxpaged.entrypoints.http.page.live import PATHS, Live
from jaxpaged.entrypoints.http.plugin_endpoints import plugin_endpoints
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingResponse,
    PoolRequest,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jaxpaged.entrypoints.http.pooling.routes import Pooling
from jaxpaged.entrypoints.http.responses.protocol import DeletedResponse, ResponsesRequest
from jaxpaged.entrypoints.http.responses.protocol import Response as ResponseObject
from jaxpaged.entrypoints.http.responses.routes import Responses
from jaxpaged.entrypoints.http.transport.auth import ApiKeys
from jaxpaged.entrypoints.http.transport.origins import LOOPBACK_NAMES, CheckOrigins
from jaxpaged.entrypoints.http.transport.request_counts import CountRequests, RequestCounts
from jaxpaged.entrypoints.http.weights import (
    DifferenceRequest,
    FinishRequest,
    InitRequest,
    PauseState,
    StartRequest,
    UpdateRequest,
    Weights,
)
from jaxpaged.messages import WeightInfo
from jaxpaged.serving.service import Service


def public_endpoints(service: Service) -> list[Endpoint]:
    """What clients may ask."""
    chats, completions, batches = Chats(service), Completions(service), ChatBatches(service)
    models, tokens = Models(service), Tokens(service)
    return [
        Endpoint("POST", "/v1/completions", completions.respond, CompletionRequest, CompletionResponse, streams=True),
        Endpoint(
            "POST", "/v1/chat/completions", chats.respond, ChatCompletionRequest, ChatCompletionResponse, streams=True
        ),
        Endpoint("POST", "/v1/chat/completions/batch", batches.respond, ChatBatchRequest, ChatCompletionResponse),
        Endpoint(
            "POST",
            "/inference/v1/generate",
            Generate(service).respond,
            GenerateTokensRequest,
            GenerateTokensResponse,
            streams=True,
        ),
        Endpoint("POST", "/invocations", Invocations(service).invoke, ANY_REQUEST, ANY_RESPONSE, streams=True),
        *messages_endpoints(service),
        *responses_endpoints(service),
        Endpoint("GET", "/v1/models", models.list, response=ModelList),
        Endpoint("GET", "/v1/models/{id:path}", models.retrieve, response=ModelCard, not_found=True),
        Endpoint("POST", "/tokenize", tokens.tokenize, TokenizeRequest, TokenizeResponse),
        Endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeRequest, DetokenizeResponse),
        Endpoint("POST", "/v1/images/inspect", Images(service).inspect, InspectRequest, InspectResponse),
        *pooling_endpoints(service),
        Endpoint("POST", "/abort_requests", Admin(service).abort_requests, AbortRequest),
        Endpoint("GET", "/metrics", Metrics(service).read),
        Endpoint("GET", "/kv_event_sources", KVEventSources(service).read, response=EventSources),
        *health_endpoints(service),
    ]


def messages_endpoints(service: Service) -> list[Endpoint]:
    """Anthropic's API."""
    messages = Messages(service)
    path, error = "/v1/messages", MessagesError
    return [
        Endpoint("POST", path, messages.create, MessagesRequest, MessagesResponse, streams=True, error=error),
        Endpoint(
            "POST", f"{path}/count_tokens", messages.count_tokens, CountTokensRequest, CountTokensResponse, error=error
        ),
    ]


def responses_endpoints(service: Service) -> list[Endpoint]:
    responses, one = Responses(service), "/v1/responses/{id}"
    events = (Query("stream", {"type": "boolean"}), Query("starting_after", {"type": "integer", "minimum": 0}))
    return [
        Endpoint("POST", "/v1/responses", responses.create, ResponsesRequest, ResponseObject, streams=True),
        Endpoint("GET", one, responses.retrieve, response=ResponseObject, streams=True, query=events, not_found=True),
        Endpoint("DELETE", one, responses.delete, response=DeletedResponse, not_found=True),
        Endpoint("POST", f"{one}/cancel", responses.cancel, response=ResponseObject, not_found=True),
    ]


def pooling_endpoints(service: Service) -> list[Endpoint]:
    """What clients may ask of a model that pools."""
    pooling = Pooling(service)
    return [
        Endpoint("POST", "/v1/embeddings", pooling.embed, EmbeddingRequest, EmbeddingResponse),
        Endpoint("POST", "/pooling", pooling.pool, PoolRequest, PoolingResponse),
        Endpoint("POST", "/classify", pooling.classify, ClassifyRequest, ClassifyResponse),
        *(Endpoint("POST", path, pooling.score, ScoreRequest, ScoreResponse) for path in ("/score", "/v1/score")),
        *(
            Endpoint("POST", path, pooling.rerank, RerankRequest, RerankResponse)
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
    ]


def health_endpoints(service: Service) -> list[Endpoint]:
    health = Health(service)
    return [
        Endpoint("GET", "/health", health.health),
        Endpoint("GET", "/ready", health.ready),
        Endpoint("GET", "/startup", health.startup),
        Endpoint("GET", "/ping", health.health),
        Endpoint("POST", "/ping", health.health),
        Endpoint("GET", "/version", health.version),
        Endpoint("GET", "/load", health.load),
    ]


def admin_endpoints(service: Service) -> list[Endpoint]:
    """What only the operator may ask."""
    admin = Admin(service)
    sleep = (
        Query("level", {"type": "integer", "enum": list(LEVELS)}),
        Query("mode", {"type": "string", "enum": list(MODES)}),
    )
    wake = (Query("tags", {"type": "array", "items": {"type": "string", "enum": list(TAGS)}}),)
    reset = tuple(Query(name, {"type": "boolean"}) for name in ("reset_running_requests", "reset_external"))
    return [
        Endpoint("POST", "/sleep", admin.sleep, response=SleepState, query=sleep, conflicts=True, is_strict=True),
        Endpoint("POST", "/wake_up", admin.wake_up, response=SleepState, query=wake, is_strict=True),
        Endpoint("GET", "/is_sleeping", admin.is_sleeping, is_strict=True),
        Endpoint("POST", "/start_profile", admin.start_profile, response=ProfileState, conflicts=True, is_strict=True),
        Endpoint("POST", "/stop_profile", admin.stop_profile, response=ProfileState, conflicts=True, is_strict=True),
        Endpoint("POST", "/reset_prefix_cache", admin.reset_prefix_cache, query=reset, is_strict=True),
        Endpoint("POST", "/abort_all_requests", admin.abort_all, is_strict=True),
        *adapter_endpoints(service),
        *weight_endpoints(service),
        Endpoint("GET", "/metrics", Metrics(service).read),
        *health_endpoints(service),
    ]


def adapter_endpoints(service: Service) -> list[Endpoint]:
    """None where no adapter may be loaded while the server runs."""
    if service.adapters is None or not service.adapters.loads_at_runtime:
        return []
    adapters = LoraAdapters(service.adapters, service.max_body_bytes)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    return [
        Endpoint("POST", load, adapters.load, LoadLoraAdapterRequest),
        Endpoint("POST", unload, adapters.unload, UnloadLoraAdapterRequest, not_found=True),
    ]


def weight_endpoints(service: Service) -> list[Endpoint]:
    """Those that change weights are there where folders or hosts are named from which they may come."""
    weights = Weights(service)
    pause = (Query("mode", {"type": "string", "enum": list(MODES)}), Query("clear_cache", {"type": "boolean"}))
    found = [
        Endpoint("POST", "/pause", weights.pause, response=PauseState, query=pause, is_strict=True),
        Endpoint("POST", "/resume", weights.resume, response=PauseState, is_strict=True),
        Endpoint("GET", "/is_paused", weights.is_paused, is_strict=True),
        Endpoint("GET", "/weight_info", weights.info, response=WeightInfo, is_strict=True),
        Endpoint("POST", "/logprob_difference", weights.note_difference, DifferenceRequest),
    ]
    if service.options.allowed_weight_dirs or service.options.allowed_weight_hosts:
        found += [
            Endpoint("POST", "/init_weight_transfer_engine", weights.init, InitRequest),
            Endpoint("POST", "/start_weight_update", weights.start, StartRequest, conflicts=True),
            Endpoint("POST", "/update_weights", weights.update, UpdateRequest, conflicts=True),
            Endpoint("POST", "/finish_weight_update", weights.finish, FinishRequest, conflicts=True),
            Endpoint("POST", "/abandon_weight_update", weights.abandon, is_strict=True),
        ]
    return found


def create_app(service: Service, keys: Sequence[str] = (), counts: RequestCounts | None = None) -> Starlette:
    """The public application. With `keys`, requests must show one of them, but for probes and the page's files.

    `counts`: what several applications of a service count in, which the service's metrics have already.
    """
    options = service.options
    live = Live(service).endpoints() if options.page else []
    pages = page_routes(options.root_path) if options.page else []
    local = options.host in LOOPBACK_NAMES and not (keys or options.uds or options.root_path)
    endpoints = [*public_endpoints(service), *live]
    endpoints += plugin_endpoints(service, [each.path for each in (*endpoints, *pages)])
    return application(
        endpoints,
        service,
        keys,
        counts,
        origins=options.allowed_origins,
        local=local,
        pages=pages,
    )


def create_admin_app(service: Service, keys: Sequence[str] = (), counts: RequestCounts | None = None) -> Starlette:
    """The operator's application."""
    return application(admin_endpoints(service), service, keys, counts, local=not keys)


def application(
    endpoints: Sequence[Endpoint],
    service: Service,
    keys: Sequence[str],
    counts: RequestCounts | None,
    *,
    local: bool,
    origins: Sequence[str] = (),
    pages: Sequence[Route] = (),
) -> Starlette:
    """`origins`: web pages that may ask. A browser's question whether it may needs no key, so it is answered first.
    `local`: see `CheckOrigins`. `pages` need no key either."""
    root = service.options.root_path
    servers = {"servers": [{"url": root}]} if root else {}
    document = json_response({**description(endpoints, with_keys=bool(keys)), **servers}).body

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [*(endpoint.route() for endpoint in endpoints), Route("/openapi.json", openapi), *pages]
    handlers = {route.endpoint: route.path for route in routes}
    options = service.options
    counted = Middleware(
        CountRequests,
        counts=counts or counts_of(service),
        handlers=handlers,
        logged=options.access_log,
        unlogged=options.disable_access_log_for_endpoints,
    )
    every = ["*"]
    cors = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every)]
    cors = cors if origins else []
    below = [Middleware(BelowRoot, root_path=root)] if root else []
    open_paths = OPEN_PATHS.union(page.path for page in pages)
    guarded = [Middleware(ApiKeys, keys=keys, open_paths=open_paths)] if keys else []
    messages = Middleware(Below, path=MESSAGES, layer=MessagesErrors)
    known = Middleware(CheckOrigins, allowed=origins, local=local, own_paths=PATHS)
    straight = Middleware(KnownPaths, endpoints=endpoints)
    app = Starlette(
        routes=routes,
        middleware=[*below, counted, *cors, messages, *guarded, known, straight],
        exception_handlers={HTTPException: respond_with_error},
    )
    app.state.long_bodies, app.state.let_go = asyncio.Lock(), service.let_go
    return app


def counts_of(service: Service) -> RequestCounts:
    """Counts of requests over HTTP, which are among the service's metrics from now on."""
    counts = RequestCounts()
    service.sources.append(counts.read)
    return counts


class BelowRoot:
    """Takes the path below which a proxy shows the server from those requests that still have it."""

    def __init__(self, app: ASGIApp, root_path: str):
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(f"{self._root}/"):
            scope = {**scope, "path": path.removeprefix(self._root)}
        await self._app(scope, receive, send)

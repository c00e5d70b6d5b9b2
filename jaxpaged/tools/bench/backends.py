"""How a request is asked: OpenAI's completions and chats over HTTP, and jaxpaged's own interface over gRPC.

A backend sends a request and measures what comes. This module knows neither when requests are sent nor what is made of
the measurements.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxpaged.entrypoints.cli.server_answers import ServerError, error_text
from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.requests import AnswerStream, BenchRequest, Outcome

if TYPE_CHECKING:
    from jaxpaged.client import AsyncClient

CHECK_SECONDS = 30.0
"""Longest wait for an answer that costs the server nothing."""
LONGEST_ANSWER = 6 * 3600.0
"""Seconds after which a request counts as failed, as in vLLM's benchmark."""


@dataclass(frozen=True)
class Asked:
    """What all requests have in common. `fields` are added to what every one asks for."""

    model: str
    ignore_eos: bool = False
    logprobs: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """A server, as a benchmark sees it."""

    async def first_model(self) -> tuple[str, str]:
        """(name, what it was made from) of the model that is served. Raises ServerError."""
        ...

    async def obstacle(self) -> str | None:
        """Why the server is not at full speed yet, if it says so. Raises ServerError when it cannot be reached."""
        ...

    async def send(self, request: BenchRequest, asked: Asked, request_id: str) -> Outcome:
        """Ask, and measure the answer. What goes wrong is in the outcome."""
        ...

    async def close(self) -> None: ...


# ---- HTTP ------------------------------------------------------------------------------------------


class HttpBackend:
    """A server with OpenAI's API."""

    def __init__(self, client: HttpClient, endpoint: str, chat: bool, clock: Callable[[], float] = time.perf_counter):
        self._client, self._endpoint, self._chat, self._clock = client, endpoint, chat, clock

    async def first_model(self) -> tuple[str, str]:
        status, content = await self._get("/v1/models")
        if status != 200:
            raise ServerError(self._refusal(status, content))
        try:
            first = msgspec.json.decode(content)["data"][0]
            return first["id"], first.get("root") or first["id"]
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            url = self._client.base_url
            raise ServerError(f"{url}/v1/models names no model. Check the address, or name one with --model.") from None

    async def obstacle(self) -> str | None:
        """jaxpaged's `/ready`; other servers have none, or say the same with it."""
        status, content = await self._get("/ready")
        return error_text(content) if status == 503 else None

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            return await self._client.get(path, CHECK_SECONDS)
        except (OSError, TimeoutError) as error:
            raise ServerError(unreachable(self._client.base_url, error)) from None

    async def send(self, request: BenchRequest, asked: Asked, request_id: str) -> Outcome:
        body = msgspec.json.encode(self._body(request, asked))
        outcome = Outcome(start_time=self._clock(), prompt_len=request.prompt_len)
        stream = AnswerStream(outcome)
        try:
            status, refusal = await self._client.post(
                self._endpoint, body, stream.feed, {"X-Request-Id": request_id}, LONGEST_ANSWER
            )
        except (OSError, TimeoutError) as error:
            if not stream.is_done:
                outcome.fail(in_words(error))
                return outcome
        else:
            if status != 200:
                outcome.fail(self._refusal(status, refusal))
                return outcome
        stream.end()
        return outcome

    def _body(self, request: BenchRequest, asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"model": asked.model}
        if self._chat:
            body |= {"messages": messages_of(request.prompt), "max_completion_tokens": request.output_len}
            if asked.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": asked.logprobs}
        else:
            body |= {"prompt": request.prompt, "max_tokens": request.output_len}
            if asked.logprobs is not None:
                body["logprobs"] = asked.logprobs
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | ({"ignore_eos": True} if asked.ignore_eos else {}) | dict(asked.fields)

    def _refusal(self, status: int, content: bytes) -> str:
        advice = {
            401: " Give its key with --api-key, or in OPENAI_API_KEY.",
            404: " Check --model and --endpoint.",
        }
        return f"the server answers {status}: {error_text(content)}{advice.get(status, '')}"

    async def close(self) -> None:
        await self._client.close()


def messages_of(prompt: Any) -> Any:
    """A text as a user's message; a chat as it is. Raises UsageError for token ids."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], Mapping):
        return prompt
    raise UsageError("the dataset has token ids, and a chat takes text. Choose the backend openai or grpc.")


def unreachable(place: str, error: BaseException) -> str:
    return f"no answer from {place}: {in_words(error)}. Is the server running there? See --base-url, --host and --port."


def in_words(error: BaseException) -> str:
    """What happened, without Python's own words for it."""
    if isinstance(error, TimeoutError) and not str(error):
        return "it took too long"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(reason.split()).rstrip(".")


# ---- gRPC ------------------------------------------------------------------------------------------


class GrpcBackend:
    """A server of `jaxpaged.v1`; all requests share a connection."""

    def __init__(self, client: "AsyncClient", target: str, chat: bool, clock: Callable[[], float] = time.perf_counter):
        self._client, self._target, self._chat, self._clock = client, target, chat, clock

    async def first_model(self) -> tuple[str, str]:
        info = await self._asked(self._client.model_info)
        return info.names[0], info.names[0]

    async def obstacle(self) -> str | None:
        return (await self._asked(self._client.server_info)).not_ready or None

    async def _asked(self, call: Callable[[], Any]) -> Any:
        from jaxpaged.client import ClientError

        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await call()
        except TimeoutError as error:
            raise ServerError(unreachable(self._target, error)) from None
        except ClientError as error:
            if error.code == "UNAVAILABLE":
                raise ServerError(unreachable(self._target, error)) from None
            raise ServerError(self._refusal(error)) from None

    async def send(self, request: BenchRequest, asked: Asked, request_id: str) -> Outcome:
        from jaxpaged.client import ClientError

        values: dict[str, Any] = {"model": asked.model, "max_tokens": request.output_len, "request_id": request_id}
        values |= {"ignore_eos": True} if asked.ignore_eos else {}
        values |= {} if asked.logprobs is None else {"logprobs": asked.logprobs}
        prompt = messages_of(request.prompt) if self._chat else request.prompt
        outcome = Outcome(start_time=self._clock(), prompt_len=request.prompt_len)
        try:
            async with asyncio.timeout(LONGEST_ANSWER):
                responses = self._client.generate(prompt, **values, **asked.fields)
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        read_response(outcome, response, self._clock())
        except ClientError as error:
            outcome.fail(self._refusal(error))
        except TimeoutError as error:
            outcome.fail(in_words(error))
        except TypeError as error:  # a field that requests do not have
            raise UsageError(f"--extra-body or a sampling flag: {error}") from None
        if not outcome.has_output:
            outcome.fail("the answer ended without any output.")
        return outcome

    def _refusal(self, error: Any) -> str:
        advice = {
            "UNAUTHENTICATED": " Give its key with --api-key, or in OPENAI_API_KEY.",
            "NOT_FOUND": " Check --model.",
        }
        return f"the server answers {error.code}: {error.message}{advice.get(error.code, '')}"

    async def close(self) -> None:
        await self._client.close()


def read_response(outcome: Outcome, response: Any, now: float) -> None:
    """A response with tokens of the first sequence is a chunk; the last one may have nothing but the usage."""
    for sequence in response.sequences:
        if sequence.index == 0 and sequence.token_ids:
            outcome.add_chunk(now, sequence.reasoning + sequence.text)
    if response.HasField("usage"):
        outcome.prompt_len = response.usage.prompt_tokens or outcome.prompt_len
        outcome.output_tokens = response.usage.completion_tokens

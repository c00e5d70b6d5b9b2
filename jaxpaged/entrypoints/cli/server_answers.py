"""Answers of a chat from a server with OpenAI's API, over HTTP or HTTPS.

This module knows the wire, with what the standard library has for it; no engine.
"""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxpaged.entrypoints.cli.conversation import Answer
from jaxpaged.errors import RequestError, ServerError, UsageError, shown_option

MAX_ERROR_BYTES = 4096
TOGETHER = 0.001
"""Seconds between pieces that came together."""
FEWEST_LATER, SHORTEST = 4, 0.05
"""Arrivals after the first one, and seconds between the first and the last, below which there is no speed to tell."""


class Arrivals:
    """When pieces of an answer came, in seconds. Pieces that come together tell no speed."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.later = 0  # times that something came after the first

    def add(self, now: float) -> None:
        if self.first is None:
            self.first = now
        elif now - self.last >= TOGETHER:
            self.later += 1
        self.last = now

    def seconds(self) -> float | None:
        """From the first piece to the last; None where too few came one after the other."""
        if self.first is None or self.later < FEWEST_LATER or self.last - self.first < SHORTEST:
            return None
        return self.last - self.first


class ServerAnswers:
    """`url` is that of the server, with or without /v1; `model` None is the first that it names."""

    default_max_tokens = None  # the server's business

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, timeout: float = 600.0):
        if not url.startswith(("http://", "https://")):
            shown = shown_option("url", url)
            raise UsageError(f"--url is {shown}; it must begin with http:// or https://, as http://127.0.0.1:8000.")
        self.base = url.rstrip("/").removesuffix("/v1")
        self.api_key, self.timeout = api_key, timeout
        self.model = model or self._first_model()

    def ask(self, messages: list[dict[str, Any]], given: Mapping[str, Any], show: Callable[[str], None]) -> Answer:
        body = {"model": self.model, "messages": messages, "stream": True, **given}
        body["stream_options"] = {"include_usage": True}
        begin, arrivals = time.monotonic(), Arrivals()
        text, reason, num_tokens = [], None, None
        with self._open("/v1/chat/completions", body) as response:
            for chunk in events(response):
                if error := chunk.get("error"):
                    raise ServerError(f"the server ended the answer: {error_text(error)}")
                if usage := chunk.get("usage"):
                    num_tokens = usage.get("completion_tokens")
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    piece = delta.get("content") or ""
                    if piece or delta.get("reasoning_content") or delta.get("reasoning"):
                        arrivals.add(time.monotonic())
                    if piece:
                        text.append(piece)
                        show(piece)
                    reason = choice.get("finish_reason") or reason
        waited = None if arrivals.first is None else arrivals.first - begin
        return Answer("".join(text), reason, num_tokens, waited, arrivals.seconds())

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            try:
                return json.load(response)["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"{self.base}/v1/models names no model. Check --url, or name one with -m.") from None

    @contextlib.contextmanager
    def _open(self, path: str, body: Any = None) -> Iterator[Any]:
        """The answer to a request. Raises RequestError for one that is refused, and ServerError."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base + path, data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                said = error_text(error.read(MAX_ERROR_BYTES))
            kind = RequestError if error.code == 400 else ServerError
            key = " Give its key with --api-key." if error.code == 401 else ""
            raise kind(f"the server answers {error.code}: {said}{key}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
                reason = f"what comes from there is no whole answer over HTTP ({type(error).__name__})"
            raise ServerError(f"no answer from {self.base}: {reason}. Is the server running there?") from None


def events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in response:
        data = line.strip()
        if not data.startswith(b"data:"):
            continue
        data = data.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if isinstance(chunk, dict):
            yield chunk


def error_text(error: Any) -> str:
    """The words of an error in OpenAI's form, or what there is instead, on one line."""
    if isinstance(error, bytes):
        try:
            error = json.loads(error)
        except ValueError:
            error = error.decode(errors="replace")
    if isinstance(error, dict):
        inner = error.get("error", error)
        error = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(error).split()) or "nothing more"

"""From a request to what the engine is asked, and to the response as it is before anything is said.

This module does not know how a response is made or handed out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.answer import Reading
from jaxpaged.entrypoints.http.errors import HttpError, client_names
from jaxpaged.entrypoints.http.generation import GenerationRequest
from jaxpaged.entrypoints.http.prepare import Conversation, Prepared, prepare
from jaxpaged.entrypoints.http.responses.input_items import Item, Turns, input_items
from jaxpaged.entrypoints.http.responses.request import ResponsesRequest
from jaxpaged.entrypoints.http.responses.response import Response, new_id
from jaxpaged.entrypoints.http.responses.store import ResponseStore
from jaxpaged.entrypoints.http.responses.text_format import shape_of
from jaxpaged.entrypoints.http.responses.tools import tool_use
from jaxpaged.entrypoints.http.responses.truncation import newest_that_fit
from jaxpaged.entrypoints.http.sampling_fields import given
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

ENGINE_NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs",
    "extra_args": "vllm_xargs",
}  # fmt: skip
"""What other parts of the server call a field -> what it is called here."""


@dataclass(frozen=True)
class Job:
    """A checked request. `items` are the conversation up to the response, `owner` who may ask for it."""

    response: Response
    items: list[Item]
    owner: bytes
    generation: GenerationRequest
    reading: Reading
    tells_cached_tokens: bool
    count_tokens: Callable[[str], int]


class JobMaker:
    """Makes jobs of requests. Raises HttpError or RequestError when these are at fault."""

    def __init__(self, service: Service, store: ResponseStore):
        self._service = service
        self._store = store

    def make(self, wanted: ResponsesRequest, owner: bytes, earlier: list[Item]) -> Job:
        """`earlier`: what `earlier_items` gives. Takes long for long conversations."""
        service = self._service
        model = service.check_model(wanted.model)
        items = [*earlier, *input_items(wanted.input)]
        shape_field = "text.format" if wanted.structured_outputs is None else "structured_outputs"
        names = {**ENGINE_NAMES, "structured_outputs": shape_field}
        with client_names(names):
            prepared = self._prepared(wanted, self._turns(wanted, earlier))
        response = response_of(wanted, model, prepared.params, self._keeps(wanted))
        return Job(
            response, items, owner,
            GenerationRequest(response.id, [prepared.prompt], prepared.params, wanted.priority or 0, names),
            prepared.reading, service.options.enable_prompt_tokens_details, service.count_tokens,
        )  # fmt: skip

    def _keeps(self, wanted: ResponsesRequest) -> bool:
        """Raises HttpError 400 for a wish to keep what cannot be kept."""
        if not self._store.is_enabled and (wanted.store or wanted.background):
            field = "store" if wanted.store else "background"
            raise HttpError(400, f"{field} is true, but this server keeps no responses. Leave it out.", field)
        return self._store.is_enabled and wanted.store is not False

    def earlier_items(self, wanted: ResponsesRequest, owner: bytes) -> list[Item]:
        """The conversation of the previous response, its own items included."""
        previous_id = wanted.previous_response_id
        if previous_id is None:
            return []
        with client_names({"response_id": "previous_response_id"}):
            previous = self._store.get(previous_id, owner)
        status = previous.response.status
        if status in ("queued", "in_progress", "failed"):
            raise HttpError(
                400, f"The response {previous_id!r} is {status}, so nothing can follow it. Wait for it, or go on from "
                "another.", "previous_response_id",
            )  # fmt: skip
        output = [msgspec.to_builtins(item) for item in previous.response.output]
        # Arguments that were cut off are no JSON, and templates refuse them.
        whole = [item for item in output if item["type"] != "function_call" or item["status"] == "completed"]
        return [*previous.items, *whole]

    def _turns(self, wanted: ResponsesRequest, earlier: list[Item]) -> list[dict[str, Any]]:
        turns = Turns(wanted.instructions)
        turns.add_all(earlier, "previous_response_id")
        turns.add_all(input_items(wanted.input), "input")
        return turns.messages

    def _prepared(self, wanted: ResponsesRequest, messages: list[dict[str, Any]]) -> Prepared:
        service = self._service
        use = tool_use(wanted.tools, wanted.tool_choice, wanted.parallel_tool_calls is not False)
        variables = dict(wanted.chat_template_kwargs or {})
        if wanted.reasoning is not None and wanted.reasoning.effort is not None:
            variables["reasoning_effort"] = wanted.reasoning.effort
        template = {"template_variables": variables, "tools": None if use is None else list(use.tools)}
        shape, params = shape_of(wanted), self._params(wanted)

        def with_messages(kept: list[dict[str, Any]]) -> Prepared:
            conversation = Conversation(kept, template, use, shape, cache_salt=wanted.cache_salt)
            return prepare(conversation, params, service.formats, service.prompts)

        if wanted.truncation != "auto":
            return with_messages(messages)
        length = service.model.max_model_len
        answer = min(params.max_tokens or 1, length // 2)
        return newest_that_fit(messages, with_messages, length - answer)

    def _params(self, wanted: ResponsesRequest) -> SamplingParams:
        """Without a limit of its own a request gets the model's, or the rest of the context."""
        defaults = dict(self._service.engine.input_processor.defaults.sampling)
        limit = {} if wanted.max_output_tokens is None else {"max_tokens": wanted.max_output_tokens}
        in_pieces = wanted.stream or wanted.background
        return SamplingParams(
            **{"max_tokens": None, **defaults, **given(wanted), **limit},
            logprobs=(wanted.top_logprobs or 0) if wanted.wants_logprobs else None,
            extra_args=wanted.vllm_xargs,
            output_kind=RequestOutputKind.DELTA if in_pieces else RequestOutputKind.FINAL_ONLY,
        )


def response_of(wanted: ResponsesRequest, model: str, params: SamplingParams, keeps: bool) -> Response:
    """The response before it has begun, with the options that hold for it."""
    text, reasoning = wanted.text, wanted.reasoning
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="queued" if wanted.background else "in_progress",
        background=bool(wanted.background),
        instructions=wanted.instructions,
        max_output_tokens=wanted.max_output_tokens,
        max_tool_calls=wanted.max_tool_calls,
        model=model,
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        previous_response_id=wanted.previous_response_id,
        prompt_cache_key=wanted.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        safety_identifier=wanted.safety_identifier,
        store=keeps,
        temperature=params.temperature,
        text={"format": (text.format if text is not None else None) or {"type": "text"}, "verbosity": "medium"},
        tool_choice=wanted.tool_choice or "auto",
        tools=wanted.tools or [],
        top_logprobs=wanted.top_logprobs or 0,
        top_p=params.top_p,
        truncation=wanted.truncation or "disabled",
        user=wanted.user,
        metadata=wanted.metadata or {},
    )

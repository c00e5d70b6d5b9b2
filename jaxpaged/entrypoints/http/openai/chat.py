"""`POST /v1/chat/completions`: answer conversations."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.answer import AnswerReader, Reading
from jaxpaged.entrypoints.http.auth import client_of
from jaxpaged.entrypoints.http.beams import collect_or_search
from jaxpaged.entrypoints.http.big_answer import answer_of
from jaxpaged.entrypoints.http.body import off_loop, read_struct
from jaxpaged.entrypoints.http.errors import HttpError, client_names
from jaxpaged.entrypoints.http.generation import GenerationRequest, stream
from jaxpaged.entrypoints.http.openai.beam_fields import beam_params, check_beams
from jaxpaged.entrypoints.http.openai.chat_protocol import (
    CalledFunction,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
    ChatToolCall,
)
from jaxpaged.entrypoints.http.openai.chat_stream import ChatStream
from jaxpaged.entrypoints.http.openai.conversation import (
    template_arguments,
    template_messages,
    text_of,
    tool_use,
)
from jaxpaged.entrypoints.http.openai.events import DONE, late_error
from jaxpaged.entrypoints.http.openai.fields import (
    check_fields,
    sampling_params,
    shape_name,
    shape_of,
    usage_options,
)
from jaxpaged.entrypoints.http.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.entrypoints.http.prepare import CheckShape, Conversation, prepare
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.parsing.deltas import ParsedMessage
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

ENGINE_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""The engine's name of a field -> what it is called in a chat."""


@dataclass(frozen=True)
class Chat:
    """A checked request: what was asked, what the engine is to do, and what stands before its answer."""

    wanted: ChatCompletionRequest
    generation: GenerationRequest
    model: str
    role: str
    echo: str  # the beginning of the last message, when the client wants it back
    reading: Reading

    def new_reader(self) -> AnswerReader:
        """What reads one of the answers."""
        return AnswerReader(self.reading, self.generation.prompts[0].text)


class ChatCompletions:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def create(self, request: Request) -> Response:
        """Answer one conversation, at once or as a stream."""
        service = self._service
        wanted = await read_struct(request, ChatCompletionRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        request_id = service.request_id(request, "chatcmpl", wanted.request_id)
        chat = await self.prepared(wanted, request_id, model, service.check_shape_for(client_of(request)))
        if wanted.stream:
            return service.streamed(request_id, self._events(chat), late_error)
        return await service.answered(request, request_id, self._complete(chat))

    async def prepared(
        self, wanted: ChatCompletionRequest, request_id: str, model: str, check_shape: CheckShape
    ) -> Chat:
        """The request, checked. Raises HttpError and RequestError 400 for what cannot be."""
        chat = await off_loop(self._checked, wanted, request_id, model)
        with client_names(chat.generation.names):
            await check_shape(chat.generation.params.structured_outputs)
        return chat

    def _checked(self, wanted: ChatCompletionRequest, request_id: str, model: str) -> Chat:
        service = self._service
        check(wanted)
        params, beams = self._params(wanted)
        service.traffic.check_num_sequences(1, wanted.n or 1)
        conversation, names = self._conversation(wanted), names_of(wanted)
        with client_names(names):
            prepared = prepare(conversation, params, service.formats, service.prompts)
        last = conversation.messages[-1]
        role = "assistant" if conversation.template["add_generation_prompt"] else last["role"]
        echo = text_of(last) if wanted.echo and last["role"] == role else ""
        generation = GenerationRequest(
            request_id, [prepared.prompt], prepared.params, wanted.priority or 0, names, beams
        )
        return Chat(wanted, generation, model, role, echo, prepared.reading)

    def _conversation(self, wanted: ChatCompletionRequest) -> Conversation:
        return Conversation(
            messages=template_messages(wanted.messages),
            template=template_arguments(wanted, self._service.options.trust_request_chat_template),
            tool_use=tool_use(wanted.tool_choice, wanted.tools, wanted.parallel_tool_calls),
            shape=shape_of(wanted),
            include_reasoning=wanted.include_reasoning is not False,
            truncation=wanted.truncation,
            add_special_tokens=bool(wanted.add_special_tokens),
            cache_salt=wanted.cache_salt,
        )

    def _params(self, wanted: ChatCompletionRequest) -> tuple[SamplingParams, BeamSearchParams | None]:
        """Without a limit of its own a request gets the model's, or the rest of the context."""
        defaults = self._service.engine.input_processor.defaults.sampling
        limits = (wanted.max_completion_tokens, wanted.max_tokens, defaults.get("max_tokens"))
        max_tokens = next((limit for limit in limits if limit is not None), None)
        own_names = {} if wanted.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        with client_names({**ENGINE_NAMES, **own_names}):
            params = sampling_params(wanted, defaults, max_tokens=max_tokens, logprobs=num_logprobs(wanted))
            limit = self._service.model.max_model_len if max_tokens is None else max_tokens
            return params, beam_params(wanted, limit)

    async def _complete(self, chat: Chat) -> Response:
        service = self._service
        [output] = await collect_or_search(service.engine, service.traffic, chat.generation)
        return await answer_of(chat.generation.size_of([output]), lambda: self._answer(chat, output))

    def _answer(self, chat: Chat, output: RequestOutput) -> ChatCompletionResponse:
        wanted = chat.wanted
        usage = UsageCounter(self._service.options.enable_prompt_tokens_details)
        usage.add(0, output)
        readers = [chat.new_reader() for _ in output.outputs]
        return ChatCompletionResponse(
            id=chat.generation.request_id,
            created=int(time.time()),
            model=chat.model,
            choices=[choice(chat, *each) for each in zip(output.outputs, readers)],
            usage=usage.read(num_thinking=self._num_thinking(chat, readers)),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if wanted.return_token_ids else None,
            prompt_text=output.prompt if wanted.return_prompt_text else None,
        )

    async def _events(self, chat: Chat) -> AsyncGenerator[bytes]:
        service = self._service
        usage = usage_options(chat.wanted, service.options.enable_force_include_usage)
        counter = UsageCounter(service.options.enable_prompt_tokens_details)
        chunks = ChatStream(
            chat.wanted, chat.generation.request_id, chat.model, chat.role, chat.echo, usage, counter, chat.new_reader
        )
        async with aclosing(stream(service.engine, service.traffic, chat.generation)) as results:
            async for _, output in results:
                for chunk in chunks.of(output):
                    yield chunk
        if usage.at_end:
            yield chunks.last(self._num_thinking(chat, chunks.readers))
        yield DONE

    def _num_thinking(self, chat: Chat, readers: Iterable[AnswerReader]) -> int | None:
        """Tokens of thinking, once the answers are read: of the text, so that it costs nothing while tokens come."""
        if chat.reading.reasoning_parser is None:
            return None
        return sum(self._service.count_tokens(reader.thinking) for reader in readers)


def check(wanted: ChatCompletionRequest) -> None:
    """Raise HttpError 400 for what this endpoint cannot do."""
    check_fields(wanted)
    check_beams(wanted)
    if wanted.use_beam_search and wanted.tool_choice not in (None, "auto", "none"):
        raise HttpError(
            400, "tool_choice forces a call, but beam search has no grammars. Leave one of them out.", "tool_choice"
        )
    if wanted.top_logprobs and not wanted.logprobs:
        raise HttpError(
            400, f"top_logprobs is {wanted.top_logprobs}, but logprobs is not true. Set it.", "top_logprobs"
        )
    if wanted.top_logprobs is not None and wanted.top_logprobs < -1:
        raise HttpError(
            400, f"top_logprobs is {wanted.top_logprobs}; it must be at least -1, which means all.", "top_logprobs"
        )
    if wanted.logprob_token_ids and not wanted.logprobs:
        raise HttpError(400, "logprob_token_ids is given, but logprobs is not true. Set it.", "logprob_token_ids")


def num_logprobs(wanted: ChatCompletionRequest) -> int | None:
    """Candidates per token; None when no log probabilities were asked for."""
    if not wanted.logprobs:
        return None
    return len(wanted.logprob_token_ids) if wanted.logprob_token_ids else wanted.top_logprobs or 0


def names_of(wanted: ChatCompletionRequest) -> dict[str, str]:
    """What the request calls the engine's fields. The shape of forced calls follows from the tools."""
    own = shape_name(wanted)
    if wanted.tools and wanted.tool_choice not in (None, "auto", "none"):
        own = {"structured_outputs": "tools"}
    return {**ENGINE_NAMES, **own}


def choice(chat: Chat, completion: CompletionOutput, reader: AnswerReader) -> ChatChoice:
    wanted = chat.wanted
    logprobs = None
    if completion.logprobs is not None:
        logprobs = chat_logprobs(
            completion.token_ids, completion.logprobs, num_logprobs(wanted), bool(wanted.return_tokens_as_token_ids)
        )
    answer = reader.read(completion)
    return ChatChoice(
        index=completion.index,
        message=chat_message(chat, answer.message),
        logprobs=logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        token_ids=completion.token_ids if wanted.return_token_ids else None,
    )


def chat_message(chat: Chat, parsed: ParsedMessage) -> ChatMessage:
    """Without content there is null beside calls or thinking, and an empty text where there is nothing at all."""
    calls = [ChatToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in parsed.tool_calls]
    is_text = parsed.content is not None or not (calls or parsed.reasoning)
    return ChatMessage(
        role=chat.role,
        content=chat.echo + (parsed.content or "") if is_text else chat.echo or None,
        reasoning=parsed.reasoning,
        tool_calls=calls or msgspec.UNSET,
    )

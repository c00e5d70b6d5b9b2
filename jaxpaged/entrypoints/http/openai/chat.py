"""`/v1/chat/completions`: its body as what the engine is to do, and results as the whole or the chunks of a stream.

What this API cannot do is refused by its field. Messages, tools and template arguments are checked for all protocols in
`serving/prompts.py`.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.entrypoints.http.openai.events import PLACEHOLDER, OpenAIStream, TextEvents
from jaxpaged.entrypoints.http.openai.fields import (
    beam_params,
    check_fields,
    check_refusals,
    sampling_params,
    shape_name,
    shape_of,
)
from jaxpaged.entrypoints.http.openai.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from jaxpaged.entrypoints.http.openai.protocol import (
    CalledFunction,
    ChatChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatMessage,
    ChatStreamChoice,
    ChatToolCall,
    ChatToolCallDelta,
    FunctionDelta,
    NamedToolChoice,
    TokenizeRequest,
    told_to_trainers,
    usage_of,
)
from jaxpaged.entrypoints.http.respond import Parsed, Stages, respond
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.parsing.deltas import Delta, ParsedMessage
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import GenerateRequest, check_logprobs, prepare
from jaxpaged.serving.output_reader import OutputReader, UsageCounter
from jaxpaged.serving.prompts import (
    Conversation,
    checked_tools,
    has_pictures,
    message_text,
    template_messages,
    template_variables,
    tool_use,
)
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

REFUSALS = {
    "functions": "They are called tools",
    "function_call": "It is called tool_choice",
    "modalities": "The model writes text only",
    "audio": "The model writes text only",
    "verbosity": "The model writes as it does",
    "web_search_options": "This server searches nothing",
}
"""Field -> why it is not served."""
NOTHING = (None, False, "", [], {}, ["text"], "medium", "none", "auto")
"""Values of those that ask for nothing."""
PICTURE_OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")
ENGINE_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""The engine's name of a field -> what it is called in a chat."""


@dataclass(frozen=True)
class ParsedChat(Parsed[ChatCompletionRequest]):
    """A chat: whose response it is, and the beginning of the last message, where the client wants it repeated."""

    role: str = "assistant"
    echo: str = ""


def parse(service: Service, body: ChatCompletionRequest, context: RequestContext) -> ParsedChat:
    """Raises ServingError and RequestError for what cannot be."""
    check(body)
    params, beams = params_of(service, body)
    conversation = conversation_of(service, body)
    names = names_of(body, conversation)
    request = GenerateRequest(prompt=conversation, params=params, beams=beams, priority=body.priority or 0, names=names)
    prepared = prepare(service, request, context)
    last = conversation.messages[-1]
    role = "assistant" if conversation.template["add_generation_prompt"] else last["role"]
    echo = message_text(last) if body.echo and last["role"] == role else ""
    return ParsedChat(body, context.model, prepared.generation, prepared.reading, role, echo)


def params_of(service: Service, body: ChatCompletionRequest) -> tuple[SamplingParams, BeamSearchParams | None]:
    """Without a limit of its own a request gets the model's, or the rest of the context."""
    defaults = service.engine.input_processor.defaults.sampling
    limits = (body.max_completion_tokens, body.max_tokens, defaults.get("max_tokens"))
    max_tokens = next((limit for limit in limits if limit is not None), None)
    own_names = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    with client_names({**ENGINE_NAMES, **own_names}):
        params = sampling_params(body, defaults, max_tokens=max_tokens, logprobs=body.num_logprobs)
        return params, beam_params(body, service.model.max_model_len if max_tokens is None else max_tokens)


def check(body: ChatCompletionRequest) -> None:
    """Raise ServingError for what this API cannot do."""
    check_fields(body)
    check_refusals(body, REFUSALS, NOTHING)
    if body.use_beam_search and body.tool_choice not in (None, "auto", "none"):
        raise ServingError(
            "tool_choice forces a call, but beam search has no grammars. Leave one of them out.", "tool_choice"
        )
    if body.top_logprobs and not body.logprobs:
        raise ServingError(f"top_logprobs is {body.top_logprobs}, but logprobs is not true. Set it.", "top_logprobs")
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.logprob_token_ids and not body.logprobs:
        raise ServingError("logprob_token_ids is given, but logprobs is not true. Set it.", "logprob_token_ids")


def names_of(body: ChatCompletionRequest, conversation: Conversation) -> dict[str, str]:
    """What the request calls the engine's fields. The shape of forced calls follows from the tools."""
    use = conversation.tool_use
    own = {"structured_outputs": "tools"} if use is not None and use.is_forced else shape_name(body)
    return {**ENGINE_NAMES, **own}


def conversation_of(service: Service, body: ChatCompletionRequest) -> Conversation:
    """The request as all APIs have it. Raises ServingError and RequestError."""
    messages, template = template_messages(body.messages, service.takes_pictures), template_arguments(service, body)
    choice, named = body.tool_choice, None
    if isinstance(choice, NamedToolChoice):
        choice, named = None, choice.function.name
    return Conversation(
        messages=messages,
        template=template,
        tool_use=tool_use(choice, named, template["tools"], body.parallel_tool_calls is not False),
        shape=shape_of(body),
        include_reasoning=body.include_reasoning is not False,
        truncation=body.truncation,
        add_special_tokens=bool(body.add_special_tokens),
        cache_salt=body.cache_salt,
    )


def template_arguments(service: Service, body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """The arguments of `InputProcessor.chat_prompt` besides the messages. Raises ServingError."""
    of_pictures = service.check_picture_options({name: getattr(body, name) for name in PICTURE_OPTIONS})
    if body.chat_template is not None and not service.options.trust_request_chat_template:
        raise ServingError(
            "chat_template is given, but this server uses the model's own. Leave it out, or start the server with "
            "--trust-request-chat-template.",
            "chat_template",
        )
    return {
        "chat_template": body.chat_template,
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
        "tools": None if body.tools is None else checked_tools([msgspec.to_builtins(tool) for tool in body.tools]),
        "template_variables": template_variables(body.chat_template_kwargs, body.documents, body.reasoning_effort),
        **of_pictures,
    }


def answer(service: Service, chat: ParsedChat, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
    """The whole of it: `outputs` is the last result of the one prompt."""
    [output], body, tokenizer = outputs, chat.body, service.engine.input_processor.tokenizer
    usage = UsageCounter(service.options.enable_prompt_tokens_details, chat.generation.media_tokens)
    usage.add(0, output)
    readers = [chat.new_reader() for _ in output.outputs]
    return ChatCompletionResponse(
        id=chat.generation.request_id,
        created=int(time.time()),
        model=chat.model,
        choices=[choice(chat, tokenizer, *each) for each in zip(output.outputs, readers)],
        usage=usage_of(usage, num_thinking=num_thinking(service, chat, readers)),
        prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
        prompt_text=output.prompt if body.return_prompt_text else None,
        kv_transfer_params=output.kv_transfer_params,
    )


def num_thinking(service: Service, chat: ParsedChat, readers: Iterable[OutputReader]) -> int | None:
    """Tokens of thinking, once the responses are read: of the text, so that it costs nothing while tokens come."""
    if chat.reading.reasoning_parser is None:
        return None
    return sum(service.count_tokens(reader.thinking) for reader in readers)


def choice(chat: ParsedChat, tokenizer: Tokenizer, completion: CompletionOutput, reader: OutputReader) -> ChatChoice:
    body, logprobs = chat.body, None
    if completion.logprobs is not None:
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, body.num_logprobs, as_ids)
    part = reader.read(completion)
    return ChatChoice(
        index=completion.index,
        message=chat_message(chat, part.message),
        logprobs=logprobs,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        token_ids=completion.token_ids if body.return_token_ids else None,
        **told_to_trainers(completion),
    )


def chat_message(chat: ParsedChat, parsed: ParsedMessage) -> ChatMessage:
    """Without content there is null beside calls or thinking, and an empty text where there is nothing at all."""
    calls = [ChatToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in parsed.tool_calls]
    is_text = parsed.content is not None or not (calls or parsed.reasoning)
    return ChatMessage(
        role=chat.role,
        content=chat.echo + (parsed.content or "") if is_text else chat.echo or None,
        reasoning=parsed.reasoning,
        tool_calls=calls or msgspec.UNSET,
    )


class ChatStream(OpenAIStream):
    """Writes the chunks of a stream: for every response its role, what it says as it comes, and how it ended."""

    def __init__(self, service: Service, chat: ParsedChat):
        super().__init__(service, chat, ChatCompletionChunk, "chat.completion.chunk")
        self._service = service
        self._chat = chat
        body = chat.body
        self._readers = defaultdict(chat.new_reader)
        self._n = body.n or 1
        self._top = body.num_logprobs or 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt = bool(body.return_prompt_text)
        # Beyond what the engine may give with a token:
        self._only_text = not (self._with_ids or self._usage.in_every_chunk)
        self._text_events: dict[int, TextEvents] = {}  # of responses that have begun
        self._begun = False

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Events of a new result; before the first come those that open every response."""
        events = b""
        if not self._begun:
            self._begun = True
            events = b"".join(self._opening(output))
        self._counter.add(number, output)
        events += self.lent(output)
        for completion in output.outputs:
            if not self._is_text(completion):
                events += b"".join(map(self._chunks.chunk, self._choices(completion)))
            elif completion.text:
                events += self._text_event(completion.index, completion.text)
        return events

    def _num_thinking(self) -> int | None:
        return num_thinking(self._service, self._chat, self._readers.values())

    def _is_text(self, completion: CompletionOutput) -> bool:
        """Whether a result brings nothing but text, all of which is content. This is the way of most tokens."""
        if completion.finish_reason is not None or completion.logprobs is not None:
            return False
        return completion.sampling_mask is None and self._only_text and self._readers[completion.index].is_plain

    def _text_event(self, index: int, text: str) -> bytes:
        events = self._text_events.get(index)
        if events is None:
            delta = ChatDelta(content=PLACEHOLDER)
            choice = ChatStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
            events = self._text_events[index] = TextEvents(self._chunks.chunk(choice))
        return events.of(text)

    def _opening(self, output: RequestOutput) -> Iterator[bytes]:
        for index in range(self._n):
            opening = ChatStreamChoice(
                index=index, delta=ChatDelta(role=self._chat.role, content=""), logprobs=None, finish_reason=None
            )
            yield self._chunks.chunk(
                opening,
                prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
                prompt_text=output.prompt if self._with_prompt else None,
            )
        for index in range(self._n if self._chat.echo else 0):
            delta = ChatDelta(content=self._chat.echo)
            yield self._chunks.chunk(ChatStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None))

    def _shows_tokens(self, completion: CompletionOutput) -> bool:
        """Whether there is something to show although the text has not grown."""
        has_more = completion.logprobs is not None or completion.sampling_mask is not None
        return bool(completion.token_ids) and (self._with_ids or has_more)

    def _choices(self, completion: CompletionOutput) -> Iterator[ChatStreamChoice]:
        """One for every piece. The first has the tokens, the last says how the response ended."""
        part = self._readers[completion.index].read(completion)
        ended = part.finish_reason is not None
        deltas = [chat_delta(delta) for delta in part.deltas]
        if not deltas and (ended or self._shows_tokens(completion)):
            deltas = [ChatDelta(content="")]
        for place, delta in enumerate(deltas):
            is_last = ended and place == len(deltas) - 1
            yield ChatStreamChoice(
                index=completion.index,
                delta=delta,
                logprobs=None if place else self._logprobs(completion),
                finish_reason=part.finish_reason if is_last else None,
                stop_reason=part.stop_reason if is_last else msgspec.UNSET,
                token_ids=completion.token_ids if self._with_ids and not place else None,
                **({} if place else told_to_trainers(completion)),
            )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not completion.logprobs:
            return None
        tokenizer = self._service.engine.input_processor.tokenizer
        return chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, self._top, self._as_ids)


def chat_delta(delta: Delta) -> ChatDelta:
    call = delta.tool_call
    if call is None:
        return ChatDelta(reasoning=delta.reasoning) if delta.content is None else ChatDelta(content=delta.content)
    function = FunctionDelta(call.name, call.arguments)
    return ChatDelta(tool_calls=[ChatToolCallDelta(call.index, call.id, call.id and "function", function)])


CHATS = Stages("chatcmpl", ChatCompletionRequest, parse, answer, ChatStream, lambda body: has_pictures(body.messages))


class Chats:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def respond(self, request: Request) -> Response:
        """Answer one conversation, at once or as a stream."""
        return await respond(self._service, CHATS, request)

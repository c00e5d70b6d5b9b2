"""The body of `/v1/chat/completions` as what the engine is to do; what this API cannot do is refused by its field."""

from dataclasses import dataclass

from jaxpaged.entrypoints.http.openai.conversation import conversation_of
from jaxpaged.entrypoints.http.openai.fields import (
    beam_params,
    check_fields,
    check_refusals,
    sampling_params,
    shape_name,
)
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate_request import GenerateRequest, check_logprobs, prepare
from jaxpaged.serving.prompts import Conversation, message_text
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
ENGINE_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""The engine's name of a field -> what it is called in a chat."""


@dataclass(frozen=True)
class ParsedChat(Parsed[ChatCompletionRequest]):
    """A chat: whose answer it is, and the beginning of the last message, where the client wants it repeated."""

    role: str = "assistant"
    echo: str = ""


def parse(service: Service, body: ChatCompletionRequest, context: RequestContext) -> ParsedChat:
    """Raises ServingError and RequestError for what cannot be."""
    check(body)
    params, beams = params_of(service, body)
    conversation = conversation_of(body, service.options.trust_request_chat_template)
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

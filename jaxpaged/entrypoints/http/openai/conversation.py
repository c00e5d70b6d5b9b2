"""The conversation of a chat request: its messages, tools and template arguments, checked, as chat templates read them.

This module knows no tokens, and nothing of how answers are generated.
"""

from typing import Any

import msgspec

from jaxpaged.entrypoints.http.openai.fields import shape_of
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest, NamedToolChoice, TokenizeRequest
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.prompts import Conversation, checked_tools, template_messages, template_variables, tool_use


def conversation_of(body: ChatCompletionRequest, trust_template: bool) -> Conversation:
    """The request as all APIs have it. Raises ServingError and RequestError."""
    messages, template = template_messages(body.messages), template_arguments(body, trust_template)
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


def template_arguments(body: ChatCompletionRequest | TokenizeRequest, trust_template: bool) -> dict[str, Any]:
    """The arguments of `InputProcessor.chat_prompt` besides the messages. Raises ServingError."""
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if getattr(body, name):
            raise ServingError(f"{name} is given, but the model takes text only. Leave it out.", name)
    if body.chat_template is not None and not trust_template:
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
    }

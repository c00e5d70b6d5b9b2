"""How an answer ended, and what it took, in Anthropic's words. This module knows no blocks and no events."""

from jaxpaged.entrypoints.http.anthropic.protocol import MessagesUsage
from jaxpaged.entrypoints.http.errors import RETRY_AFTER, HttpError
from jaxpaged.entrypoints.http.openai.usage import Usage


def stop_reason(finish_reason: str | None, stopped_by: int | str | None, has_calls: bool, room_left: bool) -> str:
    """`stopped_by`: the stop sequence or token that was met. `room_left`: fewer tokens came than `max_tokens`.

    Raises HttpError 503 when the request was aborted: there is no word for an answer that the server did not end.
    """
    if finish_reason == "length":
        return "model_context_window_exceeded" if room_left else "max_tokens"
    if finish_reason not in ("stop", "tool_calls"):
        raise HttpError(503, "The request was aborted on the server. Send it again.", headers=RETRY_AFTER)
    if isinstance(stopped_by, str):
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def stop_sequence(stopped_by: int | str | None) -> str | None:
    return stopped_by if isinstance(stopped_by, str) else None


def messages_usage(counted: Usage) -> MessagesUsage:
    """Tokens from the prefix cache do not count as input; without details they are not told apart."""
    details = counted.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return MessagesUsage(counted.prompt_tokens - cached, counted.completion_tokens, cache_read_input_tokens=cached)

"""How many tokens a request took: the object `usage`, counted while results come in."""

import msgspec

from jaxpaged.serving.output_reader import UsageCounter


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of the answers that were thinking."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and of all sequences of one HTTP request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None | msgspec.UnsetType = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_of(counter: UsageCounter, in_stream: bool = False, num_thinking: int | None = None) -> Usage:
    """What was counted so far. In streams there are no nulls. `num_thinking` None: thinking is not looked for."""
    details = msgspec.UNSET if in_stream else None
    if (cached := counter.num_cached_tokens) is not None:
        details = PromptTokensDetails(cached)
    prompt_tokens, completion_tokens = counter.num_prompt_tokens, counter.num_completion_tokens
    thinking = msgspec.UNSET
    if num_thinking is not None:
        thinking = CompletionTokensDetails(min(num_thinking, completion_tokens))
    return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details, thinking)

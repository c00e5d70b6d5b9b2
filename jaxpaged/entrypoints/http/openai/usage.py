"""How many tokens a request took: the object `usage`, counted while results come in."""

import msgspec

from jaxpaged.messages import RequestOutput


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


class UsageCounter:
    """Adds up results: prompts once each, and new or final tokens of every sequence."""

    def __init__(self, with_details: bool):
        self._with_details = with_details
        self._prompts: dict[int, tuple[int, int]] = {}  # prompt -> its tokens, and those of them that were cached
        self._completion_tokens = 0

    def add(self, number: int, output: RequestOutput, num_dropped: int = 0) -> None:
        """Count a result of prompt `number`, without `num_dropped` tokens that the client does not get."""
        if number not in self._prompts:
            self._prompts[number] = (len(output.prompt_token_ids), output.num_cached_tokens or 0)
        for each in output.outputs:
            self._completion_tokens += len(each.token_ids)
        self._completion_tokens -= num_dropped

    def read(self, in_stream: bool = False, num_thinking: int | None = None) -> Usage:
        """What was counted so far. In streams there are no nulls. `num_thinking` None: thinking is not looked for."""
        prompt_tokens = sum(count for count, _ in self._prompts.values())
        details = msgspec.UNSET if in_stream else None
        if self._with_details:
            details = PromptTokensDetails(sum(cached for _, cached in self._prompts.values()))
        return Usage(
            prompt_tokens,
            prompt_tokens + self._completion_tokens,
            self._completion_tokens,
            details,
            msgspec.UNSET
            if num_thinking is None
            else CompletionTokensDetails(min(num_thinking, self._completion_tokens)),
        )

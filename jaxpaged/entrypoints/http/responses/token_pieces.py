"""A result cut into its tokens, so that a parser can tell which of them are the answer's text.

This module knows no format.
"""

from jaxpaged.messages import CompletionOutput


def by_token(completion: CompletionOutput) -> list[CompletionOutput]:
    """A result per token, if the texts of the tokens are known and add up to the result's text; else it alone."""
    positions = completion.logprobs or []
    texts = [candidates[token_id].decoded_token or "" for token_id, candidates in zip(completion.token_ids, positions)]
    if len(texts) < 2 or "".join(texts) != completion.text:
        return [completion]
    pieces = [
        CompletionOutput(completion.index, text, [token_id], None, [candidates])
        for text, token_id, candidates in zip(texts, completion.token_ids, positions)
    ]
    pieces[-1].finish_reason, pieces[-1].stop_reason = completion.finish_reason, completion.stop_reason
    return pieces

"""Which requests take long to turn into what the core gets, so that they are worth a thread: others wait meanwhile.

This module knows no engine.
"""

from typing import Any

LONG_PROMPT = 2000
"""Characters, token ids or entries from which on something holds up everybody's stream."""
LONG_FIELDS = ("stop_token_ids", "allowed_token_ids", "extra_args")
"""Of sampling parameters: they are looked through, and as long as the client likes."""


def takes_long(prompt: Any, params: Any) -> bool:
    """Whether a prompt is long, or a list of its parameters, or the words to tokenise that they ban."""
    parts = [*prompt.values()] if isinstance(prompt, dict) else [prompt]
    parts += [getattr(params, name, None) for name in LONG_FIELDS]
    if any(hasattr(part, "__len__") and len(part) > LONG_PROMPT for part in parts):
        return True
    return sum(map(len, getattr(params, "bad_words", None) or ())) > LONG_PROMPT

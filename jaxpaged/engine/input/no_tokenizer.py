"""The stand-in for a tokenizer with `skip_tokenizer_init`: prompts are token ids, and so are outputs.

A request that needs text or a vocabulary is refused with a RequestError. No file of a tokenizer is read.
"""

from typing import NoReturn

from jaxpaged.errors import RequestError


class NoTokenizer:
    """Knows no token; every use of text raises RequestError."""

    def __init__(self):
        self.named_tokens: dict[str, str] = {}
        self.added_tokens: dict[int, str] = {}
        self.special_ids: frozenset[int] = frozenset()
        self.eos_token_id: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse("what was asked for")


def refuse(what: str, parameter: str | None = None) -> NoReturn:
    """Raise RequestError: this engine has no text."""
    raise RequestError(
        f"the engine was started with skip_tokenizer_init, so {what} cannot be: it takes and gives token ids only. "
        "Use prompt_token_ids, or start it without the option.",
        parameter,
    )

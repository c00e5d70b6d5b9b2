"""What requests give as prompts, as token ids: texts, ids, and chats.

Long texts are tokenised in a thread, so that other requests go on meanwhile, and those that can never fit are refused
before that. This module knows no endpoint.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.input_processor import InputProcessor
from jaxpaged.entrypoints.http.errors import HttpError

LONG_TEXT = 2048
"""Characters above which a text is handled in a thread: about a millisecond of work."""
SALT_FORBIDDEN = "@/\\\0"
"""Characters that KV stores use to separate a salt from what follows it."""


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt in tokens. `text` is None when it was given as ids. `cache_salt` keeps its cached blocks to itself."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None

    def for_engine(self) -> dict[str, Any]:
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt": self.text, "prompt_token_ids": self.token_ids, **salt}


@dataclass(frozen=True)
class Truncation:
    """Keep `keep` tokens of a prompt, the last ones or, from the right, the first. -1: as many as fit. None: all."""

    keep: int | None = None
    from_right: bool = False


class PromptReader:
    """Makes prompts of what requests hold. All methods raise RequestError or HttpError when that is at fault."""

    def __init__(self, processor: InputProcessor):
        self._processor = processor
        # A token stands for at most so many characters, so a text of more than that many times the context is too long.
        vocabulary = processor.tokenizer.backend.get_vocab(with_added_tokens=True)
        self._most_characters = processor.max_model_len * max(map(len, vocabulary), default=1)

    async def read(
        self,
        prompts: Sequence[str | list[int]],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
    ) -> list[TokenPrompt]:
        """Texts or token ids."""
        check_salt(cache_salt)

        def read_all() -> list[TokenPrompt]:
            return [self._read(each, truncation, add_special_tokens, cache_salt) for each in prompts]

        return await in_thread_if_long(sum(map(len, prompts)), read_all)

    def _read(
        self, prompt: str | list[int], truncation: Truncation, add_special_tokens: bool, cache_salt: str | None
    ) -> TokenPrompt:
        if isinstance(prompt, list):  # most of which may be cut off: it is not looked at
            ids = self._truncated(prompt, truncation)
            self._check_tokens(len(ids))
            return TokenPrompt(self._processor.parse(ids).token_ids, None, cache_salt)
        if truncation.keep is None:
            self.check_characters("prompt", len(prompt))
        parsed = self._processor.parse(prompt, add_special_tokens)
        return TokenPrompt(self._truncated(parsed.token_ids, truncation), parsed.text, cache_salt)

    async def read_chat(
        self,
        messages: list[dict[str, Any]],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        **template: Any,
    ) -> TokenPrompt:
        """A conversation; `template` are further arguments of `InputProcessor.chat_prompt`.

        Templates write special tokens themselves; `add_special_tokens` adds the tokenizer's own to them.
        """
        length = num_characters(messages)
        if truncation.keep is None:
            self.check_characters("messages", length)
        length += num_characters(template.get("tools") or [])
        prompt = await in_thread_if_long(length, lambda: self._processor.chat_prompt(messages, **template))
        text, token_ids = prompt["prompt"], prompt["prompt_token_ids"]
        if add_special_tokens:
            token_ids = (await in_thread_if_long(length, self._processor.parse, text, True)).token_ids
        check_salt(cache_salt)
        return TokenPrompt(self._truncated(token_ids, truncation), text, cache_salt)

    def check_characters(self, name: str, length: int) -> None:
        """Raise HttpError when a text of this length can never fit, before it is tokenised."""
        if length > self._most_characters:
            raise HttpError(
                400,
                f"{name} has {length} characters, but the context has {self._processor.max_model_len} tokens, which "
                f"hold at most {self._most_characters} characters. Shorten it.",
                name,
            )

    def _check_tokens(self, count: int) -> None:
        """Raise HttpError when so many ids can never fit, before each of them is looked at."""
        if count >= self._processor.max_model_len:
            raise HttpError(
                400,
                f"the prompt has {count} tokens, but prompt and output together may have at most max_model_len = "
                f"{self._processor.max_model_len}. Shorten it.",
                "prompt",
            )

    def _truncated(self, token_ids: list[int], truncation: Truncation) -> list[int]:
        keep = truncation.keep
        if keep is None:
            return token_ids
        if keep < 1 and keep != -1:
            raise HttpError(
                400, f"truncate_prompt_tokens is {keep}; it must be at least 1, or -1 for what the model takes.",
                "truncate_prompt_tokens",
            )  # fmt: skip
        keep = self._processor.max_model_len - 1 if keep == -1 else keep
        return token_ids[:keep] if truncation.from_right else token_ids[-keep:]


async def in_thread_if_long[T](length: int, function: Callable[..., T], *arguments: Any) -> T:
    if length <= LONG_TEXT:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def num_characters(value: Any) -> int:
    """Characters of all texts inside lists and objects, which are not nested deeply."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(num_characters, items))


def check_salt(salt: str | None) -> None:
    if salt and any(character in SALT_FORBIDDEN for character in salt):
        raise HttpError(400, f"cache_salt is {salt!r}; it must not contain @, / or \\. Change it.", "cache_salt")

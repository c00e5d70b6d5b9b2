"""What requests give as prompts, as token ids: texts, ids, and chats.

What is called here can take long: endpoints call it by `body.off_loop`. This module knows no endpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxpaged.engine.input.long_text import Truncation
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.serving.errors import ServingError

NOTHING: Mapping[str, Any] = MappingProxyType({})
SALT_FORBIDDEN = "@/\\\0"
"""Characters that KV stores use to separate a salt from what follows it."""


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt in tokens. `text` is None when it was given as ids. `cache_salt` keeps its cached blocks to itself.
    `ending` is the part of a chat that its template wrote behind the last message, where that matters."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    ending: str | None = None

    def for_engine(self) -> dict[str, Any]:
        others = {"cache_salt": self.cache_salt, "ending": self.ending}
        others = {name: value for name, value in others.items() if value is not None}
        return {"prompt": self.text, "prompt_token_ids": self.token_ids, **others}


class PromptReader:
    """Makes prompts of what requests hold. All methods raise RequestError or ServingError when that is at fault.

    `template_variables` are for chats that bring none of the same name.
    """

    def __init__(self, processor: InputProcessor, template_variables: Mapping[str, Any] = NOTHING):
        self._processor = processor
        self._template_variables = template_variables

    def read(
        self,
        prompts: Sequence[str | list[int]],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        *,
        most: int | None = None,
    ) -> list[TokenPrompt]:
        """Texts or token ids, of at most `most` tokens, as a rule what the model takes."""
        check_salt(cache_salt)
        return [self._read(each, truncation, add_special_tokens, cache_salt, most) for each in prompts]

    def _read(
        self,
        prompt: str | list[int],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        most: int | None,
    ) -> TokenPrompt:
        if isinstance(prompt, list):
            self._check_tokens(len(truncation.cut(prompt, self._processor.max_model_len - 1)))
        parsed = self._processor.parse(prompt, add_special_tokens, truncation, most)
        return TokenPrompt(parsed.token_ids, parsed.text, cache_salt)

    def read_chat(
        self,
        messages: list[dict[str, Any]],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        *,
        most: int | None = None,
        template_variables: Mapping[str, Any] = NOTHING,
        **template: Any,
    ) -> TokenPrompt:
        """A conversation; `template` are further arguments of `InputProcessor.chat_prompt`.

        Templates write special tokens themselves; `add_special_tokens` adds the tokenizer's own to them.
        """
        check_salt(cache_salt)
        prompt = self._processor.chat_prompt(
            messages,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
            most=most,
            template_variables={**self._template_variables, **template_variables},
            **template,
        )
        return TokenPrompt(prompt["prompt_token_ids"], prompt["prompt"], cache_salt, prompt.get("ending"))

    def _check_tokens(self, count: int) -> None:
        """Raise ServingError when so many ids can never fit, before each of them is looked at."""
        if count >= self._processor.max_model_len:
            raise ServingError(
                f"the prompt has {count} tokens, but prompt and output together may have at most max_model_len = "
                f"{self._processor.max_model_len}. Shorten it.",
                "prompt",
            )


def check_salt(salt: str | None) -> None:
    if salt and any(character in SALT_FORBIDDEN for character in salt):
        raise ServingError(f"cache_salt is {salt!r}; it must not contain @, / or \\. Change it.", "cache_salt")

"""What callers may write for one prompt or many: one value for all, one each, text, token ids, dicts, chats.

This module knows no engine.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpaged.engine.input.processor import Prompt
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams


@contextlib.contextmanager
def naming(what: str, index: int, count: int) -> Iterator[None]:
    """Make a RequestError say which of several prompts is at fault."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{what} {index}: {error}", error.parameter) from error


def with_output_kind(params: Any, kind: RequestOutputKind) -> SamplingParams:
    """A copy whose results come in this way. Raises RequestError for what is no SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {params!r}; it must be SamplingParams.", "sampling_params")
    copy = params.clone()
    copy.output_kind = kind
    return copy


def batch_of(prompts: Any) -> list[Prompt]:
    """Prompts as a list, of one when it is text, a dict or token ids. Raises RequestError for what is none of it."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; it must be a prompt or a list of prompts.", "prompts")
    batch = list(prompts)
    is_prompt = batch and not isinstance(batch[0], str | Mapping) and not hasattr(batch[0], "__len__")
    return [prompts] if is_prompt else batch


def is_conversation(messages: Any) -> bool:
    """Whether this is one conversation, not a sequence of them."""
    return len(messages) == 0 or isinstance(messages[0], Mapping | str)


def is_chat(prompt: Any) -> bool:
    """Whether a single prompt is a list of messages, not text, token ids or a dict of them."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    return isinstance(first, Mapping) and "role" in first


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt. Raises RequestError when a sequence has another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts. Give one for all, or one each.", name)
    return list(value)

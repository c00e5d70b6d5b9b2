"""Prompts of one HTTP request through a pooling engine: what it was started for, limits, and all results at once.

This module knows neither what the prompts are nor what the results become.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpaged.engine.input.long_text import checked_length
from jaxpaged.engine.input.processor import NO_POOLING
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.prompts import check_keep, cut_ids, text_ids
from jaxpaged.entrypoints.http.engine_client import Engine
from jaxpaged.entrypoints.http.errors import HttpError, failed_request
from jaxpaged.entrypoints.http.generation import READERS_AT_ONCE
from jaxpaged.entrypoints.http.openai.usage import PromptTokensDetails, Usage
from jaxpaged.entrypoints.http.pooling.protocol import PoolingFields
from jaxpaged.entrypoints.http.prompts import TokenPrompt, check_salt
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.entrypoints.http.trace_context import trace_headers
from jaxpaged.entrypoints.http.traffic import Load
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput

MAX_INPUTS = 2048
"""Prompts of one HTTP request, as OpenAI has it."""


@dataclass(frozen=True)
class PoolingWork:
    """What one HTTP request asks the engine for."""

    request_id: str
    prompts: Sequence[TokenPrompt]
    params: PoolingParams
    priority: int = 0
    unique: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def engine_id(self, number: int) -> str:
        """The engine's id of prompt `number`: no two requests have the same, whatever ids clients choose."""
        return f"{self.request_id}-{number}-{self.unique}"

    def load(self) -> Load:
        ids = [self.engine_id(number) for number in range(len(self.prompts))]
        return Load(self.request_id, ids, len(ids), sum(len(prompt.token_ids) for prompt in self.prompts))


async def pool_all(service: Service, work: PoolingWork) -> list[PoolingRequestOutput]:
    """The result of every prompt, in order. The first failure ends them all.

    Raises HttpError when there is no room or when a prompt fails, and what the engine raises.
    """
    with service.traffic.admitted(work.load()):
        running: list[asyncio.Future[PoolingRequestOutput]] = []
        try:
            for number in range(len(work.prompts)):
                running.append(asyncio.ensure_future(pool_one(service.engine, work, number)))
                if not len(running) % READERS_AT_ONCE:
                    await asyncio.sleep(0)
            return await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def pool_one(engine: Engine, work: PoolingWork, number: int) -> PoolingRequestOutput:
    prompt, engine_id = work.prompts[number].for_engine(), work.engine_id(number)
    result = None
    headers = trace_headers(work.request_id)
    async for output in engine.encode(prompt, work.params, engine_id, priority=work.priority, trace_headers=headers):
        result = output
    if result is None or result.error is not None:
        raise failed_request(None if result is None else result.error)
    return result


def pooler_of(service: Service, convert: str | None = None) -> Pooler:
    """What the engine gives. Raises HttpError 400 when it was started to generate, or not to `convert`."""
    pooler = service.engine.input_processor.pooler
    if pooler is None:
        raise HttpError(400, f"T{NO_POOLING[1:]}", "model")
    if convert not in (None, pooler.convert):
        raise HttpError(400, f"This model was started to {pooler.convert}, not to {convert}. Ask another one.", "model")
    return pooler


def check_fields(wanted: PoolingFields) -> None:
    """Raise HttpError 400 for what cannot be honoured."""
    if wanted.messages is not None:
        raise HttpError(400, "messages is given, but only texts and token ids are pooled. Use input.", "messages")
    if wanted.embed_dtype not in (None, "float32"):
        raise HttpError(400, f"embed_dtype is {wanted.embed_dtype!r}; only float32 is given.", "embed_dtype")
    if wanted.endianness not in (None, "native", "little"):
        raise HttpError(400, f"endianness is {wanted.endianness!r}; vectors are little-endian.", "endianness")
    if wanted.mm_processor_kwargs is not None:
        raise HttpError(400, "mm_processor_kwargs is given, but only text is pooled. Leave it out.",
                        "mm_processor_kwargs")  # fmt: skip


def inputs_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The inputs of a request, each as text or token ids. Raises HttpError 400 for a mixture and for too many."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise HttpError(400, "input is an empty list. Give at least one text.", "input")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise HttpError(400, "input mixes texts, ids and lists of ids. Give a list of one kind.", "input")
    if kinds == {int}:
        return [given]
    check_count("input", len(given))
    return given


def check_count(name: str, count: int) -> None:
    if count > MAX_INPUTS:
        raise HttpError(400, f"{name} has {count} entries; one request may have {MAX_INPUTS}. Send several.", name)


def read_prompts(
    service: Service, given: Sequence[str | list[int] | tuple[str, str]], wanted: PoolingFields, name: str
) -> list[TokenPrompt]:
    """Texts, ids or pairs of texts as token ids, cut as the request says. Takes long for long texts.

    Raises RequestError and HttpError.
    """
    check_salt(wanted.cache_salt)
    processor = service.engine.input_processor
    keep = check_keep(wanted.truncate_prompt_tokens, processor.max_model_len)
    special, from_left = wanted.add_special_tokens is not False, wanted.truncation_side == "left"

    def read(each: str | list[int] | tuple[str, str]) -> TokenPrompt:
        if isinstance(each, list):
            ids = processor.parse(cut_ids(each, keep, from_left)).token_ids
        else:
            texts = each if isinstance(each, tuple) else (each,)
            if not all(texts):
                raise HttpError(400, f"{name} has an empty text. Give it at least one character.", name)
            if keep is None:
                for text in texts:
                    checked_length(processor.tokenizer, text, processor.max_model_len)
            ids = text_ids(processor.tokenizer, texts, keep, special, from_left)
        return TokenPrompt(ids, None, wanted.cache_salt)

    return [read(each) for each in given]


def usage_of(service: Service, outputs: Sequence[PoolingRequestOutput]) -> Usage:
    """Tokens of all prompts; nothing is generated."""
    count = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = PromptTokensDetails(cached) if service.options.enable_prompt_tokens_details else None
    return Usage(count, count, 0, details)

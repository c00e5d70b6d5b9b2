"""What `LLM` does with a model started for pooling: embeddings, labels, scores. Others refuse with a RequestError.

This module knows nothing of how prompts are queued and run.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.engine.input.processor import Prompt, tokenization_options
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.pooling.prompts import check_keep, pair_prompt
from jaxpaged.engine.pooling.scoring import check_scores, joined_score, paired
from jaxpaged.entrypoints.batches import (
    LoRARequests,
    UseTqdm,
    batch_of,
    data_of,
    numbers,
    per_prompt,
    processed,
    with_outputs,
    with_pooling_options,
)
from jaxpaged.errors import RequestError
from jaxpaged.interrupts import held_interrupts
from jaxpaged.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
)


class PoolingCalls:
    """`LLM`, which queues and runs prompts, has the rest."""

    llm_engine: LLMEngine
    _request_ids: Iterator[str]
    _add_all: Callable[..., list[str]]
    _run: Callable[..., list[Any]]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """The numbers of every prompt, as float32 arrays in `outputs.data`, in order.

        `truncate_prompt_tokens` keeps that many of a prompt's first tokens, -1 as many as fit; `tokenization_kwargs`
        are those of `generate`. A request that fails while it is computed has its `error` set. {"data": ...} is for the
        I/O processor, whose answer is in `outputs`. Raises RequestError, and EngineError for a processor that fails.
        """
        of_each = with_pooling_options(pooling_params, pooling_task, truncate_prompt_tokens)
        if (data := data_of(prompts, pooling_task)) is not None:
            options = {"use_tqdm": use_tqdm, "lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
            request_id, encode = next(self._request_ids), functools.partial(self.encode, **options)
            return [processed(self.llm_engine.input_processor, data, of_each, request_id, encode)]
        batch = batch_of(prompts)
        params = per_prompt("pooling_params", of_each, len(batch))
        with held_interrupts():
            request_ids = self._add_all(batch, params, [0] * len(batch), lora_request, tokenization_kwargs)
            return self._run(request_ids, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """An embedding of every prompt, as a list of floats in `outputs.embedding`. Raises what `encode` does."""
        outputs = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [with_outputs(output, EmbeddingOutput(numbers(output))) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """A probability for every label, in `outputs.probs`. Raises what `encode` does."""
        outputs = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [with_outputs(output, ClassificationOutput(numbers(output))) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """How well texts fit, in `outputs.score`: one with many, or one by one.

        An embedding model gives the cosine, a classifier with one label its result for the pair, always with its
        special tokens. Raises RequestError.
        """
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        pairs = paired(first, second, ("data_1", "data_2"))
        processor = self.llm_engine.input_processor
        params = pooling_params or PoolingParams()
        options = tokenization_options(tokenization_kwargs)
        keep = options.pop("truncate_prompt_tokens", truncate_prompt_tokens)
        if keep is not None:
            params = msgspec.structs.replace(params, truncate_prompt_tokens=keep)
        if processor.pooler is not None and processor.pooler.convert == "classify":
            check_scores(processor.pooler)
            if options:
                raise RequestError("add_special_tokens is for single texts, not for pairs.", "tokenization_kwargs")
            keep = check_keep(params.truncate_prompt_tokens, processor.max_model_len)
            pooler, tokenizer = processor.pooler, processor.tokenizer
            prompts = [pair_prompt(tokenizer, pooler, (first[i], second[j]), keep) for i, j in pairs]
            outputs = self.encode(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="score")
            return [with_outputs(each, ScoringOutput((numbers(each) or [float("nan")])[0])) for each in outputs]
        vectors = self.encode(
            [*first, *second],
            params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=options,
        )
        return [joined_score(vectors[i], vectors[len(first) + j]) for i, j in pairs]

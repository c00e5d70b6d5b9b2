"""`LLM`'s methods for pooling, with vLLM's signatures: embed, classify, score, and encode for what the model gives.

    llm = LLM("Qwen/Qwen3-Embedding-0.6B")
    llm.embed("The capital of France is Paris.")[0].outputs.embedding

This module knows neither engines nor how numbers are computed: it asks `LLM` to run prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.config.vllm_options import check_arguments
from jaxpaged.engine.input.processor import Prompt, tokenization_options
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.prompts import check_keep, text_ids
from jaxpaged.engine.pooling.scoring import cosine, paired
from jaxpaged.errors import RequestError
from jaxpaged.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
)


class PoolingMethods:
    """What `LLM` offers for a model started for pooling; one that generates refuses each with a RequestError."""

    llm_engine: Any

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Any = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """The numbers of every prompt, as float32 arrays in `outputs.data`, in order.

        `truncate_prompt_tokens` keeps that many of a prompt's first tokens, -1 as many as fit; `tokenization_kwargs`
        are those of `generate`. A request that fails while it is computed has its `error` set. Raises RequestError as
        `generate` does.
        """
        check_arguments(lora_request=lora_request)
        given = PoolingParams() if pooling_params is None else pooling_params
        of_each = list(given) if isinstance(given, Sequence) else given
        changes: dict[str, Any] = {} if pooling_task is None else {"task": pooling_task}
        if truncate_prompt_tokens is not None:
            changes["truncate_prompt_tokens"] = truncate_prompt_tokens
        if isinstance(of_each, list):
            of_each = [msgspec.structs.replace(each, **changes) for each in of_each]
        else:
            of_each = msgspec.structs.replace(of_each, **changes)
        return self._run_prompts(prompts, of_each, use_tqdm, tokenization_kwargs)

    def _run_prompts(
        self, prompts: Any, params: Any, use_tqdm: Any, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> list[PoolingRequestOutput]:
        """Run prompts with these parameters, one for all or one each."""
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
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
        use_tqdm: Any = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
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
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """How well texts fit, in `outputs.score`: one with many, or one by one.

        An embedding model gives the cosine, a classifier with one label its answer for the pair, always with its
        special tokens. Raises RequestError.
        """
        check_arguments(lora_request=lora_request)
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
            prompts = [
                {"prompt_token_ids": text_ids(processor.tokenizer, (first[i], second[j]), keep)} for i, j in pairs
            ]
            outputs = self.encode(prompts, params, use_tqdm=use_tqdm, pooling_task="score")
            return [with_outputs(each, ScoringOutput((numbers(each) or [float("nan")])[0])) for each in outputs]
        vectors = self.encode(
            [*first, *second], params, use_tqdm=use_tqdm, pooling_task="embed", tokenization_kwargs=options
        )
        return [joined_score(vectors[i], vectors[len(first) + j]) for i, j in pairs]


def check_scores(pooler: Pooler) -> None:
    """Raise RequestError unless a classifier's answer is one number."""
    if pooler.width != 1:
        raise RequestError(
            f"this model has {pooler.width} labels, and a score is one number. Use classify, or a model with one.",
            "model",
        )


def joined_score(first: PoolingRequestOutput, second: PoolingRequestOutput) -> PoolingRequestOutput:
    """The cosine of two embeddings, under the second's id; the prompt is both."""
    error = first.error or second.error
    score = float("nan") if error else cosine(first.outputs.data, second.outputs.data)
    ids = [*first.prompt_token_ids, *second.prompt_token_ids]
    cached = first.num_cached_tokens + second.num_cached_tokens
    return PoolingRequestOutput(second.request_id, ScoringOutput(score), ids, cached, True, error)


def numbers(output: PoolingRequestOutput) -> list[float]:
    """The numbers of a result as floats; none where it failed."""
    return [] if output.outputs.data is None else output.outputs.data.tolist()


def with_outputs(output: PoolingRequestOutput, outputs: Any) -> PoolingRequestOutput:
    return msgspec.structs.replace(output, outputs=outputs)

"""How well two texts fit: which texts are compared, and the score of two embeddings. Knows no engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.errors import RequestError
from jaxpaged.pooling import PoolingRequestOutput, ScoringOutput


def paired(first: Sequence[Any], second: Sequence[Any], names: tuple[str, str]) -> list[tuple[int, int]]:
    """(index in first, index in second) of every pair: one text with each of the others, or one by one.

    Raises RequestError when a list is empty, or when neither has one entry and their lengths differ.
    """
    for texts, name in zip((first, second), names):
        if not texts:
            raise RequestError(f"{name} is empty. Give at least one text.", name)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"{names[0]} has {len(first)} entries and {names[1]} has {len(second)}. Give one and many, or as many of "
            "both.",
            names[1],
        )
    return [(0 if len(first) == 1 else i, i) for i in range(len(second))]


def cosine(a_D: np.ndarray, b_D: np.ndarray) -> float:
    """Cosine of the angle between two vectors, 0 where one of them is zero."""
    a_D, b_D = np.asarray(a_D, np.float32), np.asarray(b_D, np.float32)
    lengths = float(np.linalg.norm(a_D) * np.linalg.norm(b_D))
    return float(a_D @ b_D) / lengths if lengths > 0 else 0.0


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

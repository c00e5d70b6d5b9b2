"""Log probabilities of given tokens behind given prompts: the requests that ask for them, and what these give.

A completion without its last token is a prompt, whose log probabilities begin with the completion; the last token's is
among those of what would be drawn next. So nothing is computed in vain, and a text may fill the context.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.entrypoints.batches import naming
from jaxpaged.errors import EngineError, RequestError, UsageError, shown
from jaxpaged.messages import RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.checks import check_ids_in_vocabulary, checked_ids


class ScoredTokens:
    """Completions of `starts`, which hold token ids. Raises RequestError, UsageError. Empty ones ask for nothing."""

    def __init__(self, engine: LLMEngine, starts: Sequence[Mapping[str, Any]], completions: Sequence[Sequence[int]]):
        mode = engine.model_config.logprobs_mode
        if not mode.endswith("logprobs"):
            raise UsageError(
                f"logprobs_mode is {mode!r}, so this engine gives no log probabilities. Start it with raw_logprobs."
            )
        self.completions = checked_completions(completions, len(starts), engine.input_processor.vocab_size)
        self.asked = [index for index, tokens in enumerate(self.completions) if tokens]
        self.prompts = [scored_prompt(starts[index], self.completions[index]) for index in self.asked]
        self.params = [
            params_of(len(starts[index]["prompt_token_ids"]), self.completions[index]) for index in self.asked
        ]

    def of_asked(self, values: Sequence[Any]) -> list[Any]:
        """Of a value for each completion, those of completions that ask for something."""
        return [values[index] for index in self.asked]

    def read(self, outputs: Sequence[RequestOutput]) -> list[np.ndarray]:
        """What the requests' outputs say of each completion. Raises EngineError."""
        found = [np.zeros(0, np.float32)] * len(self.completions)
        for index, output in zip(self.asked, outputs, strict=True):
            found[index] = logprobs_of(output, self.completions[index], f"completion {index}")
        return found


def checked_completions(completions: Any, count: int, vocab_size: int) -> list[list[int]]:
    """Token ids of so many completions, as lists. Raises RequestError."""
    if not hasattr(completions, "__len__") or isinstance(completions, str | Mapping):
        raise RequestError(
            f"completions is {shown(completions)}; it must be lists of token ids, one for each prompt.", "completions"
        )
    if len(completions) != count:
        raise RequestError(
            f"there are {len(completions)} completions of {count} prompts. Give one each.", "completions"
        )
    found = []
    for index, tokens in enumerate(completions):
        with naming("completion", index, count):
            ids = checked_ids("completions", tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
            check_ids_in_vocabulary("completions", ids, vocab_size)
            found.append(ids)
    return found


def scored_prompt(start: Mapping[str, Any], completion: Sequence[int]) -> dict[str, Any]:
    return {**start, "prompt_token_ids": [*start["prompt_token_ids"], *completion[:-1]]}


def params_of(num_prompt: int, completion: Sequence[int]) -> SamplingParams:
    """Parameters that give the log probabilities of a completion, and draw a token without looking at it.

    At temperature 1 without limits raw and processed ones are the same.
    """
    of_prompt = {"prompt_logprobs": 0, "prompt_logprob_start": num_prompt} if len(completion) > 1 else {}
    return SamplingParams(
        max_tokens=1,
        seed=0,
        logprob_token_ids=[completion[-1]],
        ignore_eos=True,
        detokenize=False,
        **of_prompt,
    )


def logprobs_of(output: RequestOutput, completion: Sequence[int], name: str) -> np.ndarray:
    """Float32, one for each token. Raises EngineError, by the completion's name."""
    if output.error is not None:
        raise EngineError(f"{name}: {output.error}")
    (drawn,) = output.outputs
    assert drawn.logprobs is not None
    lines = (
        [*(output.prompt_logprobs or ())[1 - len(completion) :], *drawn.logprobs]
        if len(completion) > 1
        else drawn.logprobs
    )
    logprobs = np.array([line[token].logprob for line, token in zip(lines, completion, strict=True)], np.float32)
    if np.isnan(logprobs).any():
        raise EngineError(f"{name}: token {int(np.isnan(logprobs).argmax())} has no log probability: it is NaN.")
    return logprobs

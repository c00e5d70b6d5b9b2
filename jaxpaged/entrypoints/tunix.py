"""`TunixSampler`: an `LLM` where Tunix wants a sampler.

    sampler = TunixSampler(LLM(model="Qwen/Qwen3-0.6B", max_model_len=1024))
    sampler.update_params(nnx.state(actor, nnx.Param))
    sampler(["Once upon a time"], max_generation_steps=64, temperature=1.0).tokens

It has the interface of `tunix.generate.base_sampler.BaseSampler`, and counts as one where Tunix is there. Neither Tunix
nor flax is imported.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.entrypoints.llm import LLM
from jaxpaged.errors import RequestError, UsageError
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

BASE = "tunix.generate.base_sampler"


@dataclass
class SamplerOutput:
    """What Tunix's class of this name has. `tokens`: of each prompt's answer, with the token that ended it; `logits`:
    none. `padded_prompt_tokens`: [prompts, tokens], with padding on the left."""

    text: list[str]
    logits: None
    tokens: list[np.ndarray] | np.ndarray
    padded_prompt_tokens: np.ndarray
    logprobs: list[list[float]] | None


class TunixSampler:
    """`mapping`: as which framework's tree weights come, see `LLM.update_weights`. `pad_id`: what fills rows up; None:
    the token that ends texts."""

    def __init__(self, llm: LLM, mapping: str = "tunix", pad_id: int | None = None):
        self.llm, self.mapping = llm, mapping
        self._processor = llm.llm_engine.input_processor
        self.pad_id = pad_id if pad_id is not None else self._processor.eos_token_id or 0
        self._num_updates = 0
        if base := sys.modules.get(BASE):
            base.BaseSampler.register(type(self))

    @property
    def transformer(self) -> None:
        """None: no module of flax computes."""
        return None

    @property
    def transformer_state(self) -> Any:
        """The engine's own parameters."""
        return self.llm.apply_model(lambda params: params)[0]

    def tokenize(self, input_string: str) -> list[int]:
        """The token ids of a prompt, with the special tokens that the tokenizer adds."""
        return self._processor.tokenizer.encode(input_string)

    def update_params(self, updated_weights: Any, filter_types: Sequence[Any] | None = None) -> None:
        """Compute with the weights of a tree; what was cached of prompts is forgotten. Raises CheckpointError for
        leaves that are missing or left over, and UsageError for `filter_types` that are no whole weights."""
        if other := [each for each in filter_types or () if getattr(each, "__name__", "") != "Param"]:
            raise UsageError(
                f"filter_types has {other[0]!r}, but whole weights are taken. Merge the factors of LoRA into them, or "
                "load an adapter with llm.add_lora."
            )
        self._num_updates += 1
        self.llm.update_weights(updated_weights, f"update {self._num_updates}", mapping=self.mapping)

    def load_checkpoint(self, path_or_weights: Any) -> None:
        """`update_params`, of a tree or of the path of orbax's checkpoint."""
        self.update_params(path_or_weights)

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: int | None = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        eos_tokens: Sequence[int] | None = None,
        return_logprobs: bool = True,
        **sampling: Any,
    ) -> SamplerOutput:
        """An answer to each prompt. `echo`: with the prompt before it; `pad_output`: tokens as one array, which padding
        on the right makes as wide as answers may get; `eos_tokens` end answers, in place of the model's own. `sampling`
        are further `SamplingParams`.

        Log probabilities are those of the tokens that were drawn, and none with `beam_size`. Raises RequestError for a
        prompt that is too long, and for several answers to each, or logits, which there are none of.
        """
        if multi_sampling != 1:
            raise RequestError(f"multi_sampling is {multi_sampling}. Repeat the prompts instead.", "multi_sampling")
        if return_logits:
            raise RequestError("return_logits is given, and engines give log probabilities. Leave it out.", "logits")
        texts = [input_strings] if isinstance(input_strings, str) else list(input_strings)
        prompts = [self.tokenize(text) for text in texts]
        if beam_size is not None:
            answers, logprobs = self._searched(prompts, max_generation_steps, beam_size, temperature), None
        else:
            params = SamplingParams(
                max_tokens=max_generation_steps,
                temperature=temperature,
                top_p=1.0 if top_p is None else top_p,
                top_k=top_k or 0,
                seed=seed,
                logprobs=0 if return_logprobs else None,
                **({} if eos_tokens is None else {"stop_token_ids": list(eos_tokens), "ignore_eos": True}),
                **sampling,
            )
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            completions = [completion_of(output) for output in outputs]
            answers = [list(each.token_ids) for each in completions]
            logprobs = [logprobs_of(each) for each in completions] if return_logprobs else None
        left = self._rows(prompts, prompt_width(prompts, max_prompt_length), left=True)
        told = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)] if echo else answers
        tokens: list[np.ndarray] | np.ndarray = [np.array(each, np.int32) for each in told]
        if pad_output:
            tokens = self._rows(told, max_generation_steps + (left.shape[1] if echo else 0))
        return SamplerOutput([self._processor.tokenizer.decode(ids) for ids in told], None, tokens, left, logprobs)

    def _searched(self, prompts: list[list[int]], steps: int, width: int, temperature: float) -> list[list[int]]:
        """The best continuation of each prompt."""
        params = BeamSearchParams(beam_width=width, max_tokens=steps, temperature=temperature)
        outputs = self.llm.beam_search([{"prompt_token_ids": ids} for ids in prompts], params)
        return [list(output.sequences[0].tokens[len(ids) :]) for output, ids in zip(outputs, prompts)]

    def _rows(self, rows: Sequence[Sequence[int]], width: int, left: bool = False) -> np.ndarray:
        """Token ids as one array."""
        found = np.full((len(rows), width), self.pad_id, np.int32)
        for row, ids in zip(found, rows):
            row[width - len(ids) if left else 0 : width if left else len(ids)] = ids
        return found


def prompt_width(prompts: Sequence[Sequence[int]], given: int | None) -> int:
    """As Tunix has it: what is given, or the power of two that the longest prompt fits into."""
    longest = max(map(len, prompts), default=1)
    return given if given is not None and given >= longest else 1 << max(longest - 1, 0).bit_length()


def completion_of(output: RequestOutput) -> CompletionOutput:
    """Raises RequestError for a prompt that failed."""
    if output.error is not None:
        raise RequestError(f"a prompt failed while it was computed: {output.error}", "prompt")
    return output.outputs[0]


def logprobs_of(completion: CompletionOutput) -> list[float]:
    assert completion.logprobs is not None, "they were asked for"
    return [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids)]

"""Beam search in front of the engine: every step asks it for one more token of every beam, all beams in one batch.

The prefix cache makes this bearable: a beam's tokens were computed when it was shorter. This module knows no
engine, only a function that completes a batch of prompts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.messages import Logprob, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

TokensPrompt = Mapping[str, Any]
"""A prompt dict with "prompt_token_ids"; what else it has goes along with every beam."""
Complete = Callable[[list[TokensPrompt], SamplingParams], list[RequestOutput]]
"""Completes prompts; results in the same order."""


@dataclass
class BeamSearchSequence:
    """One candidate. `tokens` and `text` begin with the prompt; `logprobs` are of the generated tokens."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def score(self, length_penalty: float) -> float:
        """Total log probability / length ** penalty; the length counts generated tokens, the ending one included."""
        return self.cum_logprob / max(1, len(self.logprobs)) ** length_penalty

    def extended(self, token_id: int, candidates: dict[int, Logprob]) -> "BeamSearchSequence":
        cum_logprob = self.cum_logprob + candidates[token_id].logprob
        return BeamSearchSequence([*self.tokens, token_id], [*self.logprobs, candidates], cum_logprob)


@dataclass
class BeamSearchOutput:
    """The best sequences of one prompt, best first; or, with no sequences, why its search failed."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass
class Search:
    """The search of one prompt: beams that grow, and sequences that ended."""

    prompt: TokensPrompt
    beams: list[BeamSearchSequence]
    max_tokens: int
    completed: list[BeamSearchSequence] = field(default_factory=list)
    error: str | None = None

    def advance(self, outputs: Sequence[RequestOutput], params: BeamSearchParams, end_ids: Collection[int]) -> None:
        """Replace the beams by their best continuations; those that end are completed."""
        grown: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            if output.error is not None:
                self.error, self.beams = output.error, []
                return
            candidates = output.outputs[0].logprobs[0]
            for token_id in candidates:
                longer = beam.extended(token_id, candidates)
                if token_id in end_ids:
                    longer.finish_reason = "stop"
                    self.completed.append(longer)
                else:
                    grown.append(longer)
        grown.sort(key=lambda beam: beam.score(params.length_penalty), reverse=True)
        self.beams = grown[: params.beam_width]
        if self.beams and len(self.beams[0].logprobs) >= self.max_tokens:
            self._complete_all()

    def _complete_all(self) -> None:
        for beam in self.beams:
            beam.finish_reason = "length"
        self.completed += self.beams
        self.beams = []

    def best(self, params: BeamSearchParams) -> list[BeamSearchSequence]:
        ranked = sorted(self.completed, key=lambda beam: beam.score(params.length_penalty), reverse=True)
        return ranked[: params.beam_width]


def beam_search(
    complete: Complete,
    prompts: Sequence[TokensPrompt],
    params: BeamSearchParams,
    *,
    max_model_len: int,
    eos_token_ids: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> list[BeamSearchOutput]:
    """Search for every prompt, all at a time. There is no early stopping: beams grow to `max_tokens`.

    `prompts` are shorter than `max_model_len`. `decode` turns ids to text.
    """
    searches = [start_search(prompt, params.max_tokens, max_model_len) for prompt in prompts]
    end_ids = () if params.ignore_eos else frozenset(eos_token_ids)
    one_token = SamplingParams(
        max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature, ignore_eos=True
    )
    while active := [search for search in searches if search.beams]:
        beams = [
            {**search.prompt, "prompt_token_ids": beam.tokens} for search in active for beam in search.beams
        ]
        outputs = iter(complete(beams, one_token))
        for search in active:
            search.advance([next(outputs) for _ in search.beams], params, end_ids)
    return [finished(search, params, decode) for search in searches]


def start_search(prompt: TokensPrompt, max_tokens: int, max_model_len: int) -> Search:
    token_ids = prompt["prompt_token_ids"]
    return Search(prompt, [BeamSearchSequence(token_ids, [])], min(max_tokens, max_model_len - len(token_ids)))


def finished(
    search: Search, params: BeamSearchParams, decode: Callable[[Sequence[int]], str]
) -> BeamSearchOutput:
    """The result of a search that has no beams left. The ending token has no text unless it is asked for."""
    if search.error is not None:
        return BeamSearchOutput([], search.error)
    sequences = search.best(params)
    for sequence in sequences:
        hide_end = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
        sequence.text = decode(sequence.tokens[:-1] if hide_end else sequence.tokens)
    return BeamSearchOutput(sequences)

"""Beam search in front of the engine: every step asks it for one more token of every beam, all beams in one batch.

The prefix cache makes this bearable: a beam's tokens were computed when it was shorter. `BeamSearch` says what is to be
computed and takes the results, so it serves whoever waits for an engine, in whatever way; `search` waits for one in an
event loop. There a request is under way as one, however many steps it takes.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.detokenizer import make_detokenizer
from jaxpaged.errors import RequestError
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxpaged.serving.admission import Traffic
from jaxpaged.serving.engine_client import Engine
from jaxpaged.serving.errors import client_names
from jaxpaged.serving.generate import EngineRequest, last_results
from jaxpaged.serving.prompts import TokenPrompt

BeamStep = list[tuple[int, list[int]]]
"""What a step asks for: one more token for each (number of a prompt, token ids of one of its beams)."""


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
class PromptSearch:
    """The search of one prompt: beams that grow, and sequences that ended."""

    beams: list[BeamSearchSequence]
    max_tokens: int
    completed: list[BeamSearchSequence] = field(default_factory=list)
    error: str | None = None

    def advance(self, outputs: Sequence[RequestOutput], params: BeamSearchParams, end_ids: Collection[int]) -> None:
        """Replace the beams by their best continuations; those that end are completed."""
        if (error := next((output.error for output in outputs if output.error is not None), None)) is not None:
            self.error, self.beams = error, []
            return
        if any(output.outputs[0].finish_reason == "abort" for output in outputs):
            self._complete_all("abort")
            return
        grown: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            candidates = output.outputs[0].logprobs[0]
            for token_id in likeliest(candidates, num_candidates(params)):
                longer = beam.extended(token_id, candidates)
                if token_id in end_ids:
                    longer.finish_reason = "stop"
                    self.completed.append(longer)
                else:
                    grown.append(longer)
        grown.sort(key=lambda beam: beam.score(params.length_penalty), reverse=True)
        self.beams = grown[: params.beam_width]
        if self.beams and len(self.beams[0].logprobs) >= self.max_tokens:
            self._complete_all("length")

    def _complete_all(self, reason: str) -> None:
        for beam in self.beams:
            beam.finish_reason = reason
        self.completed += self.beams
        self.beams = []

    def result(self, params: BeamSearchParams) -> BeamSearchOutput:
        """The best sequences that were found, or why there are none."""
        if self.error is not None:
            return BeamSearchOutput([], self.error)
        ranked = sorted(self.completed, key=lambda beam: beam.score(params.length_penalty), reverse=True)
        return BeamSearchOutput(ranked[: params.beam_width])


class BeamSearch:
    """Searches of several prompts, given as token ids shorter than `max_model_len`, all at a time.

        while step := search.next_step():
            search.advance(<results of the step, each beam completed with the parameters of `one_token`>)
        search.results()

    There is no early stopping: beams grow to `max_tokens`.
    """

    def __init__(
        self, prompts: Sequence[list[int]], params: BeamSearchParams, max_model_len: int, eos_token_ids: Collection[int]
    ):
        self._params = params
        self._end_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._searches = [
            PromptSearch([BeamSearchSequence(ids, [])], min(params.max_tokens, max_model_len - len(ids)))
            for ids in prompts
        ]

    def next_step(self) -> BeamStep:
        """What the engine is to compute; nothing when the search is done."""
        return [(number, beam.tokens) for number, search in enumerate(self._searches) for beam in search.beams]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the results of the step, in its order."""
        rest = iter(outputs)
        for search in self._searches:
            if search.beams:
                search.advance([next(rest) for _ in search.beams], self._params, self._end_ids)

    def results(self) -> list[BeamSearchOutput]:
        """An output per prompt, whose sequences have no text yet."""
        return [search.result(self._params) for search in self._searches]


def one_token(params: BeamSearchParams, num_logprobs: int = 0) -> SamplingParams:
    """What the engine is asked for every beam: one token, and at least `num_logprobs` candidates of it, -1 for all."""
    return SamplingParams(
        max_tokens=1,
        logprobs=-1 if num_logprobs == -1 else max(num_candidates(params), num_logprobs),
        temperature=params.temperature,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def num_candidates(params: BeamSearchParams) -> int:
    """Tokens that are looked at after every beam: `beam_width` are left even if as many of them end the sequence."""
    return 2 * params.beam_width


def likeliest(candidates: dict[int, Logprob], count: int) -> list[int]:
    """Without the token that was drawn, where that is not one of the likeliest: draws are not searched."""
    return [token_id for token_id, candidate in candidates.items() if candidate.rank <= count]


def check_beam_width(params: BeamSearchParams, max_logprobs: int) -> None:
    """Raise RequestError for more candidates than the engine gives."""
    if num_candidates(params) > max_logprobs:
        width = params.beam_width
        raise RequestError(
            f"beam_width is {width}, which needs 2 x {width} log probabilities per token, but this engine gives at "
            f"most {max_logprobs}. Use a smaller width, or start the engine with a larger max_logprobs.",
            "beam_width",
        )


def add_texts(outputs: Sequence[BeamSearchOutput], tokenizer: Tokenizer, params: BeamSearchParams) -> None:
    """Write each sequence's text. The ending token has none unless it is asked for."""
    for sequence in (sequence for output in outputs for sequence in output.sequences):
        hide_end = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
        sequence.text = tokenizer.decode(sequence.tokens[:-1] if hide_end else sequence.tokens)


async def search(engine: Engine, traffic: Traffic, request: EngineRequest) -> list[RequestOutput]:
    """The best that was found for every prompt, in order. Raises what `collect` does, and RequestError for more beams
    than the engine has candidates for."""
    processor, beams = engine.input_processor, request.beams
    prompts = [prompt.token_ids for prompt in request.prompts]
    searching = BeamSearch(prompts, beams, processor.max_model_len, processor.eos_token_ids)
    params = one_token(beams, request.params.logprobs or 0)
    core = request.data_parallel_rank  # all steps go to one core, whose cache has what the step before computed
    if core is None:
        core = engine.suitable_core(prompts[0], request.prompts[0].cache_salt, request.lora)
    of_step = dataclasses.replace(request, params=params, beams=None, data_parallel_rank=core)
    num_cached: list[int | None] = []
    with client_names({**request.names, "beam_width": "n"}), traffic.admitted(request.load(processor.max_model_len)):
        check_beam_width(beams, processor.max_logprobs)
        while step := searching.next_step():
            grown = [
                dataclasses.replace(request.prompts[number], token_ids=tokens, text=None, ending=None)
                for number, tokens in step
            ]
            outputs = await last_results(engine, dataclasses.replace(of_step, prompts=grown))
            num_cached = num_cached or [output.num_cached_tokens for output in outputs]
            searching.advance(outputs)
    tokenizer = processor.tokenizer
    return [
        RequestOutput(
            request.request_id,
            prompt.text,
            prompt.token_ids,
            None,
            [completion(i, each, prompt, request.params, tokenizer) for i, each in enumerate(found.sequences)],
            finished=True,
            num_cached_tokens=cached,
        )
        for prompt, found, cached in zip(request.prompts, searching.results(), num_cached, strict=True)
    ]


def completion(
    index: int, beam: BeamSearchSequence, prompt: TokenPrompt, params: SamplingParams, tokenizer: Tokenizer
) -> CompletionOutput:
    """A sequence that was found, without its prompt, as the engine would give it."""
    token_ids = beam.tokens[len(prompt.token_ids) :]
    detokenizer = make_detokenizer(tokenizer, prompt.token_ids, params)
    detokenizer.push(token_ids, ended_by_token=beam.finish_reason == "stop")
    detokenizer.finish()
    logprobs = None
    if params.logprobs is not None:
        logprobs = [shown(*each, params.logprobs) for each in zip(token_ids, beam.logprobs, strict=True)]
    return CompletionOutput(index, detokenizer.text, token_ids, beam.cum_logprob, logprobs, beam.finish_reason)


def shown(token_id: int, candidates: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """The token that was chosen, and the `count` likeliest; -1: all."""
    ranked = {i: each for i, each in candidates.items() if count == -1 or each.rank <= count}
    return {token_id: candidates[token_id], **ranked}

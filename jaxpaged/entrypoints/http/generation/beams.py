"""Beam search for one HTTP request: every step is a batch of one-token requests, and what is found becomes results.

The request is under way as one, however many steps it takes. This module knows no endpoint.
"""

import dataclasses

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.detokenizer import make_detokenizer
from jaxpaged.entrypoints.beam_search import BeamSearch, BeamSearchSequence, check_beam_width, one_token
from jaxpaged.entrypoints.http.engine_client import Engine
from jaxpaged.entrypoints.http.generation.chosen_core import CHOSEN
from jaxpaged.entrypoints.http.generation.generate import GenerationRequest, last_results
from jaxpaged.entrypoints.http.generation.prompts import TokenPrompt
from jaxpaged.entrypoints.http.generation.traffic import Traffic
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving.errors import client_names


async def search(engine: Engine, traffic: Traffic, request: GenerationRequest) -> list[RequestOutput]:
    """The best that was found for every prompt, in order. Raises what `collect` does, and RequestError for more beams
    than the engine has candidates for."""
    processor, beams = engine.input_processor, request.beams
    prompts = [prompt.token_ids for prompt in request.prompts]
    searching = BeamSearch(prompts, beams, processor.max_model_len, processor.eos_token_ids)
    params = one_token(beams, request.params.logprobs or 0)
    if CHOSEN.get() is None:  # all steps go to one core, whose cache has what the step before computed
        CHOSEN.set(engine.suitable_core(prompts[0], request.prompts[0].cache_salt))
    num_cached: list[int | None] = []
    with client_names({**request.names, "beam_width": "n"}), traffic.admitted(request.load(processor.max_model_len)):
        check_beam_width(beams, processor.max_logprobs)
        while step := searching.next_step():
            grown = [TokenPrompt(tokens, None, request.prompts[number].cache_salt) for number, tokens in step]
            outputs = await last_results(engine, dataclasses.replace(request, prompts=grown, params=params, beams=None))
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

"""A request to generate, in no protocol's words, and its preparation for the engine.

Protocols parse into `GenerateRequest`, whose fields have the names of `SamplingParams` and of this module; `names` says
what the protocol calls those that it calls otherwise, and so do errors. `prepare` makes token ids of the prompts and
finds out how results are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxpaged.engine.early_leases import lease_kept_meanwhile
from jaxpaged.engine.input.long_text import Truncation
from jaxpaged.kv_store.transfer_params import PARAMS
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import EngineRequest
from jaxpaged.serving.output_reader import OutputReader, Reading
from jaxpaged.serving.prompts import Conversation, read_conversation
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

MAX_STOP_STRINGS = 4


@dataclass(frozen=True)
class TextPrompts:
    """Texts or token ids to continue. `structured_outputs`: what the outputs must look like."""

    prompts: Sequence[str | list[int]]
    truncation: Truncation = field(default_factory=Truncation)
    add_special_tokens: bool = True
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsParams | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a client asks the model to generate.

    `params` are the client's over the model's defaults; with `beams` nothing is drawn. `names`: what this module and
    the engine call a field -> what the request calls it. `repeats_prompt`: the response has the prompt too.
    """

    prompt: TextPrompts | Conversation
    params: SamplingParams
    beams: BeamSearchParams | None = None
    priority: int = 0
    names: Mapping[str, str] = MappingProxyType({})
    repeats_prompt: bool = False


@dataclass(frozen=True)
class PreparedRequest:
    """What the engine is to do, and how its results are read."""

    generation: EngineRequest
    reading: Reading = Reading()

    def new_reader(self) -> OutputReader:
        """What reads one of the sequences."""
        return OutputReader(self.reading, self.generation.prompts[0].ending)


def prepare(service: Service, request: GenerateRequest, context: RequestContext) -> PreparedRequest:
    """Takes long for long prompts. Raises ServingError and RequestError for what cannot be."""
    prompt, params, reading = request.prompt, request.params, Reading()
    num_prompts = len(prompt.prompts) if isinstance(prompt, TextPrompts) else 1
    service.traffic.check_num_sequences(num_prompts, params.n if request.beams is None else request.beams.beam_width)
    with client_names(request.names):
        if isinstance(prompt, Conversation):
            only, params, reading = read_conversation(prompt, params, service.formats, service.prompts)
            prompts = [only]
        else:
            params.structured_outputs = prompt.structured_outputs
            prompts = service.prompts.read(
                prompt.prompts, prompt.truncation, prompt.add_special_tokens, prompt.cache_salt
            )
    generation = EngineRequest(
        context.request_id,
        prompts,
        params,
        request.priority,
        request.names,
        request.beams,
        request.repeats_prompt,
        context.data_parallel_rank,
        context.trace,
    )
    return PreparedRequest(generation, reading)


async def check_shape(service: Service, generation: EngineRequest, context: RequestContext) -> None:
    """Raise RequestError for a shape that cannot be; it is looked at in the turns of who asks."""
    if generation.shape is None:
        return
    engine = service.engine
    checker = engine.input_processor.grammar_checker
    kept = lease_kept_meanwhile(engine.call, checker, generation.params, gives_back=False)
    with client_names(generation.names):
        async with kept:
            await service.grammars.check(generation.shape, context)


def sampling_params(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    streams: bool,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """The request's own parameters over the model's `defaults`. Without a limit it goes on to the end of the context.

    Raises RequestError for values that cannot be.
    """
    values = {"max_tokens": None, **defaults, "logprobs": None, **given}
    if kv_transfer_params:
        values["extra_args"] = {**(values.get("extra_args") or {}), PARAMS: kv_transfer_params}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, output_kind=kind)


def check_stop(name: str, stop: str | Sequence[str] | None) -> None:
    if stop is not None and not isinstance(stop, str) and len(stop) > MAX_STOP_STRINGS:
        raise ServingError(f"{name} has {len(stop)} texts; at most {MAX_STOP_STRINGS} are looked for.", name)


def check_logprobs(name: str, logprobs: int | None) -> None:
    if logprobs is not None and logprobs < -1:
        raise ServingError(f"{name} is {logprobs}; it must be at least -1, which means all.", name)

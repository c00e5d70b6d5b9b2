"""Beam search as completions and chats ask for it: `use_beam_search` with `n` beams, and `length_penalty`.

This module knows no endpoint, and nothing of how beams are searched.
"""

import msgspec

from jaxpaged.entrypoints.http.errors import HttpError, client_names
from jaxpaged.entrypoints.http.openai.fields import KEPT_WITH_BEAMS, SAMPLING, GenerationFields
from jaxpaged.entrypoints.http.sampling_fields import given
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

NEUTRAL = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
REFUSED = (
    "stream", "structured_outputs", "vllm_xargs",
    *(name for name in SAMPLING if name not in (*KEPT_WITH_BEAMS, "n", "temperature", "seed")),
)  # fmt: skip
"""Fields that have no meaning where nothing is drawn, unless they have their neutral values."""


def check_beams(request: GenerationFields) -> None:
    """Raise HttpError 400 for what has no meaning for beams, since nothing is drawn, or none without them."""
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1.0):
            raise HttpError(
                400, f"length_penalty is {request.length_penalty}, but use_beam_search is not true. Set it.",
                "length_penalty",
            )  # fmt: skip
        return
    for name in REFUSED:
        value = getattr(request, name)
        if value not in (None, False, [], {}, NEUTRAL.get(name)) and (name, value) != ("top_k", -1):
            raise HttpError(400, f"{name} is {value!r}, which beam search cannot honour. Leave it out.", name)
    if request.response_format is not None and request.response_format.type != "text":
        raise HttpError(
            400, "response_format is given, but beam search has no grammars. Leave one of them out.", "response_format"
        )


def beam_params(request: GenerationFields, max_tokens: int) -> BeamSearchParams | None:
    """The search that the request asks for: `n` beams, all of which are given. Raises RequestError."""
    if not request.use_beam_search:
        return None
    names = ("temperature", "length_penalty", "ignore_eos", "include_stop_str_in_output")
    width = 1 if request.n is None else request.n
    with client_names({"beam_width": "n"}):
        return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **given(request, names))

"""Fields that completions and chats have in common, with those of all generating endpoints, and their checks.

Types are checked when a body is decoded, which refuses unknown fields; ranges are checked by `SamplingParams`. A field
that cannot be honoured is refused here. `use_beam_search` with `n` beams asks for a search, of which this module knows
only the parameters. `guided_json`, `guided_choice` and the others are what older clients of vLLM call the parts of
`structured_outputs`. This module knows no endpoint.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.sampling_params import FILLED_IN, BeamSearchParams, SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving import generate
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import check_stop
from jaxpaged.serving.requests import check_depth

ENCODER_REFUSALS = {"ec_transfer_params": "Encoder outputs are found by their pictures"}


Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")


OTHERWISE = {
    *("n", "max_tokens", "logprobs", "prompt_logprobs", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
    *("structured_outputs", "extra_args", "detokenize", "output_kind", "skip_reading_prefix_cache", *FILLED_IN),
}
"""Sampling parameters that not every endpoint has under this name, or that no request sets."""
TYPES = {"seed": Seed, "logit_bias": dict[str, float]}
"""Types in JSON that differ from those of `SamplingParams`."""
SamplingFields = msgspec.defstruct(
    "SamplingFields",
    [
        (field.name, TYPES.get(field.name, field.type) | None, None)
        for field in msgspec.structs.fields(SamplingParams)
        if field.name not in OTHERWISE
    ],
    kw_only=True,
    forbid_unknown_fields=True,
    module=__name__,
)
"""Sampling parameters under their own names. None means the default."""


class EngineFields(SamplingFields, kw_only=True):
    """With them, what else every request may say.

    The last ones ask for nothing that changes a response: who the user is, and hints for caches and accounts.
    """

    model: str | None = None
    stream: bool | None = False
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    priority: int | None = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: Any = None
    service_tier: str | None = None
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None


def given(body: SamplingFields, names: Iterable[str] = SamplingFields.__struct_fields__) -> dict[str, Any]:
    """Those of the fields that the request has."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def check_refusals(
    body: msgspec.Struct, refusals: Mapping[str, str], nothing: Collection[Any] = (None, False, "", [], {})
) -> None:
    """Raise ServingError for a field that is never honoured: field -> why. `nothing`: values that ask for nothing."""
    for name, why in refusals.items():
        if getattr(body, name) not in nothing:
            raise ServingError(f"{name} is given. {why}, so leave it out.", name)


def check_given(body: msgspec.Struct, name: str) -> None:
    """Raise ServingError where the field is missing. It is looked for after what is refused, which clients may have
    given in its place."""
    if getattr(body, name) is None:
        raise ServingError(f"{name} is missing. Add it.", name)


def check_service_tier(tier: str | None) -> None:
    """Raise ServingError for a tier that OpenAI does not have. All of its own are served alike."""
    if tier not in (None, *SERVICE_TIERS):
        raise ServingError(f"service_tier is {tier!r}; it must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")


SHAPES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""Field -> the part of `structured_outputs` that it is."""
BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
"""Libraries that vLLM chooses from. Here is one, which compiles what all of them do."""
BACKEND_OPTIONS = {
    "no-fallback": None,
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}
"""What may stand behind a library's name -> the part of `structured_outputs` that it is, if any."""


class GuidedFields(EngineFields, kw_only=True):
    """The fields. At most one of the first six is given."""

    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None


def guided_name(body: GuidedFields) -> str | None:
    """The field that gives a shape, if one does. Raises ServingError for several."""
    given = [name for name in SHAPES if getattr(body, name) not in (None, False)]
    if len(given) > 1:
        raise ServingError(f"{' and '.join(given)} are given. Give one of them.", given[1])
    return given[0] if given else None


def guided_shape(body: GuidedFields) -> StructuredOutputsParams | None:
    """What the response must look like. Raises ServingError or RequestError naming the field."""
    name = guided_name(body)
    options = backend_options(body.guided_decoding_backend)
    if name is None:
        return None
    with client_names({"structured_outputs": name}):
        return StructuredOutputsParams(
            **{SHAPES[name]: getattr(body, name)}, **options, whitespace_pattern=body.guided_whitespace_pattern
        )


def backend_options(backend: str | None) -> dict[str, bool]:
    """What a backend such as `xgrammar:disable-any-whitespace` asks for besides a library. Raises ServingError."""
    name, _, options = (backend or "auto").partition(":")
    wanted = [option.strip() for option in options.split(",") if option]
    if name not in BACKENDS or not set(wanted) <= set(BACKEND_OPTIONS):
        field = "guided_decoding_backend"
        raise ServingError(
            f"{field} is {backend!r}; it must be one of {', '.join(BACKENDS)}, and may be followed by ':' and "
            f"{', '.join(BACKEND_OPTIONS)}. Leave it out.",
            field,
        )
    return {part: True for option in wanted if (part := BACKEND_OPTIONS[option])}


SHAPE_NAMES = {"structured_outputs": "response_format"}
TAG_FIELDS = ("type", "format", "structures", "triggers")
SAMPLING = (
    *SamplingFields.__struct_fields__,
    *("n", "prompt_logprobs", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
)
"""Fields that are sampling parameters under the same name."""

KEPT_WITH_BEAMS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Those that beam search has a use for, besides `n`, `temperature` and `seed`."""
NEUTRAL = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
REFUSED_WITH_BEAMS = (
    "stream",
    "structured_outputs",
    "vllm_xargs",
    "kv_transfer_params",
    *SHAPES,
    *(name for name in SAMPLING if name not in (*KEPT_WITH_BEAMS, "n", "temperature", "seed")),
)
"""Fields that have no meaning where nothing is drawn, unless they have their neutral values."""

REFUSALS = {
    "repetition_detection": "Repetition is not looked for",
    "watermarking": "Watermarks are not made",
    **ENCODER_REFUSALS,
    "prompt_embeds": "Prompts are taken as text or token ids",
    "store": "Only /v1/responses keeps its answers",
}
"""Field -> why no value of it is served."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells besides its tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the output must look like: "text", "json_object", "json_schema" with {"name": ..., "schema": ...}, or
    "structural_tag" with a format, or as it was before with structures and triggers."""

    type: str
    json_schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class GenerationFields(GuidedFields, kw_only=True):
    """What completions and chats have in common. None means the default."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = False
    request_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream_interval: int | None = None
    response_format: ResponseFormat | None = None
    repetition_detection: Any = None
    watermarking: Any = None
    prompt_embeds: Any = None
    store: Any = None

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.truncate_prompt_tokens, self.truncation_side == "right")


class UsageOptions(msgspec.Struct):
    """Whether a stream ends with its usage, and whether every chunk has it."""

    at_end: bool
    in_every_chunk: bool


def check_fields(body: GenerationFields) -> None:
    """Raise ServingError for fields that cannot be honoured, or contradict each other."""
    check_refusals(body, REFUSALS, nothing=(None, False, -1))
    check_service_tier(body.service_tier)
    if body.stream_options is not None and not body.stream:
        raise ServingError("stream_options is given, but stream is not true. Leave it out.", "stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise ServingError(
            "stream_options.include_obfuscation is true, but events are not padded. Leave it out.", "stream_options"
        )
    if body.stream and body.prompt_logprobs:
        raise ServingError(
            f"prompt_logprobs is {body.prompt_logprobs}, but a stream has none. Set stream to false.", "prompt_logprobs"
        )
    check_stop("stop", body.stop)
    check_beams(body)


def check_beams(body: GenerationFields) -> None:
    """Raise ServingError for what has no meaning for beams, since nothing is drawn, or none without them."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise ServingError(
                f"length_penalty is {body.length_penalty}, but use_beam_search is not true. Set it.", "length_penalty"
            )
        return
    for name in REFUSED_WITH_BEAMS:
        value = getattr(body, name)
        if value not in (None, False, [], {}, NEUTRAL.get(name)) and (name, value) != ("top_k", -1):
            raise ServingError(f"{name} is {value!r}, which beam search cannot honour. Leave it out.", name)
    if body.response_format is not None and body.response_format.type != "text":
        raise ServingError(
            "response_format is given, but beam search has no grammars. Leave one of them out.", "response_format"
        )


def shape_of(body: GenerationFields) -> StructuredOutputsParams | None:
    """What the response must look like. Raises ServingError or RequestError naming the field."""
    wanted, given = body.response_format, body.structured_outputs
    if (guided := guided_shape(body)) is not None:
        if given is not None or (wanted is not None and wanted.type != "text"):
            name, other = guided_name(body), "response_format" if given is None else "structured_outputs"
            raise ServingError(f"{name} and {other} are given. Give one of them.", name)
        return guided
    if wanted is None or wanted.type == "text":
        return None if given is None else StructuredOutputsParams.from_dict(given)
    if given is not None:
        raise ServingError(
            f"structured_outputs is given, and response_format.type is {wanted.type!r}. Give one of them.",
            "structured_outputs",
        )
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.type == "json_schema":
        with client_names(SHAPE_NAMES):
            return StructuredOutputsParams(json=schema_of(wanted))
    if wanted.type == "structural_tag":
        tag = {name: value for name in TAG_FIELDS if (value := getattr(wanted, name)) is not None}
        with client_names(SHAPE_NAMES):
            return StructuredOutputsParams(structural_tag=tag)
    raise ServingError(
        f"response_format.type is {wanted.type!r}; it must be one of text, json_object, json_schema, structural_tag.",
        "response_format.type",
    )


def schema_of(wanted: ResponseFormat) -> dict[str, Any]:
    path = "response_format.json_schema"
    schema = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise ServingError(f"{path}.schema is missing, or no object. Give a JSON schema.", path)
    check_depth(path, schema)
    return schema


def shape_name(body: GenerationFields) -> dict[str, str]:
    """The engine's name of the response's shape -> what this request calls it."""
    if (name := guided_name(body)) is not None:
        return {"structured_outputs": name}
    return {} if body.response_format is None else SHAPE_NAMES


def sampling_params(
    body: GenerationFields, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The request's own parameters over the model's `defaults`. `max_tokens` None fills the context.

    With beams nothing is drawn, and only what concerns the text is left of both. Raises RequestError for values that
    cannot be.
    """
    values = given(body, KEPT_WITH_BEAMS if body.use_beam_search else SAMPLING)
    extra = {} if body.vllm_xargs is None else {"extra_args": body.vllm_xargs}
    with client_names({"extra_args": "vllm_xargs"}):
        return generate.sampling_params(
            {**values, "max_tokens": max_tokens, "logprobs": logprobs, **extra},
            {} if body.use_beam_search else defaults,
            streams=bool(body.stream),
            kv_transfer_params=body.kv_transfer_params,
        )


def beam_params(body: GenerationFields, max_tokens: int) -> BeamSearchParams | None:
    """The search that the request asks for: `n` beams, all of which are given. Raises RequestError."""
    if not body.use_beam_search:
        return None
    names = ("temperature", "length_penalty", "ignore_eos", "include_stop_str_in_output")
    width = 1 if body.n is None else body.n
    with client_names({"beam_width": "n"}):
        return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **given(body, names))


def usage_options(body: GenerationFields, force: bool) -> UsageOptions:
    """What the request says, or the server's `enable_force_include_usage`. Continuous usage needs one at the end."""
    options = body.stream_options or StreamOptions()
    at_end = force or bool(options.include_usage)
    return UsageOptions(at_end, force or (at_end and bool(options.continuous_usage_stats)))

"""`guided_json`, `guided_choice` and the others: what older clients of vLLM call the parts of `structured_outputs`."""

from typing import Any

from jaxpaged.entrypoints.http.generation.sampling_fields import EngineFields
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.errors import ServingError, client_names

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
    """What the answer must look like. Raises ServingError or RequestError naming the field."""
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

"""Fields of a body that its endpoint does not know: those that ask for nothing pass, others are refused by name.

This module knows msgspec's structs and messages, and no endpoint.
"""

import re
from typing import Any

import msgspec

from jaxpaged.errors import did_you_mean

MESSAGE = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing, and so does 0."""
ADAPTER = "Adapters are not served: merge it into the model"
SHAPE = "What an answer must look like says structured_outputs or response_format"
ADVICE = {
    "lora_request": ADAPTER,
    "lora_path": ADAPTER,
    "adapter_id": ADAPTER,
    "guided_decoding_backend": "Grammars have one library here",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), SHAPE),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "choice"), SHAPE),
    "prompt": "/v1/completions takes prompts",
    "messages": "/v1/chat/completions and /v1/messages take messages",
    "input": "/v1/responses and /v1/embeddings take inputs",
    "max_new_tokens": "The limit of an answer is max_tokens",
    "num_beams": "Beams are asked for by use_beam_search and n",
    "logits_processors": "No code of a request is run",
}
"""What clients of other servers send -> what to do instead."""


def known_part(body: bytes | bytearray, kind: type[msgspec.Struct]) -> bytes:
    """The body without those of its unknown fields that ask for nothing. The body is an object."""
    values: dict[str, Any] = msgspec.json.decode(body)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return msgspec.json.encode({name: value for name, value in values.items() if name in known or value not in NOTHING})


def unknown_name(message: str) -> str | None:
    """The field of which msgspec's message says that it is not known."""
    match = MESSAGE.match(message)
    return None if match is None else match["name"]


def refusal(name: str, path: str, kind: type[msgspec.Struct]) -> str:
    """What a client is told. `path`: where the field is, empty for the body itself."""
    if path:
        return f"{path} has no field {name!r}. Leave it out."
    near = f" {ADVICE[name]}." if name in ADVICE else did_you_mean(name, kind.__struct_fields__)
    return f"{name} is given, but this endpoint has no such field.{near or ' Leave it out.'}"

"""Fields that mean the same in completions, chats and responses, and checks that all of OpenAI's endpoints make.

Types are checked when a body is decoded; ranges by `SamplingParams`. This module knows no endpoint.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from jaxpaged.serving.errors import ServingError

MAX_STOP_STRINGS = 4
ENCODER_REFUSALS = {"ec_transfer_params": "This server has no encoder connector"}


Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters under their own names. None means the default."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None


class EngineFields(SamplingFields, kw_only=True):
    """With them, what else every request may say.

    The last ones ask for nothing that changes an answer: who the user is, and hints for caches and accounts.
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


def check_stop(name: str, stop: str | list[str] | None) -> None:
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise ServingError(f"{name} has {len(stop)} texts; at most {MAX_STOP_STRINGS} are looked for.", name)


def check_service_tier(tier: str | None) -> None:
    """Raise ServingError for a tier that OpenAI does not have. All of its own are served alike."""
    if tier not in (None, *SERVICE_TIERS):
        raise ServingError(f"service_tier is {tier!r}; it must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")

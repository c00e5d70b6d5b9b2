"""The rope fields of config.json -> RopeConfig, in the spellings of transformers 4 and 5.

Knows what the fields mean; the maths is in `layers/rope.py`.
"""

import math
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError, did_you_mean
from jaxpaged.layers.rope import FREQUENCIES, QueryGrowth, RopeConfig, section_of_pairs
from jaxpaged.models.config import FULL, SLIDING, HfFields, short

KNOWN_KEYS = frozenset(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor
    low_freq_factor high_freq_factor beta_fast beta_slow truncate short_factor long_factor mscale mscale_all_dim
    finetuned mrope_section mrope_interleaved llama_4_scaling_beta max_position_embeddings
    """.split()
)
REQUIRED_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
EXTENDING_TYPES = ("linear", "dynamic", "yarn")
"""Scalings by which a model's `max_position_embeddings` grows by `factor`; others count it in already."""


def rope_fields(fields: HfFields) -> dict[str, Any]:
    """`rope_scaling` (transformers 4) or `rope_parameters` (5); an empty dictionary when there is neither."""
    scaling, parameters = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    return dict(scaling or parameters)


def with_rope(hf: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """config.json with these rope parameters where it has none."""
    return hf if hf.get("rope_scaling") or hf.get("rope_parameters") else {**hf, "rope_parameters": rope}


def single_rope(fields: HfFields, head_dim: int, aliases: dict[str, str] | None = None) -> RopeConfig:
    """The rope of a model whose layers all rotate alike. `aliases` renames rope types of old checkpoints."""
    params = rope_fields(fields)
    theta = fields.number("rope_theta", 10_000.0)
    partial = fields.number("partial_rotary_factor", 1.0)
    params.setdefault("partial_rotary_factor", partial)
    return rope_from_params(fields, params, theta, head_dim, aliases)


def two_ropes(
    fields: HfFields, head_dim: int, theta: float, window_theta: float | None = None
) -> tuple[RopeConfig, RopeConfig]:
    """(rope of full layers, rope of window layers), of which only the former is stretched.

    `theta` is that of a config.json that says nothing, and `window_theta` that of window layers, if it is another.
    """
    params, theta = rope_fields(fields), fields.number("rope_theta", theta)
    own = by_kind(params) if is_by_kind(params) else {FULL: params, SLIDING: {}}
    return (
        rope_from_params(fields, own[FULL], theta, head_dim),
        rope_from_params(fields, own[SLIDING], window_theta or theta, head_dim),
    )


def is_by_kind(params: dict[str, Any]) -> bool:
    """Whether rope parameters are said for a kind of layers."""
    return FULL in params or SLIDING in params


def by_kind(params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rope parameters of either kind of layers, empty for one that is not there. CheckpointError for what is said
    of none."""
    for name, value in params.items():
        if name not in (FULL, SLIDING) and value is not None:
            raise CheckpointError(
                f"config.json: the rope parameter {name} = {short(value)} is said of no kind of layers. It must be in "
                f"{FULL} or {SLIDING}.{did_you_mean(name, (FULL, SLIDING))}"
            )
    own = HfFields(params)
    return {kind: own.mapping(kind) for kind in (FULL, SLIDING)}


def rope_from_params(
    fields: HfFields, params: dict[str, Any], theta: float, head_dim: int, aliases: dict[str, str] | None = None
) -> RopeConfig:
    """One RopeConfig from one dictionary of rope parameters; `theta` is used when it names none."""
    own = HfFields(params)
    rope_type = own.text("rope_type") or own.text("type") or "default"
    rope_type = (aliases or {}).get(rope_type, rope_type)
    check_keys(rope_type, params)
    max_position = fields.count("max_position_embeddings")
    original = fields.count_or_none("original_max_position_embeddings")
    original = original or own.count("original_max_position_embeddings", max_position)
    factor = own.number("factor", max_position / original if rope_type == "longrope" else 1.0)
    part = own.number("partial_rotary_factor", 1.0)
    rope = RopeConfig(
        theta=own.number("rope_theta", theta),
        rotary_dim=head_dim if rope_type == "proportional" else int(head_dim * part),
        rope_type=rope_type,
        factor=factor,
        max_position=max_position,
        original_max_position=original,
        attention_factor=attention_factor(rope_type, factor, original, own),
        low_freq_factor=own.number("low_freq_factor", 1.0),
        high_freq_factor=own.number("high_freq_factor", 4.0),
        beta_fast=own.number("beta_fast", 32.0),
        beta_slow=own.number("beta_slow", 1.0),
        truncate=own.flag("truncate", True),
        short_factor=own.numbers("short_factor"),
        long_factor=own.numbers("long_factor"),
        sections=sections(own),
        mixes_sections=own.flag("mrope_interleaved", False),
        turning=part if rope_type == "proportional" else 1.0,
    )
    check_sizes(rope, head_dim)
    return rope


def sections(own: HfFields) -> tuple[int, ...]:
    """How many pairs each of the three positions of a token rotates; () where a token has one position."""
    found = own.value("mrope_section", [])
    if not isinstance(found, list) or any(type(number) is not int or number < 0 for number in found):
        raise CheckpointError(f"config.json: mrope_section is {short(found)}; it must be a list of whole numbers.")
    return tuple(found)


def check_keys(rope_type: str, params: dict[str, Any]) -> None:
    """CheckpointError for an unknown rope type, an unknown parameter, or one that is missing."""
    if rope_type not in FREQUENCIES:
        raise CheckpointError(
            f"config.json: the rope type {rope_type!r} is not supported. Supported: {', '.join(FREQUENCIES)}."
        )
    for name, value in params.items():
        if name not in KNOWN_KEYS and value is not None:
            raise CheckpointError(
                f"config.json: the rope parameter {name} = {short(value)} is not supported."
                f"{did_you_mean(name, KNOWN_KEYS)}"
            )
    for name in REQUIRED_KEYS.get(rope_type, ()):
        if params.get(name) is None:
            raise CheckpointError(f"config.json: rope type {rope_type!r} needs the rope parameter {name}.")


def check_sizes(rope: RopeConfig, head_dim: int) -> None:
    """CheckpointError when the rotated part or a list of divisors does not fit the head."""
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor rotates {rope.rotary_dim} of head_dim {head_dim}; it must be an "
            "even number of at least 2, and no more than the head has."
        )
    if rope.sections:
        check_sections(rope)
    for name, divisors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.rope_type == "longrope" and len(divisors) != rope.rotary_dim // 2:
            raise CheckpointError(
                f"config.json: {name} has {len(divisors)} numbers; {rope.rotary_dim // 2} pairs are rotated."
            )


def check_sections(rope: RopeConfig) -> None:
    """CheckpointError when the sections are not three, or do not share the pairs between them."""
    num_pairs = rope.rotary_dim // 2
    fits = len(rope.sections) == 3 and sum(rope.sections) == num_pairs
    if not fits or np.bincount(section_of_pairs(rope), minlength=3).tolist() != list(rope.sections):
        raise CheckpointError(
            f"config.json: mrope_section is {list(rope.sections)}; it must have three numbers that share the "
            f"{num_pairs} pairs of a head that are rotated. If they take turns (mrope_interleaved), rows and columns "
            "have at most a third each."
        )


def attention_factor(rope_type: str, factor: float, original: int, own: HfFields) -> float:
    """What cos and sin are multiplied by: as given, or as the papers of yarn and longrope derive it."""
    given = own.number_or_none("attention_factor")
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return given
    if factor <= 1.0:
        return 1.0
    if rope_type == "longrope":
        if original == 1:
            raise CheckpointError("config.json: original_max_position_embeddings is 1; longrope needs more.")
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, all_dim = own.value("mscale"), own.value("mscale_all_dim")
    if scale and all_dim:  # zero means that there is none
        return mscale(factor, own.number("mscale", 1.0)) / mscale(factor, own.number("mscale_all_dim", 1.0))
    return mscale(factor, 1.0)


def score_factor(fields: HfFields) -> float:
    """What DeepSeek's models multiply scores with where positions are stretched: rope sharpens both of its sides, and
    the part of a head that is not rotated has to be as sharp."""
    own = HfFields(rope_fields(fields))
    factor = own.number("factor", 1.0)
    if not own.value("mscale_all_dim") or factor <= 1.0:
        return 1.0
    return mscale(factor, own.number("mscale_all_dim", 1.0)) ** 2


def growth_of_queries(fields: HfFields) -> QueryGrowth | None:
    """How Mistral's models let queries grow beyond the length that they were trained on first; None: not at all."""
    own = HfFields(rope_fields(fields))
    beta = own.number_or_none("llama_4_scaling_beta")
    if beta is None:
        return None
    return QueryGrowth(own.count("original_max_position_embeddings"), beta, first=0, of_rotated=True)


def mscale(factor: float, weight: float) -> float:
    """How much sharper attention gets when positions are stretched by `factor` (arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


def longest_sequence(rope: RopeConfig) -> int:
    """How many positions the model is made for, scaling included (vLLM derives `max_model_len` alike)."""
    trained = rope.original_max_position if rope.rope_type == "yarn" else rope.max_position
    return int(trained * rope.factor) if rope.rope_type in EXTENDING_TYPES else rope.max_position

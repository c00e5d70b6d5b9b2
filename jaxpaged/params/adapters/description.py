"""What adapter_config.json says of an adapter: ranks, scalings, and of which kind it is.

Every field that would change what tensors mean is read, or refused with what to do. Which modules were trained the
tensors say themselves; fields that name modules are checked for their types. Knows neither tensors nor models.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.config.lora import ADAPTER_CONFIG
from jaxpaged.errors import CheckpointError, shown
from jaxpaged.params.safetensors_reader import once_each
from jaxpaged.params.schemes.fields import Fields

WITH_PEFT = (
    "Merge it into its model with peft (merge_and_unload, then save_pretrained), and serve the folder that you get."
)
TRAIN_PLAIN = "It cannot be merged either: train a plain LoRA, or serve it with peft."
REFUSED = {
    "alora_invocation_tokens": ("an activated LoRA (aLoRA), which acts from some tokens on only", TRAIN_PLAIN),
    "arrow_config": ("a mixture of several adapters (Arrow)", TRAIN_PLAIN),
    "fan_in_fan_out": ("made for layers with inputs before outputs, which no model here has", WITH_PEFT),
    "kasa_config": ("a KaSA adapter, which changes the weights of the base too", WITH_PEFT),
    "layer_replication": ("made for a model with some layers several times", WITH_PEFT),
    "lora_bias": ("one with biases beside lora_B", WITH_PEFT),
    "monteclora_config": ("a MonteCLoRA adapter, which is drawn anew for each use", TRAIN_PLAIN),
    "trainable_token_indices": ("one with embeddings of some tokens of its own", WITH_PEFT),
    "use_bdlora": ("a block-diagonal LoRA (BD-LoRA)", WITH_PEFT),
    "use_qalora": ("a QALoRA adapter, made for a base quantised in groups", WITH_PEFT),
}
"""Fields that make an adapter another kind of adapter -> which, and what to do."""

HARMLESS_STARTS = ("gaussian", "orthogonal", "eva", "mica")
"""Ways to begin training that left the base as it was, besides true and false."""
CHANGED_BASE = re.compile(r"(pissa(_niter_\d+)?|olora|corda|lora_ga)", re.IGNORECASE)

RECORDS = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config inference_mode layers_pattern
    layers_to_transform lora_dropout lora_ga_config loftq_config megatron_config megatron_core
    qalora_group_size revision runtime_config task_type velora_config
    """.split()
)
"""Fields about the training, or about names of modules, which those of the tensors repeat."""

Patterns = tuple[tuple[re.Pattern[str], float], ...]


@dataclass(frozen=True)
class Description:
    """`alpha` and `rank` are those of modules that no pattern names. `is_rank_stabilised`: the scaling is alpha over
    the root of the rank (rsLoRA). `is_dora`: there are magnitudes. `saved`: names of modules that are there whole.
    `parameters`: ends of names of tensors of the model that were adapted by these. `is_old`: PEFT before 0.19 wrote it,
    which had another layout of experts in one parameter."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    is_dora: bool
    rank_patterns: Patterns
    alpha_patterns: Patterns
    saved: tuple[str, ...]
    parameters: tuple[str, ...]
    is_old: bool

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor of the model was adapted by its own name, and not by that of its module."""
        return any(name == each or name.endswith(f".{each}") for each in self.parameters)

    def rank_of(self, module: str) -> int:
        """That of a module, or of a parameter, which has the name that PEFT's own model has for it."""
        return int(matched(self.rank_patterns, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """What B @ A is multiplied by."""
        rank = self.rank_of(module)
        return matched(self.alpha_patterns, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def matched(patterns: Patterns, module: str, default: float) -> float:
    """The number of the first pattern that a name, or the end of it behind a dot, matches."""
    return next((number for pattern, number in patterns if pattern.match(module)), default)


def read_description(text: bytes, source: str) -> Description:
    """Of the content of adapter_config.json, which `source` names. Raises CheckpointError."""
    try:
        given = json.loads(text, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not readable as JSON ({error}). Download it again.") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{source} is no JSON object. Download it again.")
    fields = Fields(given, source, ADAPTER_CONFIG)
    refuse_other_kinds(fields)
    check_names(fields)
    description = Description(
        rank=positive(fields, "r", fields.value("r")),
        alpha=number(fields, "lora_alpha", fields.value("lora_alpha", default=8)),
        is_rank_stabilised=fields.flag("use_rslora", False),
        is_dora=fields.flag("use_dora", False),
        rank_patterns=patterns(fields, "rank_pattern", positive),
        alpha_patterns=patterns(fields, "alpha_pattern", number),
        saved=fields.names("modules_to_save"),
        parameters=fields.names("target_parameters"),
        is_old=version(fields.value("peft_version")) < (0, 19),
    )
    refuse_unknown(fields)
    return description


def refuse_other_kinds(fields: Fields) -> None:
    """CheckpointError for an adapter that is no plain LoRA, saying which it is."""
    kind = fields.value("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{fields.source}: peft_type is {shown(kind)}, but only LORA is supported. {WITH_PEFT}"
            if kind
            else f"{fields.source} has no peft_type: it is not the description of an adapter that PEFT wrote. Save the "
            "adapter with peft's save_pretrained."
        )
    for name, (what, todo) in REFUSED.items():
        if fields.value(name) not in (None, False, [], {}):
            raise CheckpointError(
                f"{fields.source}: {name} is {shown(fields.given[name])}, so the adapter is {what}, which is not "
                f"supported. {todo}"
            )
    bias = fields.value("bias", default="none")
    if bias != "none":
        raise CheckpointError(
            f"{fields.source}: bias is {shown(bias)}, so the adapter has biases of the base's layers, but only 'none' "
            f"is supported. {WITH_PEFT}"
        )
    refuse_changed_base(fields)


def refuse_changed_base(fields: Fields) -> None:
    """CheckpointError where training began by taking a part out of the base's weights."""
    start = fields.value("init_lora_weights", default=True)
    if isinstance(start, bool) or start in HARMLESS_STARTS:
        return
    name = start if isinstance(start, str) else ""
    if CHANGED_BASE.fullmatch(name):
        raise CheckpointError(
            f"{fields.source}: init_lora_weights is {shown(start)}, which changed the base's weights when training "
            "began: with the base as it is, the adapter would be wrong. Save it again with peft's save_pretrained and "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it."
        )
    if name.lower() == "loftq":
        raise CheckpointError(
            f"{fields.source}: init_lora_weights is {shown(start)}: the adapter belongs to a base whose weights LoftQ "
            f"rounded, and not to the base as it is. {WITH_PEFT}"
        )
    raise CheckpointError(
        f"{fields.source}: init_lora_weights is {shown(start)}, of which nothing is known; known: true, false, "
        f"{', '.join(HARMLESS_STARTS)}. If it left the base's weights as they were, write true."
    )


def version(found: Any) -> tuple[int, int]:
    """The first two numbers of PEFT's version, which it writes since 0.18; (0, 0) before that."""
    numbers = re.match(r"(\d+)\.(\d+)", found) if isinstance(found, str) else None
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def check_names(fields: Fields) -> None:
    """CheckpointError for fields that name modules in another way than PEFT does."""
    for name in ("target_modules", "exclude_modules"):
        found = fields.value(name)
        if isinstance(found, str):
            if found != "all-linear":
                fields.pattern(name, found, found)
        else:
            fields.names(name)


def positive(fields: Fields, name: str, found: Any) -> int:
    if type(found) is not int or found < 1:
        raise fields.error(name, found, "a positive whole number")
    return found


def number(fields: Fields, name: str, found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise fields.error(name, found, "a number")
    return float(found)


def patterns(fields: Fields, name: str, checked: Any) -> Patterns:
    """Regular expressions of ends of names, as PEFT matches them, in their order."""
    found = fields.value(name, default={})
    if not isinstance(found, Mapping):
        raise fields.error(name, found, "an object with names or patterns of modules")
    return tuple(
        (re.compile(rf"(.*\.)?({fields.pattern(name, pattern, pattern)})$"), checked(fields, name, value))
        for pattern, value in found.items()
    )


def refuse_unknown(fields: Fields) -> None:
    """CheckpointError for a field that says something and that nobody knows."""
    for name, found in fields.given.items():
        if name not in fields.read and name not in RECORDS and found not in (None, False, [], {}, ""):
            raise CheckpointError(
                f"{fields.source}: {name} is {shown(found)}. Nothing is known of this field, and it may change what "
                f"the adapter's tensors mean. If it does not, take it out. If it does: {WITH_PEFT}"
            )

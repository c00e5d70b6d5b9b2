"""compressed-tensors' description: groups of modules, each with a way to store weights, and what is left as it was.

Modules are named by class ("Linear"), by their whole name, or by a regular expression behind "re:".
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.schemes.fields import Fields, short
from jaxpaged.params.schemes.floats4 import Mxfp4, Nvfp4
from jaxpaged.params.schemes.fp8 import Float8
from jaxpaged.params.schemes.scheme import (
    CLASS,
    EMBEDDING,
    EXACT,
    LINEAR,
    NAMED,
    PATTERN,
    Quantization,
    Rule,
    Scheme,
)
from jaxpaged.params.schemes.whole_numbers import Integers, PackedIntegers

REGEX = "re:"
PACKED, INTS, FLOATS_8 = "pack-quantized", "int-quantized", "float-quantized"
NAIVE, NV4, MX4 = "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FORMATS = (PACKED, INTS, FLOATS_8, NAIVE, NV4, MX4)
MIXED = "mixed-precision"
"""Every group says its own format."""


def read(fields: Fields) -> Quantization:
    """Of `quant_method` compressed-tensors."""
    refuse_sparse_and_turned(fields)
    form = fields.choice("format", (*FORMATS, MIXED, "dense", None))
    groups = fields.value("config_groups")
    if not isinstance(groups, dict) or not (groups or fields.value("kv_cache_scheme")):  # or only the KV cache's
        raise fields.error("config_groups", groups, "an object with a group of modules each")
    rules = [rule_of(fields, name, None) for name in fields.names("ignore")]
    for key, group in groups.items():
        if not isinstance(group, dict):
            raise fields.error("config_groups", group, "an object with a group of modules each")
        own = Fields(group, fields.source, f"{fields.place}.config_groups.{key}")
        scheme = scheme_of(own, own.choice("format", (*FORMATS, None)) or form)
        rules += [rule_of(own, target, scheme) for target in own.names("targets")]
        own.read |= {"input_activations", "output_activations"}
        own.refuse_unread()
    fields.refuse_unread({"kv_cache_scheme", "version"})
    rules.sort(key=lambda rule: rule.how == CLASS)  # what names a module wins over what names its class
    return Quantization(
        method="compressed-tensors",
        source=fields.source,
        rules=tuple(rules),
        default=None,
        says_which=True,
        facts=repr(tuple(rules)),
    )


def refuse_sparse_and_turned(fields: Fields) -> None:
    """CheckpointError for weights of which some are left out, and for those that were rotated."""
    sparsity, transforms = fields.value("sparsity_config"), fields.value("transform_config")
    kind = sparsity.get("format") if isinstance(sparsity, dict) else None
    if kind not in (None, "dense"):
        raise CheckpointError(
            f"{fields.source} says that weights are sparse (sparsity_config.format {short(kind)}), as 2:4 sparsity is. "
            "That is not read. Use a version of the model without sparsity."
        )
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise CheckpointError(
            f"{fields.source} says that weights were rotated (transform_config), as QuIP and SpinQuant do. Such a "
            "model needs rotations of activations too, which are not computed. Use a version without them."
        )
    if str(fields.given.get("format")).startswith(("marlin", "sparse")):
        raise CheckpointError(
            f"{fields.source}: {fields.place}.format is {short(fields.given['format'])}: weights with 2:4 sparsity are "
            "not read. Use a version of the model without sparsity."
        )


def rule_of(fields: Fields, entry: str, scheme: Scheme | None) -> Rule:
    """What an entry of a list says of modules."""
    if entry.startswith(REGEX):
        wanted = "a name, a class, or a regular expression"
        return Rule(PATTERN, fields.pattern("ignore", entry, entry.removeprefix(REGEX), wanted), scheme)
    if entry in (LINEAR, EMBEDDING):
        return Rule(CLASS, entry, scheme)
    return Rule(NAMED if scheme is None else EXACT, entry, scheme)


def scheme_of(fields: Fields, form: str | None) -> Scheme:
    """How the modules of a group are stored."""
    given = fields.value("weights")
    if not isinstance(given, dict):
        raise fields.error("weights", given, "an object")
    own = Fields(given, fields.source, f"{fields.place}.weights")
    bits, kind = own.whole("num_bits", default=8), own.choice("type", ("int", "float"), "int")
    strategy = own.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group", None))
    group, symmetric = own.group("group_size", own.value("group_size")), own.flag("symmetric", True)
    group = None if strategy in ("tensor", "channel") else group
    actorder = own.value("actorder")
    block = own.value("block_structure")
    own.refuse_unread({"dynamic", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx"})
    form = form if form not in (None, MIXED, "dense") else default_format(bits, kind)
    if form == NV4:
        return Nvfp4(is_divisor=True)
    if form == MX4:
        return Mxfp4()
    if kind == "float":
        if bits != 8:
            raise own.error("num_bits", bits, "8 for floats in this format")
        return Float8(block_of(own, block) if strategy == "block" else None)
    if form == PACKED:
        return PackedIntegers(bits_of(own, bits, (4, 8)), group, not symmetric, actorder is not None)
    bits_of(own, bits, (8,))
    if not symmetric:
        raise own.error("symmetric", symmetric, "true for whole numbers that are not packed")
    return Integers(group)


def bits_of(fields: Fields, bits: int, known: Sequence[int]) -> int:
    if bits not in known:
        wanted = " or ".join(map(str, known))
        raise fields.error("num_bits", bits, f"{wanted}; other numbers of bits are not read. Use a version of those")
    return bits


def block_of(fields: Fields, block: Any) -> tuple[int, int]:
    if isinstance(block, str):
        block = [int(part) for part in block.split("x") if part.isdigit()]
    return fields.block("block_structure", block)


def default_format(bits: int, kind: str) -> str:
    """What is meant where no format is said."""
    if kind == "float":
        return FLOATS_8
    return INTS if bits == 8 else PACKED

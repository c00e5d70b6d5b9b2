"""GPTQ's description: of AutoGPTQ, and of GPTQModel, whose `dynamic` rules give modules numbers of their own."""

from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.schemes.fields import Fields, short
from jaxpaged.params.schemes.scheme import EXACT, NAMED, PATTERN, Quantization, Rule
from jaxpaged.params.schemes.whole_numbers import Gptq

LM_HEAD = "lm_head"
DYNAMIC = {"bits", "group_size", "sym", "desc_act"}
"""What a rule may change."""


def read(fields: Fields) -> Quantization:
    """Of `quant_method` gptq, and of AutoRound's files in that format."""
    form = fields.choice("checkpoint_format", ("gptq", "gptq_v2", None), fields.value("format", default="gptq"))
    given = {name: fields.value(name) for name in DYNAMIC}
    is_v2 = form == "gptq_v2"
    default = scheme_of(fields, given, is_v2)
    rules = [
        *dynamic_rules(fields, given, is_v2),
        *(Rule(NAMED, name, None) for name in fields.names("modules_to_not_convert")),
    ]
    inside = fields.value("modules_in_block_to_quantize", "inside_layer_modules")
    if inside is not None:
        rules += [*(Rule(NAMED, name, default) for name in flat(fields, inside)), Rule(PATTERN, "", None)]
    if fields.flag("lm_head", False):
        rules.append(Rule(EXACT, LM_HEAD, default))
    else:
        rules.insert(0, Rule(EXACT, LM_HEAD, None))
    if fields.flag("is_marlin_format", False):
        raise fields.error("is_marlin_format", True, "false: weights that were reordered for a GPU are not read")
    fields.refuse_unread({"act_order", "data_type"})
    return Quantization(
        method="GPTQ",
        source=fields.source,
        rules=tuple(rules),
        default=default,
        says_which=inside is not None,
        facts=repr((tuple(rules), default)),
    )


def scheme_of(fields: Fields, given: dict[str, Any], is_v2: bool) -> Gptq:
    """The scheme of these numbers. CheckpointError for those that are not read."""
    bits = given["bits"]
    if bits not in (4, 8) or type(bits) is not int:
        raise fields.error("bits", bits, "4 or 8; other numbers of bits are not read. Use a version of 4 or 8 bits")
    group = fields.group("group_size", given["group_size"])
    for name in ("sym", "desc_act"):
        if given[name] not in (True, False, None):
            raise fields.error(name, given[name], "true or false")
    symmetric = given["sym"] is not False
    return Gptq(bits, group, symmetric, is_v2, bool(given["desc_act"]))


def dynamic_rules(fields: Fields, given: dict[str, Any], is_v2: bool) -> list[Rule]:
    """Those of `dynamic`: a regular expression behind "-:" leaves modules as they were, one behind "+:", or with
    nothing before it, changes some numbers."""
    dynamic, rules = fields.value("dynamic", default={}), list[Rule]()
    if not isinstance(dynamic, dict):
        raise fields.error("dynamic", dynamic, "an object with a rule for each regular expression")
    for pattern, changes in dynamic.items():
        entry = fields.pattern("dynamic", pattern, pattern[2:] if pattern[:2] in ("+:", "-:") else pattern)
        if pattern.startswith("-:"):
            rules.append(Rule(PATTERN, entry, None))
            continue
        if not isinstance(changes, dict):
            raise fields.error("dynamic", changes, "an object of what a rule changes")
        own = {name: value for name, value in changes.items() if name in DYNAMIC}
        rules.append(Rule(PATTERN, entry, scheme_of(fields, {**given, **own}, is_v2)))
    return rules


def flat(fields: Fields, inside: Any) -> list[str]:
    """The names in lists of lists."""
    names = [name for part in inside for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{fields.source}: {fields.place}.modules_in_block_to_quantize is {short(inside)}; it must be lists of "
            "names."
        )
    return names

"""AWQ's description, in the spelling of transformers and of AutoAWQ."""

from jaxpaged.params.schemes.fields import Fields
from jaxpaged.params.schemes.scheme import INSIDE, Quantization, Rule
from jaxpaged.params.schemes.whole_numbers import Awq


def read(fields: Fields) -> Quantization:
    """Of `quant_method` awq. Modules are left whose name has an entry of the list anywhere in it."""
    bits, inputs = fields.whole("bits", "w_bit", default=4), fields.whole("group_size", "q_group_size", default=128)
    if bits != 4:
        raise fields.error("bits", bits, "4; other numbers of bits are not read. Use a version of 4 bits")
    group = fields.group("group_size", inputs)
    fields.choice("version", ("gemm", None))
    names = fields.names("modules_to_not_convert")
    default = Awq(group, fields.flag("zero_point", True))
    fields.refuse_unread({"lm_head"})
    return Quantization(
        method="AWQ",
        source=fields.source,
        rules=tuple(Rule(INSIDE, name, None) for name in names),
        default=default,
        says_which=bool(names),
        facts=repr(default),
    )

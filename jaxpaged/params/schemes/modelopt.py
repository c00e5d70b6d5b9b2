"""ModelOpt's description: of hf_quant_config.json, and the shorter one of config.json."""

from jaxpaged.params.schemes.fields import Fields
from jaxpaged.params.schemes.floats4 import Mxfp4, Nvfp4
from jaxpaged.params.schemes.fp8 import Float8
from jaxpaged.params.schemes.scheme import GLOB, NAMED, Quantization, Rule, Scheme

ALGORITHMS: dict[str, Scheme] = {
    "fp8": Float8(),
    "fp8_per_channel_per_token": Float8(),
    "fp8_pb_wo": Float8((128, 128)),
    "nvfp4": Nvfp4(is_divisor=False),
    "mxfp4": Mxfp4(),
}
"""`quant_algo` -> how weights are stored."""


def read(fields: Fields) -> Quantization:
    """Of `quant_method` modelopt. Modules that are left are named, with wildcards."""
    inner = fields.value("quantization")
    if isinstance(inner, dict):
        fields = Fields(inner, fields.source, "quantization")
    algorithm = fields.choice("quant_algo", tuple(ALGORITHMS), "none")
    fields.choice("group_size", (16, 32, 128, None))
    names = fields.names("exclude_modules", "ignore")
    fields.refuse_unread({"kv_cache_quant_algo", "kv_cache_scheme", "config_groups", "quant_algo", "has_zero_point"})
    default = ALGORITHMS[algorithm]
    return Quantization(
        method=f"ModelOpt ({default.title})",
        source=fields.source,
        rules=tuple(Rule(GLOB if "*" in name else NAMED, name, None) for name in names),
        default=default,
        says_which=bool(names),
        facts=repr(default),
    )

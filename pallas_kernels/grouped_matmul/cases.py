"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """`sizes` tokens of each expert and `padding` after them, weights in groups of `group` inputs (0: all in one).

    `weights` is the type of weights; a float type has no scales.
    """

    name: str
    weights: str
    sizes: tuple[int, ...]
    padding: int = 0
    group: int = 0
    num_inputs: int = 256
    num_outputs: int = 96
    dtype: str = "bfloat16"


_MIXED = (3, 0, 40, 1, 0, 0, 17)
_LARGE = (130, 0, 5, 250, 1)

CASES = (
    Case("bfloat16", "bfloat16", _MIXED),
    Case("float32, padding", "float32", _MIXED, padding=30, dtype="float32"),
    Case("int8 per channel, padding", "int8", _MIXED, padding=9),
    Case("int8 in groups, several tiles of tokens", "int8", _LARGE, group=128),
    Case("float8 in groups, padding of whole tiles", "float8_e4m3fn", (20, 0, 30), padding=300, group=128),
    Case("float8 per channel, float16", "float8_e4m3fn", _MIXED, dtype="float16"),
    Case("int4 in groups", "int4", _LARGE, padding=7, group=128, num_outputs=300),
    Case("int4 per channel", "int4", _MIXED, num_outputs=64),
    Case("int4 in small groups", "int4", _MIXED, group=32, padding=3),
    Case("int8, groups larger than a tile of inputs", "int8", (4, 4), group=384, num_inputs=1152),
    Case("int8, inputs of several tiles", "int8", (1, 0, 2), num_inputs=128 * 34, num_outputs=32),
    Case("one expert has all tokens", "int8", (0, 0, 33, 0)),
    Case("one token", "int4", (0, 1, 0), group=128),
    Case("no token at all", "int8", (0, 0, 0), padding=5),
    Case("groups end where tiles do", "int8", (128, 128, 0, 128), group=128),
)

# What an engine compiles; how tokens are spread over the 128 experts is data.
SERVING_CASES = tuple(
    Case(f"{weights}, {num_tokens} tokens", weights, (0,) * 128, num_tokens, group, num_inputs=2048, num_outputs=768)
    for weights, group in (("bfloat16", 0), ("int8", 0), ("float8_e4m3fn", 128), ("int4", 128))
    for num_tokens in (128, 4096)
)

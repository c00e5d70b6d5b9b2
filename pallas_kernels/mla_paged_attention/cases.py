"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: (cached, new) tokens of each row, `padding` tokens and `empty_rows` rows after them."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 16
    latent_dim: int = 128
    rope_dim: int = 32
    block_size: int = 16
    dtype: str = "bfloat16"
    padding: int = 3
    empty_rows: int = 2

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows) + self.padding


_MIXED = ((0, 5), (300, 1), (10, 17), (63, 1), (0, 1), (64, 1), (130, 3), (15, 1))

CASES = (
    Case("one token of one request", ((0, 1),), padding=0, empty_rows=0),
    Case("one decode", ((600, 1),)),
    Case("one prompt", ((0, 33),)),
    Case("decodes and prompts in any order", _MIXED),
    Case("float32", _MIXED, dtype="float32"),
    Case("float16", _MIXED, dtype="float16"),
    Case("12 heads, block_size 64", _MIXED, num_heads=12, block_size=64),
    Case("128 heads", ((40, 1), (70, 2)), num_heads=128, padding=1),
    Case("latent of 512, rope of 64", ((40, 1), (0, 9)), latent_dim=512, rope_dim=64),
    Case("block_size 48, which divides no chunk", _MIXED, block_size=48),
    Case("rows with no new token", ((50, 0), (20, 1), (9, 0), (0, 11), (3, 0))),
    Case("padded far beyond the total", ((10, 1), (0, 5)), padding=40, empty_rows=20),
    Case("nothing at all", (), padding=8),
)


@dataclasses.dataclass(frozen=True)
class ServingCase:
    """The static side of a step as an engine compiles it: DeepSeek-V3's attention by default."""

    name: str
    num_tokens: int
    num_rows: int
    num_heads: int = 128
    latent_dim: int = 512
    rope_dim: int = 64
    block_size: int = 64
    dtype: str = "bfloat16"


SERVING_CASES = (
    ServingCase("decodes, 128 heads", 64, 64),
    ServingCase("decodes and chunks, 128 heads", 2048, 128),
    ServingCase("one decode, 16 heads", 1, 1, num_heads=16),
)

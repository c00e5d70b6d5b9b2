"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes, ceil_div


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: (cached, new) tokens of each row, `padding` tokens and `empty_rows` rows after them. `kv_dtype`: the type
    of the cache, if that is not q's, with `kv_scales`."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 16
    latent_dim: int = 128
    rope_dim: int = 32
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    kv_scales: str = "none"
    padding: int = 3
    empty_rows: int = 2

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows) + self.padding

    @property
    def num_blocks(self) -> int:
        """That hold the contexts."""
        return sum(ceil_div(sum(row), self.block_size) for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """What must move: contexts, queries and results once; new latents and rope keys are read and written."""
        width, new = self.latent_dim + self.rope_dim, sum(new for _, new in self.rows)
        slots = sum(sum(row) for row in self.rows) + 2 * new
        scales = array_bytes("float32", slots, 2) if self.kv_scales == "token" else 0
        queries = array_bytes(self.dtype, new, self.num_heads, width + self.latent_dim)
        return array_bytes(self.cache_dtype, slots, width) + scales + queries

    @property
    def flops(self) -> int:
        """Operations of the two products, over the pairs of a token and one that it sees."""
        pairs = sum(cached * new + new * (new + 1) // 2 for cached, new in self.rows)
        return 2 * self.num_heads * (2 * self.latent_dim + self.rope_dim) * pairs


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
    Case("several tokens a row", ((300, 2), (7, 2), (140, 2), (60, 4)), num_heads=32),
    Case("int8, scales of tokens", _MIXED, kv_dtype="int8", kv_scales="token", block_size=32),
    Case("int8, scales of heads", ((130, 1), (9, 4)), kv_dtype="int8", kv_scales="head"),
    Case("float8, scales of heads, float32", ((20, 1),), kv_dtype="float8_e4m3fn", kv_scales="head", dtype="float32"),
    Case("float8, scales of tokens", ((20, 1), (9, 30)), kv_dtype="float8_e4m3fn", kv_scales="token"),
    Case("float8", ((20, 1), (9, 4)), kv_dtype="float8_e5m2"),
)


def _serving(name: str, rows: tuple[tuple[int, int], ...], num_heads: int = 128, kv_dtype: str | None = None) -> Case:
    """DeepSeek-V3's attention, without padding; 8 bits have scales of tokens."""
    more = {"kv_dtype": kv_dtype, "kv_scales": "token" if kv_dtype else "none"}
    return Case(name, rows, num_heads, latent_dim=512, rope_dim=64, block_size=64, padding=0, empty_rows=0, **more)


SERVING_CASES = (
    _serving("decodes, 128 heads", ((2047, 1),) * 64),
    _serving("decodes and chunks, 128 heads", (*((511, 1),) * 127, (0, 1921))),
    _serving("one decode, 16 heads", ((131071, 1),), num_heads=16),
    _serving("prompt of 2,048, 128 heads", ((0, 2048),)),
    _serving("decodes, 128 heads, int8", ((2047, 1),) * 64, kv_dtype="int8"),
    _serving("decodes, 16 heads, float8", ((2047, 1),) * 64, num_heads=16, kv_dtype="float8_e4m3fn"),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (
    Case("decodes", ((63, 1),) * 4, num_heads=4, dtype="float32", padding=0, empty_rows=0),
    Case("prompt of 32", ((0, 32),), num_heads=4, padding=0, empty_rows=0),
)

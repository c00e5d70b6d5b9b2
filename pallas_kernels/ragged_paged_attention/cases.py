"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: for each row how many tokens it has cached and how many are new, and the layer that attends.

    `rows` are (cached, new) pairs; `padding` tokens and `empty_rows` rows follow them, not in use. `shared`: (row, an
    earlier row, blocks): so many blocks at the beginnings of both are the same. `both_ways`: (row, begin, end): its
    tokens at positions [begin, end) see each other whichever comes first, within the window.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group_size: int = 2  # query heads per kv head
    head_dim: int = 16
    value_dim: int | None = None  # of narrower values
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    padding: int = 3
    empty_rows: int = 2
    shared: tuple[tuple[int, int, int], ...] = ()
    both_ways: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows)


_MIXED = ((0, 5), (300, 1), (10, 90), (63, 1), (0, 1), (64, 1), (130, 3), (260, 70), (5, 1))
_FEW = ((300, 1), (0, 20), (250, 17), (0, 0), (3, 1))

CASES = (
    Case("one token of one request", ((0, 1),), padding=0, empty_rows=0),
    Case("one decode", ((40, 1),)),
    Case("one prompt", ((0, 150),)),
    Case("decodes and prompts in any order", _MIXED),
    Case("multi-query, head_dim 10, block_size 8", _MIXED, num_kv_heads=1, group_size=4, head_dim=10, block_size=8),
    Case("multi-head, head_dim 80, block_size 64", _MIXED, num_kv_heads=3, group_size=1, head_dim=80, block_size=64),
    Case("head_dim 64, block_size 32", _MIXED, head_dim=64, block_size=32),
    Case("head_dim 128", ((70, 1), (0, 20), (200, 80)), head_dim=128),
    Case("head_dim 256, multi-query", ((70, 1), (0, 20)), num_kv_heads=1, group_size=2, head_dim=256),
    Case("group of 16, head_dim 72, block_size 256", _FEW, num_kv_heads=1, group_size=16, head_dim=72, block_size=256),
    Case(
        "group of 8, keys of 192 and values of 128, block_size 128",
        _FEW,
        num_kv_heads=1,
        group_size=8,
        head_dim=192,
        value_dim=128,
        block_size=128,
        sinks=True,
        soft_cap=1.5,
    ),
    Case("head_dim 240, block_size 8", _FEW, num_kv_heads=1, head_dim=240, block_size=8),
    Case("head_dim 512", _FEW, num_kv_heads=1, head_dim=512),
    Case("block_size 48, which divides no tile", _MIXED, block_size=48),
    Case("window, no multiple of the block", _MIXED, window=37),
    Case("window of one token", ((0, 70), (33, 1), (20, 5)), window=1),
    Case("window of one block, head_dim 96", _MIXED, window=16, num_kv_heads=1, head_dim=96),
    Case("window longer than any context", ((0, 70), (33, 1)), window=1000),
    Case("soft cap", _MIXED, soft_cap=0.7),
    Case("sinks", _MIXED, sinks=True),
    Case("window, soft cap and sinks", _MIXED, window=21, soft_cap=1.5, sinks=True, group_size=3),
    Case("long tail", ((4500, 1), *[(7 * i, 1) for i in range(12)]), num_kv_heads=1),
    Case("long tail of windows", ((1500, 1), *[(90 * i, 1) for i in range(12)]), window=100),
    Case("chunk that continues a context", ((333, 200),)),
    Case("chunk that continues a context, window", ((333, 200),), window=50),
    Case("rows with no new token", ((50, 0), (20, 1), (9, 0), (0, 80), (3, 0))),
    Case("padded far beyond the total", ((10, 1), (0, 30)), padding=400, empty_rows=40),
    Case("nothing at all", (), padding=8),
)

# Six rows have 64 slots in common, four of these 64 more, three another 64, and two the last 64; some have prompts.
_TREE = ((210, 1), (100, 40), (70, 1), (300, 3), (200, 1), (270, 90), (40, 1))
_HELD = ((1, 0, 4), (2, 0, 4), (3, 0, 12), (4, 3, 11), (5, 3, 16))

# For backends that read once what rows share.
SHARED_CASES = (
    Case("rows that share beginnings", _TREE, shared=_HELD),
    Case(
        "rows that share beginnings, window, soft cap and sinks",
        _TREE,
        num_kv_heads=4,
        shared=_HELD,
        window=290,  # which begins in everybody's first block: null blocks would not be shared
        soft_cap=1.5,
        sinks=True,
    ),
    Case(
        "decodes that share a beginning, multi-head",
        ((310, 1), (290, 1), (200, 1), (33, 1)),
        num_kv_heads=8,
        group_size=1,
        shared=((1, 0, 18), (2, 1, 9)),
    ),
)


# Runs at the first and at the last token, side by side, longer than a tile of queries and ending within one, begun by
# what is cached, in rows of few tokens; one that would go on behind its row.
_PICTURES = ((0, 200), (70, 1), (10, 90), (64, 1), (300, 150), (60, 3), (20, 2))
_RUNS = (
    (0, 0, 40),
    (0, 60, 100),
    (0, 100, 130),
    (0, 170, 200),
    (2, 5, 60),
    (4, 310, 445),
    (5, 58, 63),
    (6, 21, 50),
)

# For pictures whose tokens see each other both ways.
BOTH_WAYS_CASES = (
    Case("both ways", _PICTURES, both_ways=_RUNS),
    Case("both ways, window shorter than runs", _PICTURES, both_ways=_RUNS, window=37, num_kv_heads=1, group_size=4),
    Case(
        "both ways, window, soft cap and sinks",
        ((0, 70), (33, 1), (200, 45)),
        both_ways=((0, 10, 60), (2, 195, 240)),
        window=64,
        soft_cap=1.5,
        sinks=True,
    ),
    Case("both ways, far behind", ((1500, 40), (90, 1)), both_ways=((0, 1505, 1540),), window=100, head_dim=64),
    Case(
        "both ways, rows that share what one of them computes",
        ((0, 140), (128, 20), (130, 1)),
        shared=((1, 0, 8), (2, 0, 8)),
        both_ways=((0, 30, 110), (0, 121, 140), (1, 121, 140)),
    ),
)

# For kernels that take nothing but prompts, and heads of 64 and 128: whole tiles and short ones, iterations before the
# window's end, within it and behind it, contexts in parts; decodes beside them are somebody else's.
PROMPT_CASES = (
    Case(
        "prompts, window, soft cap and sinks",
        ((300, 50), (30, 1), (0, 37)),
        num_kv_heads=1,
        group_size=4,
        head_dim=64,
        window=150,
        soft_cap=1.5,
        sinks=True,
        empty_rows=1,
    ),
    Case("prompts, head_dim 128", ((0, 70), (333, 40), (7, 1)), group_size=4, head_dim=128),
    Case("prompts, group of 7", ((100, 60), (0, 11)), num_kv_heads=1, group_size=7, head_dim=64, block_size=8),
    Case("prompts, multi-head, window of one token", ((20, 150),), group_size=1, head_dim=64, window=1),
    Case("prompts, blocks of 256", ((500, 30), (0, 9)), num_kv_heads=1, group_size=8, head_dim=64, block_size=256),
    Case("prompts, long", ((1500, 600), (0, 333), (64, 64)), group_size=4, head_dim=128, block_size=32),
)


@dataclasses.dataclass(frozen=True)
class ServingShape:
    """The static side of a step as an engine compiles it: for compiling kernels ahead of time, without numbers."""

    name: str
    num_tokens: int
    num_rows: int
    num_kv_heads: int = 8
    group_size: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # of keys and values, `dtype` where None
    kv_scales: str = "none"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    shares: bool = False  # whether its programs look for what rows share
    sees_ahead: bool = False  # whether its tokens may see what stands behind them
    decodes_only: bool = False  # whether its programs have nothing for rows of more than one token

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def kv_dtype(self) -> str:
        return self.cache_dtype or self.dtype


SERVING_SHAPES = (
    ServingShape("a few decodes", 16, 16),
    ServingShape("decodes and chunks", 512, 64),
    ServingShape("decodes that share", 256, 256, shares=True),
    ServingShape("head_dim 64, window, sinks, shared", 512, 64, head_dim=64, window=512, sinks=True, shares=True),
    ServingShape("multi-head, head_dim 64", 512, 64, num_kv_heads=12, group_size=1, head_dim=64, block_size=32),
    ServingShape("multi-query, head_dim 80", 512, 64, num_kv_heads=1, group_size=32, head_dim=80, block_size=64),
    ServingShape("group of 7, head_dim 96", 512, 64, num_kv_heads=4, group_size=7, head_dim=96, dtype="float16"),
    ServingShape("head_dim 256, window, soft cap", 512, 64, group_size=2, head_dim=256, window=4096, soft_cap=50.0),
    ServingShape("head_dim 256, window, both ways", 512, 64, group_size=2, head_dim=256, window=1024, sees_ahead=True),
    ServingShape("both ways, shared", 512, 64, group_size=8, shares=True, sees_ahead=True),
    ServingShape("head_dim 64, window, sinks", 512, 64, group_size=8, head_dim=64, window=128, sinks=True),
    ServingShape("head_dim 512", 512, 64, num_kv_heads=1, group_size=8, head_dim=512),
    ServingShape("float32, block_size 256", 512, 64, group_size=2, block_size=256, dtype="float32"),
    ServingShape("float32, head_dim 256", 512, 64, group_size=2, head_dim=256, dtype="float32"),
    ServingShape("int8 cache, scales of tokens", 512, 64, cache_dtype="int8", kv_scales="token"),
    ServingShape("float8 cache, scales of heads", 512, 64, cache_dtype="float8_e4m3fn", kv_scales="head"),
    ServingShape("float8 cache, head_dim 256", 512, 64, head_dim=256, cache_dtype="float8_e5m2"),
)


ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclasses.dataclass(frozen=True)
class ServingStep:
    """A step of a `ServingShape` with numbers, for benchmarks and tuning: (cached, new) tokens of every row.

    in_common: the first so many slots of all rows lie in the same blocks.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    shape: ServingShape
    in_common: int = 0

    @property
    def is_decode(self) -> bool:
        return all(new == 1 for _, new in self.rows)

    @property
    def context_bytes(self) -> int:
        """What attention must read of the cache: each slot that a query sees, once."""
        shape = self.shape
        seen = sum(cached + new - self._first_visible(cached) for cached, new in self.rows)
        seen -= self.in_common * (len(self.rows) - 1)
        scales = 2 * shape.num_kv_heads * 4 if shape.kv_scales == "token" else 0
        return seen * (self._token_numbers * ITEMSIZE[shape.kv_dtype] + scales)

    @property
    def step_bytes(self) -> int:
        """What must move in all: the context, queries and outputs, and new keys and values, read and written."""
        shape, T = self.shape, self.shape.num_tokens
        queries = 2 * T * shape.num_heads * shape.head_dim * ITEMSIZE[shape.dtype]
        new = T * self._token_numbers * (ITEMSIZE[shape.dtype] + ITEMSIZE[shape.kv_dtype])
        return self.context_bytes + queries + new

    @property
    def flops(self) -> int:
        """Operations of the two products, over the pairs of a query and a slot that it sees."""
        pairs = 0
        for cached, new in self.rows:
            window = self.shape.window or cached + new
            pairs += sum(min(position + 1, window) for position in range(cached, cached + new))
        return 4 * self.shape.num_heads * self.shape.head_dim * pairs

    @property
    def _token_numbers(self) -> int:
        return 2 * self.shape.num_kv_heads * self.shape.head_dim

    def _first_visible(self, cached: int) -> int:
        return 0 if self.shape.window is None else max(0, cached - self.shape.window + 1)


def serving_step(name: str, rows: tuple[tuple[int, int], ...], in_common: int = 0, **shape: Any) -> ServingStep:
    """A step of exactly these rows; `shape` as in `ServingShape`."""
    shape["decodes_only"] = all(new == 1 for _, new in rows)
    return ServingStep(name, rows, ServingShape(name, sum(new for _, new in rows), len(rows), **shape), in_common)


_DECODES = ((2047, 1),) * 64
_WITH_PROMPT = ((2175, 1),) * 256  # 128 slots of one's own behind a system prompt of 2,048

SERVING_STEPS = (
    serving_step("decode, 64 x 2,048", _DECODES),
    serving_step("decode, 1 x 131,072", ((131071, 1),)),
    serving_step("decode, 8 x 640", ((639, 1),) * 8),
    serving_step("decode, 64 x 2,048, blocks of 128", _DECODES, block_size=128),
    serving_step("decode, 256 x 512", ((511, 1),) * 256),
    serving_step("decode, long tail", ((65535, 1), *[(63 + 63 * i, 1) for i in range(63)])),
    serving_step("decode, 64 x 8,192, window 1,024", ((8191, 1),) * 64, window=1024),
    serving_step("decode, multi-head, head_dim 64", _DECODES, num_kv_heads=16, group_size=1, head_dim=64),
    serving_step("decode, multi-query, head_dim 256", _DECODES, num_kv_heads=1, group_size=8, head_dim=256),
    serving_step("decode, int8 cache", _DECODES, cache_dtype="int8", kv_scales="token"),
    serving_step("decode, float8 cache", _DECODES, cache_dtype="float8_e4m3fn", kv_scales="head"),
    serving_step("prefill, 8,192", ((0, 8192),)),
    serving_step("prefill, 16 x 512", ((0, 512),) * 16),
    serving_step("prefill, 2,048 after 6,144", ((6144, 2048),)),
    serving_step("prefill, 8,192, window 1,024, head_dim 256", ((0, 8192),), group_size=2, head_dim=256, window=1024),
    serving_step("64 decodes and a chunk of 1,024", (*_DECODES, (1024, 1024))),
    serving_step("decode, 256 x 2,176, 2,048 in common, read once", _WITH_PROMPT, 2048, shares=True),
    serving_step("decode, 256 x 2,176, 2,048 in common, read by each", _WITH_PROMPT, 2048),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_STEPS = (
    serving_step("decode, 4 x 64", ((63, 1),) * 4, num_kv_heads=2, group_size=2, head_dim=16, dtype="float32"),
    serving_step("decode, window", ((63, 1),) * 4, num_kv_heads=2, group_size=2, head_dim=16, window=24),
    serving_step("prefill, 64", ((0, 64),), num_kv_heads=2, group_size=2, head_dim=16, dtype="float32"),
    serving_step("decode, 32 x 160, 128 in common", ((159, 1),) * 32, 128, num_kv_heads=2, head_dim=16, shares=True),
)

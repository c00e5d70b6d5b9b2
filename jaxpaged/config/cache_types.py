"""Of what type cached keys and values are: the names of `kv_cache_dtype`, which are vLLM's, and what they mean.

Numbers of 8 bits are multiplied with scales to become what they mean. Which scales there are is part of the type; this
module does not know where they come from.
"""

from dataclasses import dataclass

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""Types of 8 bits, by their names in numpy -> the largest number that each has."""


@dataclass(frozen=True)
class CacheType:
    """`dtype` by its name in numpy. `scales`: "none", "head" (one for each layer and kv head, of keys and of values) or
    "token" (one for each of them and each token)."""

    dtype: str
    scales: str = "none"

    @property
    def is_scaled(self) -> bool:
        return self.scales != "none"

    @property
    def largest(self) -> float:
        """The largest number that a type with scales has."""
        return LARGEST[self.dtype]


CACHE_TYPES = {
    **{name: CacheType(name) for name in ("bfloat16", "float16", "float32")},
    "fp8_e4m3": CacheType("float8_e4m3fn", "head"),
    "fp8_e5m2": CacheType("float8_e5m2", "head"),
    "fp8_per_token_head": CacheType("float8_e4m3fn", "token"),
    "int8": CacheType("int8", "head"),
    "int8_per_token_head": CacheType("int8", "token"),
}
"""By their names in a resolved config."""
OTHER_NAMES = {"fp8": "fp8_e4m3"}
CHOICES = ("auto", "bfloat16", "float16", "float32", "fp8", *(name for name, t in CACHE_TYPES.items() if t.is_scaled))
LAYER_KINDS = ("full_attention", "sliding_window", "chunked_local_attention", "mla_attention")
"""What kinds of layers are called where some are named that are not cached in 8 bits."""


def of_draft(cached_as: CacheType) -> CacheType:
    """The type of what drafts, whose layers no checkpoint and no file has scales of. Float8 does without."""
    return CACHE_TYPES["int8_per_token_head"] if cached_as == CACHE_TYPES["int8"] else cached_as

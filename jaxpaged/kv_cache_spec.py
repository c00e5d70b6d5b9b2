"""What a layer caches: bytes, slots, and which blocks are still read. Models declare it, core counts, workers allocate.

Layers are put into groups: all layers of a group cache alike and share one block table. Groups whose blocks look alike
(`storage`) share one pool: they have the same number of layers (the last ones may be padded), so the i-th layers of
all of them can share one KV tensor, where a block id belongs to one group at a time. Arrays of different shapes cannot
share memory in XLA, so groups whose blocks differ have pools of their own, with as many blocks as requests need of
each.

This module knows neither arrays nor devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from jaxpaged.config.cache_types import CacheType

SCALE_BYTES = 4


class CacheSpec(Protocol):
    """What every kind of layer says of its cache.

    `kind` is vLLM's word for it, which KV events carry. `num_read_blocks`: how many blocks before a block border a
    query behind it reads; None means all of them. `block_bytes` and `row_bytes` count all devices together:
    `row_bytes` is what a layer keeps for each request besides its blocks. `needs_blocks`: a request must have its
    blocks; without, they are snapshots that it does not need. `is_attended`: attention reads them. `most_seen`: tokens
    that a query sees at most; None: all. `device_slots`: tokens of a block that lie on one device, `context_shards`:
    devices that hold different ones. `storage` is equal for layers that can share a KV tensor.

    Blocks leave the device as pages, of `page_dtype`; None: as the engine caches where layers have no type of their
    own. `has_one_scale`: in 8 bits, too. `scales`: what cached numbers are multiplied with ("none", "head", "token").
    `has_page_scales`: pages have those of tokens beside the values.
    `page_heads`: how many heads with keys and values a page has, and their size; None: it has no such heads.
    """

    block_size: int
    kind: str
    num_read_blocks: int | None
    needs_blocks: bool
    is_attended: bool
    window: int | None
    chunk: int | None
    most_seen: int | None
    block_bytes: int
    row_bytes: int
    is_split: bool
    device_slots: int
    context_shards: int
    storage: "CacheSpec"
    page_dtype: str | None
    has_one_scale: bool
    scales: str
    has_page_scales: bool
    page_heads: tuple[int, int] | None

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """How many blocks at the front of a table no query reads once so many tokens are computed."""

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks that a request must have at most, while its first `num_tokens` are computed in such steps."""

    def cached_as(self, cache_type: CacheType) -> "CacheSpec":
        """The same in numbers of 8 bits, with scales; unchanged where a cache has no keys and values."""

    def with_drafts(self, num_drafts: int) -> "CacheSpec":
        """The same where so many of a row's newest tokens may be taken back."""

    def context_copies(self, num_devices: int) -> int:
        """How many of the devices have the same tokens of the same heads, so that each may have a part of them in place
        of a copy; 0 where a context is never split."""

    def with_context_shards(self, shards: int) -> "CacheSpec":
        """The same with the tokens of a block split over so many of those devices."""

    def page_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Of one layer of a page of so many tokens: [parts, tokens, heads, head dim]. A snapshot is [1, 1, 1, bytes],
        whatever the number of tokens before it."""

    def in_pages(self, page_tokens: int) -> "CacheSpec":
        """The same without what depends on devices and kernels, with pages of so many tokens for blocks."""


@dataclass(frozen=True)
class AttentionSpec:
    """Keys and values of every token, of the last `window` tokens only, or of those in the newest token's chunk.

    `window` counts the tokens that a query sees, itself included; None means all of them. `chunk`, a multiple of
    `block_size`: a query at position p sees those from p - p % chunk on.
    `dtype_bytes` is the size of one cached number, `stored_dim` how many of them a kernel's layout keeps for a head
    of `head_dim`; the same if None. `head_copies`: how often each head of the model is there, its copies side by side;
    `num_kv_heads` counts them all. `dtype`: of layers with a type of their own, of 8 bits, whose `scales` are not
    "none"; `stored_scales`: float32 numbers that lie in memory for a block of each head, of keys and values together;
    if None, one for each of its tokens and each of both. `context_shards`: devices that have the same head, and
    different tokens of each block. Pages of a cache tell of neither: they have each head once, and whole blocks.
    """

    row_bytes: ClassVar[int] = 0
    is_split: ClassVar[bool] = True
    needs_blocks: ClassVar[bool] = True
    is_attended: ClassVar[bool] = True
    has_one_scale: ClassVar[bool] = True

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None
    stored_dim: int | None = None
    chunk: int | None = None
    head_copies: int = field(default=1, repr=False)
    context_shards: int = field(default=1, repr=False)
    dtype: str | None = field(default=None, repr=False)
    scales: str = field(default="none", repr=False)
    stored_scales: int | None = field(default=None, repr=False)

    @property
    def page_dtype(self) -> str | None:
        return self.dtype

    @property
    def has_page_scales(self) -> bool:
        return self.scales == "token"

    @property
    def num_model_heads(self) -> int:
        return self.num_kv_heads // self.head_copies

    @property
    def device_slots(self) -> int:
        return self.block_size // self.context_shards

    @property
    def kind(self) -> str:
        if self.chunk is not None:
            return "chunked_local_attention"
        return "full_attention" if self.window is None else "sliding_window"

    @property
    def most_seen(self) -> int | None:
        """How many tokens a query sees at most; None: all."""
        return self.window or self.chunk

    @property
    def block_bytes(self) -> int:
        numbers = 2 * self.block_size * (self.stored_dim or self.head_dim) * self.dtype_bytes
        scales = (self.stored_scales or 2 * self.block_size) if self.scales == "token" else 0
        return self.num_kv_heads * (numbers + SCALE_BYTES * scales)

    @property
    def storage(self) -> "AttentionSpec":
        return replace(self, window=None, chunk=None)

    @property
    def num_read_blocks(self) -> int | None:
        """At most: just behind the beginning of a chunk there are fewer, and those before it are given back at once."""
        if self.chunk is not None:
            return self.chunk // self.block_size - 1
        return None if self.window is None else blocks_for_tokens(self.window - 1, self.block_size)

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        if self.chunk is not None:
            return num_computed_tokens // self.chunk * (self.chunk // self.block_size)
        return 0 if self.window is None else max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """With a window: the blocks that it touches while a step is computed, and one more, because neither end needs
        to lie on a block border. Likewise with chunks."""
        seen = num_tokens if self.most_seen is None else min(num_tokens, self.most_seen - 1 + max_step_tokens)
        return blocks_for_tokens(seen, self.block_size) + (seen < num_tokens)

    def cached_as(self, cache_type: CacheType) -> "AttentionSpec":
        return replace(self, dtype_bytes=1, dtype=cache_type.dtype, scales=cache_type.scales)

    def with_drafts(self, num_drafts: int) -> "AttentionSpec":
        return self

    def context_copies(self, num_devices: int) -> int:
        """Only contexts of layers that see all tokens are split."""
        return self.head_copies if self.most_seen is None else 0

    def with_context_shards(self, shards: int) -> "AttentionSpec":
        copies = self.head_copies // shards
        return replace(self, num_kv_heads=self.num_model_heads * copies, head_copies=copies, context_shards=shards)

    @property
    def page_heads(self) -> tuple[int, int]:
        return self.num_model_heads, self.head_dim

    def page_shape(self, num_tokens: int) -> tuple[int, ...]:
        return 2, num_tokens, *self.page_heads

    def in_pages(self, page_tokens: int) -> "AttentionSpec":
        heads = self.num_model_heads
        whole = replace(self, num_kv_heads=heads, head_copies=1, context_shards=1, stored_dim=None, stored_scales=None)
        return replace(whole, block_size=page_tokens)


@dataclass(frozen=True)
class LatentSpec:
    """One vector of `width` numbers for every token, which all heads share (MLA: a latent and a rope key). Devices
    that split the heads have each the whole of it, or `context_shards` of them different tokens of each block.

    `latent_dim`: the first numbers, which are values too, where attention reads these vectors; None: it does not.
    `stored_width`: how many numbers a kernel's layout keeps of them; `width` if None.

    In 8 bits, of `dtype`, each token has two `scales`, of its latent and of its rope key, since sizes differ. A kernel
    keeps `stored_scales` for a block, float32. Pages have them as the last bytes of each token.
    """

    kind: ClassVar[str] = "mla_attention"
    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    num_read_blocks: ClassVar[None] = None
    most_seen: ClassVar[None] = None
    row_bytes: ClassVar[int] = 0
    is_split: ClassVar[bool] = False
    needs_blocks: ClassVar[bool] = True
    has_one_scale: ClassVar[bool] = False
    has_page_scales: ClassVar[bool] = False
    page_heads: ClassVar[None] = None

    block_size: int
    width: int
    dtype_bytes: int
    latent_dim: int | None = None
    stored_width: int | None = None
    context_shards: int = field(default=1, repr=False)
    dtype: str | None = field(default=None, repr=False)
    scales: str = field(default="none", repr=False)
    stored_scales: int | None = field(default=None, repr=False)

    @property
    def page_dtype(self) -> str | None:
        return self.dtype

    @property
    def is_attended(self) -> bool:
        return self.latent_dim is not None

    @property
    def device_slots(self) -> int:
        return self.block_size // self.context_shards

    @property
    def block_bytes(self) -> int:
        """Of one device, as each has its own."""
        scales = 0 if self.dtype is None else self.stored_scales or 2 * self.device_slots
        return self.device_slots * (self.stored_width or self.width) * self.dtype_bytes + SCALE_BYTES * scales

    @property
    def storage(self) -> "LatentSpec":
        return self

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return blocks_for_tokens(num_tokens, self.block_size)

    def cached_as(self, cache_type: CacheType) -> "LatentSpec":
        if not self.is_attended:
            return self
        return replace(self, dtype_bytes=1, dtype=cache_type.dtype, scales="token")

    def with_drafts(self, num_drafts: int) -> "LatentSpec":
        return self

    def context_copies(self, num_devices: int) -> int:
        return num_devices if self.is_attended else 0

    def with_context_shards(self, shards: int) -> "LatentSpec":
        return replace(self, context_shards=shards)

    def page_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Latents keep what a kernel adds to them: another layout is another namespace."""
        scales = 0 if self.dtype is None else 2 * SCALE_BYTES
        return 1, num_tokens, 1, (self.stored_width or self.width) + scales

    def in_pages(self, page_tokens: int) -> "LatentSpec":
        return replace(self, block_size=page_tokens, stored_scales=None)


@dataclass(frozen=True)
class StateArray:
    """One array of a recurrent state. `shape` is that of a snapshot; `split_axis` is split over the devices.

    `token_axis`: of a state that is what its last tokens gave, such as the inputs of a convolution, the axis that has
    one entry for each of them, the oldest first. In a row that axis is longer by the tokens that may be taken back, and
    position p lies at p modulo its length. None: there is none.
    """

    shape: tuple[int, ...]
    dtype: str
    split_axis: int = 0
    token_axis: int | None = None

    def row_shape(self, num_drafts: int) -> tuple[int, ...]:
        """Of what a row keeps where up to `num_drafts` tokens may be taken back."""
        return tuple(n + num_drafts * (axis == self.token_axis) for axis, n in enumerate(self.shape))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * np.dtype(self.dtype).itemsize


SNAPSHOTS_PER_REQUEST = 4
"""Blocks for snapshots that memory is divided for: begin, branch and end of a prompt, and the end of its answer."""
SNAPSHOT_SHARE = 1 / 16
"""So many are small beside what else a long request keeps; then there are more, up to this share of that."""


@dataclass(frozen=True)
class StateSpec:
    """A recurrent state, which every token changes (short convolutions; later gated delta nets, Mamba).

    A request's own state is none of its blocks. It lies in the request's row. `num_drafts` of a row's newest tokens may
    be taken back, as drafts are that are rejected: what a row keeps lets it go on behind any of them. So a state that
    cannot be computed backwards keeps an array with a `token_axis`, of length 0 in a snapshot, from which the states
    after its newest tokens follow.

    Blocks are snapshots for the prefix cache. Block i is the state after (i + 1) * block_size tokens: the step that
    computes the last token of a block writes it, unless the table has the null block there, and a step that begins
    right behind a block reads it. Where a state is large, one weighs as much as thousands of tokens of keys and values,
    so which are taken is decided one by one (`core/kv_cache/groups.py`), and never at the cost of anything else: no
    request must have any.
    """

    kind: ClassVar[str] = "mamba"
    context_shards: ClassVar[int] = 1
    num_read_blocks: ClassVar[int] = 1
    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    most_seen: ClassVar[None] = None
    is_split: ClassVar[bool] = True
    needs_blocks: ClassVar[bool] = False
    is_attended: ClassVar[bool] = False
    page_dtype: ClassVar[str] = "uint8"
    has_one_scale: ClassVar[bool] = False
    scales: ClassVar[str] = "none"
    has_page_scales: ClassVar[bool] = False
    page_heads: ClassVar[None] = None

    block_size: int
    arrays: tuple[StateArray, ...]
    num_drafts: int = 0

    @property
    def device_slots(self) -> int:
        return self.block_size

    @property
    def block_bytes(self) -> int:
        return sum(array.num_bytes(array.shape) for array in self.arrays)

    @property
    def row_bytes(self) -> int:
        return sum(array.num_bytes(array.row_shape(self.num_drafts)) for array in self.arrays)

    @property
    def storage(self) -> "StateSpec":
        return self

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """A snapshot is read by a step that begins right behind it, and by no later one."""
        return max(num_computed_tokens - 1, 0) // self.block_size

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return 0

    def cached_as(self, cache_type: CacheType) -> "StateSpec":
        return self

    def with_drafts(self, num_drafts: int) -> "StateSpec":
        return replace(self, num_drafts=num_drafts)

    def context_copies(self, num_devices: int) -> int:
        return 0

    def with_context_shards(self, shards: int) -> "StateSpec":
        raise AssertionError("a state has no tokens to split")

    def page_shape(self, num_tokens: int) -> tuple[int, ...]:
        """A page is the snapshot behind its last token: the bytes of all arrays, one after the other."""
        return 1, 1, 1, self.block_bytes

    def in_pages(self, page_tokens: int) -> "StateSpec":
        return replace(self, block_size=page_tokens, num_drafts=0)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. `layer_idxs[i]` lives in the i-th KV tensor of the group's pool."""

    spec: CacheSpec
    layer_idxs: tuple[int, ...]


class PoolLayout:
    """Groups that share a pool. Every KV tensor of it has blocks of `storage`."""

    def __init__(self, storage: CacheSpec, groups: Sequence[tuple[int, KVCacheGroup]]):
        self.storage = storage
        self.group_idxs = tuple(g for g, _ in groups)
        self.groups = tuple(group for _, group in groups)
        self.num_tensors = max(len(group.layer_idxs) for group in self.groups)

    def block_bytes(self, num_shards: int) -> int:
        """Bytes per device of one block id: a block in every KV tensor."""
        return self.num_tensors * self.storage.block_bytes // (num_shards if self.storage.is_split else 1)

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks that a request must have at most, over all groups of the pool."""
        return max_blocks_per_request(self.groups, num_tokens, max_step_tokens)


def wanted_blocks(
    pools: Sequence[PoolLayout], num_tokens: int, max_step_tokens: int, num_shards: int = 1
) -> tuple[int, ...]:
    """Blocks of each pool for which memory is divided, per request: those that it must have, or some snapshots."""
    musts = [pool.max_blocks(num_tokens, max_step_tokens) for pool in pools]
    num_bytes = sum(must * pool.block_bytes(num_shards) for must, pool in zip(musts, pools))

    def num_snapshots(pool: PoolLayout) -> int:
        return max(
            SNAPSHOTS_PER_REQUEST * len(pool.groups), int(SNAPSHOT_SHARE * num_bytes) // pool.block_bytes(num_shards)
        )

    return tuple(must or num_snapshots(pool) for must, pool in zip(musts, pools))


def pool_layouts(groups: Sequence[KVCacheGroup]) -> tuple[PoolLayout, ...]:
    """The pools of these groups, in the order of their first ones."""
    members: dict[CacheSpec, list[tuple[int, KVCacheGroup]]] = {}
    for g, group in enumerate(groups):
        members.setdefault(group.spec.storage, []).append((g, group))
    return tuple(PoolLayout(storage, each) for storage, each in members.items())


@dataclass(frozen=True)
class KVCacheConfig:
    """The whole KV cache: `num_blocks[p]` blocks in every KV tensor of pool p. Block 0 of each is its null block.

    `content` names what makes blocks of the same tokens others than those that the model's type has: a type of 8 bits,
    and its scales. Empty: nothing does.
    """

    num_blocks: tuple[int, ...]
    groups: tuple[KVCacheGroup, ...]
    content: str = ""

    def __post_init__(self) -> None:
        assert len(self.num_blocks) == len(self.pools), f"{self.num_blocks} blocks for {len(self.pools)} pools"

    @cached_property
    def pools(self) -> tuple[PoolLayout, ...]:
        return pool_layouts(self.groups)

    @property
    def block_sizes(self) -> list[int]:
        """Tokens of a block of each group."""
        return [group.spec.block_size for group in self.groups]

    @property
    def device_slots(self) -> list[int]:
        """Of these, those that lie on one device."""
        return [group.spec.device_slots for group in self.groups]

    @property
    def tensors(self) -> list[tuple[CacheSpec, int, int]]:
        """Of every KV tensor what its blocks look like, how many they are, and how many layers may share it."""
        pools = zip(self.pools, self.num_blocks, strict=True)
        return [
            (pool.storage, num_blocks, len(pool.groups)) for pool, num_blocks in pools for _ in range(pool.num_tensors)
        ]

    def place_in_pool(self, g: int) -> int:
        """Of a group among those that share a pool."""
        return next(pool.group_idxs.index(g) for pool in self.pools if g in pool.group_idxs)

    def num_bytes(self, num_shards: int) -> int:
        """Bytes per device of all blocks."""
        pools = zip(self.pools, self.num_blocks, strict=True)
        return sum(num_blocks * pool.block_bytes(num_shards) for pool, num_blocks in pools)

    def concurrency(self, num_tokens: int, max_step_tokens: int) -> float:
        """How many requests of `num_tokens` fit at a time, no beginning shared. Snapshots are no limit, unless there is
        nothing else."""
        needs = [pool.max_blocks(num_tokens, max_step_tokens) for pool in self.pools]
        if not any(needs):
            needs = list(wanted_blocks(self.pools, num_tokens, max_step_tokens))
        return min(max(n - 1, 0) / need for n, need in zip(self.num_blocks, needs, strict=True) if need)

    def layer_caches(self) -> tuple[tuple[int, int], ...]:
        """Per layer: the index of its group, and of its tensor."""
        caches: dict[int, tuple[int, int]] = {}
        first = 0
        for pool in self.pools:
            for g, group in zip(pool.group_idxs, pool.groups):
                caches |= {layer: (g, first + i) for i, layer in enumerate(group.layer_idxs)}
            first += pool.num_tensors
        return tuple(caches[layer] for layer in range(len(caches)))


@dataclass(frozen=True)
class EncoderCacheConfig:
    """The encoder cache: embeddings of pictures, in `num_pages` pages of `page_size`.

    A step encodes at most `max_step_embeds` embeddings, and at most `largest` of one picture, if that is said.
    `whole_spans`: no step ends within a run of tokens that embeddings replace, since they see each other both ways, or
    since the options say so.
    """

    num_pages: int
    page_size: int
    max_step_embeds: int
    whole_spans: bool = False
    largest: int | None = None


def group_layers(specs: Sequence[CacheSpec], is_staged: bool = False) -> tuple[KVCacheGroup, ...]:
    """Put layers into groups, one kind of cache each, of equal size where they share a pool.

    The size is the smallest number of layers of one kind, so that little is padded. When the kinds are nearly
    even (largest < 1.25 x smallest) the largest is taken: fewer groups, hence fewer tables, for a little padding.
    Groups that read everything come first: what they find in the prefix cache bounds what others look for.
    `is_staged`: stages of a pipeline have neighbouring layers, of which each group should have as many as others.
    """
    pools: dict[CacheSpec, dict[CacheSpec, list[int]]] = {}
    for layer_idx, spec in enumerate(specs):
        pools.setdefault(spec.storage, {}).setdefault(spec, []).append(layer_idx)
    groups = []
    for kinds in pools.values():
        counts = [len(layers) for layers in kinds.values()]
        size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
        for spec, layers in kinds.items():
            num_groups = -(-len(layers) // size)
            cuts = [slice(i * size, (i + 1) * size) for i in range(num_groups)]
            if is_staged:
                cuts = [slice(i, None, num_groups) for i in range(num_groups)]
            groups += [KVCacheGroup(spec, tuple(layers[cut])) for cut in cuts]
    rank = lambda spec: int(spec.num_read_blocks is not None) if spec.needs_blocks else 2
    return tuple(sorted(groups, key=lambda group: (rank(group.spec), group.layer_idxs)))


def groups_of_layers(groups: Sequence[KVCacheGroup], layers: range) -> tuple[KVCacheGroup, ...]:
    """The same groups, for whoever has these layers only and counts them from 0. Some may be empty."""
    own = lambda group: tuple(i - layers.start for i in group.layer_idxs if i in layers)
    return tuple(KVCacheGroup(group.spec, own(group)) for group in groups)


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def max_blocks_per_request(groups: Sequence[KVCacheGroup], max_model_len: int, max_num_batched_tokens: int) -> int:
    """Blocks that one request of `max_model_len` tokens must have at most, over all groups."""
    return sum(group.spec.max_blocks(max_model_len, max_num_batched_tokens) for group in groups)

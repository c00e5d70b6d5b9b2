"""Content hashes of full KV blocks: SHA-256 over canonical CBOR, so that a router can compute them too.

    hash of block i = SHA-256(CBOR([hash of block i-1, [token ids of block i], extra keys or null]))

The parent of block 0 is NONE_HASH, as long as the weights are those that the engine began with, which routers take for
granted. Content of other weights has another root, SHA-256(CBOR([NONE_HASH, ["weights", their version]])), so that it
never passes for content of these, here or wherever blocks are kept under their hashes. Blocks of a cache of 8 bits have
a root of their own in place of NONE_HASH, SHA-256(CBOR([NONE_HASH, ["kv_cache", its type and scales]])). A store that
outlives an engine must keep apart by itself what engines began with (`Executor.weights_version`).

Extra keys are what changes the content besides the tokens; an array of
    ["lora", name of the adapter, its path, its digest]
    ["mm", content hash, offset of the item relative to the block's first token]   for every item inside
    ["cache_salt", salt]                                                           in block 0 only
Nothing here knows where a block is, or whether it is cached.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from jaxpaged.core.request import Request
from jaxpaged.encoding.cbor import encode_cbor, item_start
from jaxpaged.messages import MultiModalFeature

ExtraKeys = tuple[tuple[str | int, ...], ...]


NONE_HASH = hashlib.sha256(encode_cbor("vllm-none-hash")).digest()
"""The parent of every first block: what vLLM uses when PYTHONHASHSEED is not set and the algorithm is sha256_cbor."""


def root_of(weights_version: str, first: bytes = NONE_HASH) -> bytes:
    """The parent of first blocks that were computed with weights other than the engine's first ones, whose parent is
    `first`."""
    return hashlib.sha256(encode_cbor((first, ("weights", weights_version)))).digest()


def first_root(content: str) -> bytes:
    """The parent of first blocks in a cache with such content (`KVCacheConfig`)."""
    return hashlib.sha256(encode_cbor((NONE_HASH, ("kv_cache", content)))).digest() if content else NONE_HASH


NO_EXTRA_KEYS = encode_cbor(None)


class _EncodedTokens(dict):
    """token id -> its CBOR, filled as tokens are seen: at most one small entry per word of the vocabulary."""

    def __missing__(self, token_id: int) -> bytes:
        encoded = self[token_id] = item_start(0, token_id)
        return encoded


class BlockHasher:
    """Computes the hashes of a request's full blocks, each once. `root` is the parent of the first."""

    def __init__(self, block_size: int, root: bytes = NONE_HASH):
        self.block_size = block_size
        self.root = root
        self._encoded_tokens = _EncodedTokens()
        self._array_start = item_start(4, block_size)

    def extend(self, request: Request) -> None:
        """Append to `request.block_hashes` until every full block of known tokens has its hash."""
        self.extend_list(request.block_hashes, request)

    def extend_list(self, hashes: list[bytes], request: Request) -> None:
        """The same to any list of hashes of blocks of this size."""
        block_size, tokens = self.block_size, request.all_token_ids
        num_full_blocks = len(tokens) // block_size
        if len(hashes) >= num_full_blocks:
            return
        encoded = self._encoded_tokens.__getitem__
        only_tokens = request.has_only_tokens
        pair_start, array_start = b"\x83\x58\x20", self._array_start  # an array of 3, whose first is 32 bytes
        parent = hashes[-1] if hashes else self.root
        for block_idx in range(len(hashes), num_full_blocks):
            start = block_idx * block_size
            extra = NO_EXTRA_KEYS if only_tokens else encode_cbor(extra_keys(request, block_idx, block_size))
            parts = (pair_start, parent, array_start, *map(encoded, tokens[start : start + block_size]), extra)
            parent = hashlib.sha256(b"".join(parts)).digest()
            hashes.append(parent)


def features_between(features: Sequence[MultiModalFeature], start: int, end: int) -> Sequence[MultiModalFeature]:
    """Those that have any token from `start` on before `end`."""
    first = bisect_right(features, start, key=lambda feature: feature.offset + feature.length)
    return features[first : bisect_left(features, end, first, key=lambda feature: feature.offset)]


def extra_keys(request: Request, block_idx: int, block_size: int) -> ExtraKeys | None:
    """What changes the content of a block besides its tokens and those before; None when nothing does."""
    if request.has_only_tokens:
        return None
    keys: list[tuple[str | int, ...]] = []
    start = block_idx * block_size
    if (lora := request.lora) is not None:
        keys.append(("lora", lora.lora_name, lora.lora_path, lora.digest))
    for feature in features_between(request.mm_features, start, start + block_size):
        of_video = (feature.time,) if feature.moment else ()  # other positions, other keys and values
        keys.append(("mm", feature.key.hex(), feature.offset - start, *of_video))
    if request.cache_salt is not None and block_idx == 0:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None

"""Under which names LMCache keeps keys and values: a hash for each chunk of tokens, which covers all chunks before it.

    chunk hash = h((hash of the chunk before, (token ids), ()))
    name       = model@world size@worker@chunk hash in hexadecimal digits@dtype

`h` is LMCache's `pre_caching_hash_algorithm`. `sha256_cbor` is SHA-256 over canonical CBOR, of which the first 8 bytes
count. `builtin`, LMCache's default, is Python's `hash` (of 64-bit CPython 3.11 and later). What comes before the first
chunk is vLLM's NONE_HASH: `h` of the text that PYTHONHASHSEED holds; where it is not set, SHA-256 of a constant.
The other algorithms hash pickles, and are refused. LMCache's names say neither of adapters, nor of images or salts, nor
with which weights: the model's name stands for all of them.
"""

import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from jaxpaged.encoding.cbor import encode_cbor, item_start
from jaxpaged.errors import ConfigError, did_you_mean

ALGORITHMS = ("sha256_cbor", "builtin")
ALIASES = {"sha256_cbor_64bit": "sha256_cbor"}
REFUSED = {
    "sha256": "it hashes pickles",
    "xxhash": "it hashes pickles",
    "xxhash_cbor": "its hashes of 128 bits need a package that this program does not",
}
UNSEEDED = "vllm-none-hash"
"""What vLLM hashes to NONE_HASH where PYTHONHASHSEED is not set."""
MAX_NAME_BYTES = 150
"""Of a name in the protocol of `lm://`."""
DTYPE_NAMES = {"bfloat16": "bfloat16", "float16": "half", "float32": "float", "uint8": "uint8"}
"""numpy's names of types, and LMCache's. What vLLM caches as float8 it calls bytes."""


class ChunkHasher:
    """Hashes of chunks. Raises ConfigError for an algorithm, or a seed, that nobody here can follow."""

    def __init__(self, algorithm: str = "sha256_cbor", seed: str | None = None):
        """`seed`: what PYTHONHASHSEED is where vLLM runs; None: it is not set there."""
        self.algorithm, self.seed = ALIASES.get(algorithm, algorithm), seed
        if self.algorithm in REFUSED:
            raise ConfigError(
                f"LMCache's hash algorithm {algorithm!r} is not followed here: {REFUSED[self.algorithm]}. Set "
                "pre_caching_hash_algorithm to sha256_cbor everywhere."
            )
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(
                f"LMCache's hash algorithm is {algorithm!r}.{did_you_mean(algorithm, ALGORITHMS)} It must be one of "
                f"{', '.join(ALGORITHMS)}."
            )
        self.root = root_of(self.algorithm, seed)
        """What stands for the chunk before the first."""
        self._encoded: dict[int, bytes] = {}

    def hash(self, before: int, token_ids: Sequence[int]) -> int:
        """Of a chunk behind the one with the hash `before`. With `builtin` it may be negative."""
        if self.algorithm == "builtin":
            return hash((before, tuple(token_ids), ()))
        parts = [b"\x83", item_start(0, before), item_start(4, len(token_ids))]
        encoded = self._encoded
        for token in token_ids:
            if token not in encoded:
                encoded[token] = item_start(0, token)
            parts.append(encoded[token])
        parts.append(b"\x80")
        return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "big")


def root_of(algorithm: str, seed: str | None) -> int:
    if algorithm == "sha256_cbor":
        digest = hashlib.sha256(encode_cbor(UNSEEDED if seed is None else seed)).digest()
        return int.from_bytes(digest[:8], "big")
    if seed is None or not re.fullmatch("[0-9]{1,10}", seed) or int(seed) >= 1 << 32:
        raise ConfigError(
            f"LMCache's hash algorithm is builtin, and PYTHONHASHSEED is {'not set' if seed is None else repr(seed)}: "
            "then each process has other names. Set it to a number everywhere, here too, or set "
            "pre_caching_hash_algorithm to sha256_cbor."
        )
    return text_hash(seed, seed)


@functools.cache
def text_hash(text: str, seed: str) -> int:
    """What `hash` gives for a text in a Python that was started with this PYTHONHASHSEED."""
    command = [sys.executable, "-S", "-c", "import sys; print(hash(sys.argv[1]))", text]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def chunk_name(model: str, world_size: int, worker: int, chunk_hash: int, dtype: str) -> str:
    """`dtype` is numpy's name, one of DTYPE_NAMES."""
    return f"{model}@{world_size}@{worker}@{chunk_hash:x}@{DTYPE_NAMES[dtype]}"


def check_model_name(model: str) -> None:
    """Raise ConfigError for a model that LMCache cannot call so."""
    if not model or model != model.strip() or "@" in model:
        raise ConfigError(
            f"LMCache's names cannot hold the model's name {model!r}: it is empty, or has an @, or a space at an end. "
            "Give the one that is used with LMCache, as the setting model."
        )


def check_name_length(model: str, world_size: int, dtype: str) -> None:
    """Raise ConfigError for a model whose chunks have names that are too long."""
    longest = chunk_name(model, world_size, world_size - 1, -(1 << 63), dtype).encode()
    if len(longest) > MAX_NAME_BYTES:
        raise ConfigError(
            f"LMCache's names would have {len(longest)} bytes with the model's name {model!r}; they end at "
            f"{MAX_NAME_BYTES}. Give a shorter one, as the setting model, here and there."
        )

"""The alphabet: one letter for every kind of axis. It spells variable suffixes, einsum strings, and sharding.

This module knows names only; sizes come from a model's configuration, mesh axes from `sharding.py`.
"""

ALPHABET = {
    "T": "tokens in the step",
    "R": "rows: requests that live on the device",
    "M": "KV blocks per row, at most",
    "B": "KV blocks in the pool",
    "S": "slots per KV block; in `logits_SV`: tokens that are sampled from",
    "D": "model width",
    "N": "query heads",
    "K": "key and value heads",
    "G": "query heads per key head, N / K",
    "H": "width of a head",
    "F": "feed-forward width",
    "V": "vocabulary",
    "L": "layers",
    "Y": "labels of a classifier",
}
"""Every letter that may name an axis."""

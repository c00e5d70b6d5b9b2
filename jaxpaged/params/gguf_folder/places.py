"""Where the tensors of a checkpoint lie in a GGUF file, under the names that a checkpoint has for them.

Matrices are read from the file, by a scheme where they are in blocks or their rows in another order. Vectors, which may
have other numbers than in a checkpoint, are small, and become tensors of their own.

Letters: D width of the model.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.blocks import DECODERS, PLAIN
from jaxpaged.params.formats.gguf.reader import GgufTensor
from jaxpaged.params.gguf_folder.architectures import Architecture
from jaxpaged.params.gguf_folder.facts import Facts, numbers_of
from jaxpaged.params.gguf_folder.tensor_names import HEADS_TOGETHER, OF_KEYS, OF_VALUES
from jaxpaged.params.schemes.gguf import rows_in_file

LAYER_NUMBER = re.compile(r"blk\.(\d{1,5})\.")
WHOLE = re.compile(r"([\w.]+)\.(weight|bias)")
ROPE = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that say how positions rotate (`description.py`)."""
OTHER_EXPERT = re.compile(r"\.experts\.[1-9]")
"""In names of modules: an expert that is not the first."""
QUERY, KEY = "attn_q", "attn_k"


@dataclass(frozen=True)
class Place:
    """A matrix of a checkpoint, or one of an expert, in a file: `shape` is that of its rows there, in bytes where they
    are in blocks. `turned_heads` as in `schemes/gguf.py`. `is_apart`: a checkpoint that nobody quantised has it in one
    tensor with others."""

    name: str
    tensor: GgufTensor
    shape: tuple[int, ...]
    begin: int
    turned_heads: int
    is_apart: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.tensor.row_bytes

    @property
    def has_scheme(self) -> bool:
        return self.is_apart or self.turned_heads > 0 or self.tensor.type.name not in PLAIN


def places_and_vectors(facts: Facts, architecture: Architecture) -> tuple[list[Place], dict[str, np.ndarray]]:
    """(matrices, vectors) of all tensors but those of layers behind the model. Raises CheckpointError for those that
    are unknown, or of types that are not read."""
    places, vectors = list[Place](), dict[str, np.ndarray]()
    for tensor in facts.tensors.values():
        if ROPE.fullmatch(tensor.name) or is_further(tensor, facts):
            continue
        kind, own_name, found = checkpoint_names(tensor, facts, architecture)
        heads = turned_heads(facts, own_name) if architecture.turned else 0
        shaped = architecture.shaped.get(own_name)
        if kind == "bias" or len(tensor.shape) == 1 or shaped:
            vector = vector_of(tensor, own_name, heads, architecture.less_one)
            vectors[found[0]] = shaped(vector) if shaped else vector
        else:
            parts = parts_of(tensor, facts, own_name, len(found))
            places += places_of(found, tensor, parts, heads, architecture.is_stacked)
    return places, architecture.completed(facts, vectors)


def is_further(tensor: GgufTensor, facts: Facts) -> bool:
    """Whether it is of a layer that predicts further tokens, which is not read."""
    found = LAYER_NUMBER.match(tensor.name)
    return found is not None and int(found[1]) >= facts.num_layers


def checkpoint_names(tensor: GgufTensor, facts: Facts, architecture: Architecture) -> tuple[str, str, tuple[str, ...]]:
    """("weight" or "bias", the file's name inside of a layer, the checkpoint's name), with braces for numbers of
    experts; several names of matrices one after the other. CheckpointError for a tensor that no such model has."""
    start, name, known = "", tensor.name, architecture.outside
    if found := LAYER_NUMBER.match(name):
        start, name, known = f"{architecture.layers}.{found[1]}.", name[found.end() :], architecture.layer
    if whole := known.get(name):
        assert isinstance(whole, str)
        stem, _, kind = name.rpartition(".")
        return kind, stem, (f"{start}{whole}",)
    own = WHOLE.fullmatch(name)
    if own and (stems := known.get(own[1])):
        stems = (stems,) if isinstance(stems, str) else stems
        return own[2], own[1], tuple(f"{start}{stem}.{own[2]}" for stem in stems)
    raise CheckpointError(
        f"{tensor.path} holds {tensor.name}, which is no part of the architecture {facts.architecture} as it is known "
        "here. Serve the model's safetensors version."
    )


def turned_heads(facts: Facts, own_name: str) -> int:
    """How many heads a tensor has whose rows lie in another order; 0 for others."""
    heads = facts.own_count("attention.head_count")
    return {QUERY: heads, KEY: facts.own_count("attention.head_count_kv", heads)}.get(own_name, 0)


def vector_of(tensor: GgufTensor, own_name: str, heads: int, less_one: bool) -> np.ndarray:
    """float32, as a checkpoint has it."""
    vector = numbers_of(tensor).reshape(tensor.shape)
    if heads:
        return vector[rows_in_file(len(vector), heads)]
    return vector - np.float32(1) if less_one and own_name.endswith("norm") else vector


def parts_of(tensor: GgufTensor, facts: Facts, own_name: str, num_parts: int) -> list[int]:
    """How many rows each of a tensor's matrices has: as many as the next one, but of queries, keys and values."""
    outputs = tensor.shape[-2]
    if own_name != HEADS_TOGETHER or num_parts == 1:
        return [outputs // num_parts] * num_parts
    key, value = facts.own_count("attention.key_length"), facts.own_count("attention.value_length")
    queries = facts.own_count("attention.head_count") * key
    key_heads = (outputs - queries) // (key + value)
    return [queries, key_heads * key, key_heads * value]


def places_of(
    names: tuple[str, ...], tensor: GgufTensor, parts: Sequence[int], heads: int, is_apart: bool
) -> Iterator[Place]:
    """A matrix, or those of all experts one behind the other, each of which may be several, of so many rows. Raises
    CheckpointError for types that are not read."""
    kind = tensor.type.name
    if kind not in PLAIN and kind not in DECODERS:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has the type {kind}, which is not read; {', '.join([*PLAIN, *DECODERS])} "
            "are. Choose a file of another quantisation."
        )
    *stacked, outputs, _ = tensor.shape
    if names[0].endswith((OF_KEYS, OF_VALUES)):
        yield Place(names[0], tensor, (*stacked, outputs, width_of(tensor)), tensor.begin, heads)
        return
    if len(stacked) != names[0].count("{}") or sum(parts) != outputs or min(parts) < 1:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has the shape {tensor.shape}, which is not that of {names[0]}."
        )
    begin = tensor.begin
    for i in range(stacked[0] if stacked else 1):
        for name, rows in zip(names, parts, strict=True):
            shape = (rows, width_of(tensor))
            yield Place(name.format(i), tensor, shape, begin, heads, is_apart and bool(stacked))
            begin += rows * tensor.row_bytes


def width_of(tensor: GgufTensor) -> int:
    """Of a row: its inputs, or the bytes of their blocks."""
    return tensor.shape[-1] if tensor.type.name in PLAIN else tensor.row_bytes


def modules_of(places: Sequence[Place]) -> dict[str, Any]:
    """How modules are stored whose matrices have a scheme, as `schemes/gguf.py` reads it. Of experts, which are stored
    alike, only the first is named. CheckpointError where there are keys of latents and no values."""
    by_name = {place.name: place for place in places}
    found: dict[str, Any] = {}
    for place in places:
        if place.name.endswith(OF_KEYS):
            module = place.name.removesuffix(OF_KEYS)
            found[module] = of_latents(place, by_name.get(f"{module}{OF_VALUES}"))
        elif place.has_scheme and not place.name.endswith(OF_VALUES) and not OTHER_EXPERT.search(place.name):
            found[place.name.removesuffix(".weight")] = [place.tensor.type.name, place.turned_heads]
    return found


def of_latents(keys: Place, values: Place | None) -> dict[str, Any]:
    """The two tensors of one module: their types, and the sizes of heads."""
    if values is None:
        raise CheckpointError(f"{keys.tensor.path} has {keys.tensor.name}, but no such values. Download it again.")
    heads, _, key_dim = keys.tensor.shape
    return {
        "keys": keys.tensor.type.name,
        "values": values.tensor.type.name,
        "heads": heads,
        "key_dim": key_dim,
        "value_dim": values.tensor.shape[-2],
    }

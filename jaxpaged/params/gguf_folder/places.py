"""Where the tensors of a checkpoint lie in a GGUF file, under the names that a checkpoint has for them.

Matrices are read from the file, by a scheme where they are in blocks or their rows in another order. Vectors, which may
have other numbers than in a checkpoint, are small, and become tensors of their own.

Letters: D width of the model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.blocks import DECODERS, PLAIN
from jaxpaged.params.formats.gguf.reader import GgufTensor
from jaxpaged.params.gguf_folder.architectures import OUTSIDE, Architecture
from jaxpaged.params.gguf_folder.facts import Facts, numbers_of
from jaxpaged.params.schemes.gguf import rows_in_file

LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
WHOLE = re.compile(r"(\w+)\.(weight|bias)")
ROPE = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that say how positions rotate (`description.py`)."""
QUERY, KEY = "attn_q", "attn_k"
GATE_OF_SHARED = "ffn_gate_inp_shexp"
"""A vector that a checkpoint has as a matrix of one row."""


@dataclass(frozen=True)
class Place:
    """A matrix of a checkpoint, or one of an expert, in a file: `shape` is that of its rows there, in bytes where they
    are in blocks. `turned_heads` as in `schemes/gguf.py`."""

    name: str
    tensor: GgufTensor
    shape: tuple[int, int]
    begin: int
    turned_heads: int

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.tensor.row_bytes

    @property
    def has_scheme(self) -> bool:
        return self.turned_heads > 0 or self.tensor.type.name not in PLAIN


def places_and_vectors(facts: Facts, architecture: Architecture) -> tuple[list[Place], dict[str, np.ndarray]]:
    """(matrices, vectors) of all tensors. Raises CheckpointError for those that are unknown, or of types that are not
    read."""
    places, vectors = list[Place](), dict[str, np.ndarray]()
    for tensor in facts.tensors.values():
        if ROPE.fullmatch(tensor.name):
            continue
        kind, own_name, name = checkpoint_name(tensor, facts, architecture)
        heads = turned_heads(facts, own_name) if architecture.turned else 0
        if kind == "bias" or len(tensor.shape) == 1:
            vectors[name] = vector_of(tensor, own_name, heads, architecture.less_one)
        else:
            places += places_of(name, tensor, heads)
    return places, vectors


def checkpoint_name(tensor: GgufTensor, facts: Facts, architecture: Architecture) -> tuple[str, str, str]:
    """("weight" or "bias", the file's name inside of a layer, the checkpoint's name), with braces for numbers of
    experts. CheckpointError for a tensor that no such model has."""
    if (found := LAYER.fullmatch(tensor.name)) and found[2] in architecture.layer:
        return found[3], found[2], f"model.layers.{found[1]}.{architecture.layer[found[2]]}.{found[3]}"
    if (found := WHOLE.fullmatch(tensor.name)) and found[1] in OUTSIDE:
        return found[2], found[1], f"{OUTSIDE[found[1]]}.{found[2]}"
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
    if own_name == GATE_OF_SHARED:
        return vector[None]
    return vector - np.float32(1) if less_one and own_name.endswith("norm") else vector


def places_of(name: str, tensor: GgufTensor, heads: int) -> Iterator[Place]:
    """A matrix, or those of all experts one behind the other. CheckpointError for types that are not read."""
    kind = tensor.type.name
    if kind not in PLAIN and kind not in DECODERS:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has the type {kind}, which is not read; {', '.join([*PLAIN, *DECODERS])} "
            "are. Choose a file of another quantisation."
        )
    *stacked, outputs, inputs = tensor.shape
    if len(stacked) != name.count("{}"):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has the shape {tensor.shape}, which is not that of {name}."
        )
    shape = (outputs, inputs if kind in PLAIN else tensor.row_bytes)
    for i in range(stacked[0] if stacked else 1):
        yield Place(name.format(i), tensor, shape, tensor.begin + i * outputs * tensor.row_bytes, heads)

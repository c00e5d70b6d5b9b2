"""Facts of a GGUF file, each checked for its kind: a wrong one is an error that names it."""

from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.blocks import PLAIN, decoded
from jaxpaged.params.formats.gguf.reader import GgufHeader, GgufTensor, mapped_rows

KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list"}

HARMLESS = frozenset(
    "vocab_size tensor_data_layout rope.scaling.finetuned pooling_type attention.layer_norm_epsilon".split()
)
"""Facts of an architecture that change nothing."""
NEUTRAL = {"attention.causal": (True,), "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_ext_factor": (1, -1)}
"""Those that change nothing as long as they have one of these values."""


class Facts:
    """Those of one file. `own` facts are named after the architecture."""

    def __init__(self, header: GgufHeader):
        self.all, self.tensors, self.path = header.facts, header.tensors, header.paths[0]
        self.read: set[str] = set()
        self.architecture = self.text("general.architecture", "")

    def text(self, name: str, default: str | None = None) -> Any:
        return self._value(name, str, default)

    def flag(self, name: str, default: bool) -> bool:
        return self._value(name, bool, default)

    def number(self, name: str, default: float | None = None) -> Any:
        """A number of either kind."""
        self.read.add(name)
        found = self.all.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float | None):
            raise self.error(name, found, "a number")
        return found

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        found = self._value(name, int, default)
        if found is None or isinstance(found, bool) or found < 1:
            raise self.error(name, found, "a whole number of at least 1")
        return found

    def whole(self, name: str) -> int | None:
        """A whole number, such as a token id; None where nothing is said."""
        return self._value(name, int, None)

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty where it is not there."""
        found = self.all.get(name, [])
        if not isinstance(found, list):
            raise self.error(name, found, "a list of texts")
        return found

    def numbers(self, name: str) -> list[Any]:
        """A list of numbers; empty where it is not there."""
        self.read.add(name)
        found = self.all.get(name, np.zeros(0))
        if not isinstance(found, np.ndarray):
            raise self.error(name, found, "a list of numbers")
        return found.tolist()

    def own_name(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    @property
    def num_layers(self) -> int:
        """Of the model, without those behind it that predict further tokens."""
        further = self.whole(self.own_name("nextn_predict_layers")) or 0
        return self.own_count("block_count") - further

    def own_count(self, name: str, default: int | None = None) -> int:
        """A whole number, or a list of one for each layer, which must be equal where there are any."""
        full = self.own_name(name)
        self.read.add(full)
        found = self.all.get(full)
        if isinstance(found, np.ndarray):
            different = sorted({*found.tolist()} - {0})
            if len(different) != 1:
                raise CheckpointError(
                    f"{self.path}: {full} is {different[:4]}, another number in different layers. Such models are not "
                    "supported."
                )
            return int(different[0])
        return self.count(full, default)

    def own_counts(self, name: str) -> list[int]:
        """A whole number for each layer: a list of them, or one and the same."""
        full = self.own_name(name)
        if not isinstance(self.all.get(full), np.ndarray):
            return [self.count(full)] * self.num_layers
        found = self.numbers(full)[: self.num_layers]
        if len(found) < self.num_layers or not all(type(count) is int and count > 0 for count in found):
            raise self.error(full, found, f"{self.num_layers} whole numbers of at least 1")
        return found

    def own_number(self, name: str, default: float | None = None) -> Any:
        return self.number(self.own_name(name), default)

    def own_text(self, name: str, default: str | None = None) -> Any:
        return self.text(self.own_name(name), default)

    def tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}. Download it again.")
        return self.tensors[name]

    def _value(self, name: str, kind: type, default: Any) -> Any:
        self.read.add(name)
        found = self.all.get(name, default)
        if found is not None and not isinstance(found, kind):
            raise self.error(name, found, KINDS[kind])
        return found

    def refuse_unread(self) -> None:
        """CheckpointError for a fact of the architecture that nobody read, unless it changes nothing."""
        start = f"{self.architecture}."
        for name, found in self.all.items():
            own = name.removeprefix(start)
            if own == name or name in self.read or own in HARMLESS:
                continue
            is_single = not isinstance(found, np.ndarray | list)
            if is_single and (found in NEUTRAL[own] if own in NEUTRAL else not found):
                continue
            raise CheckpointError(
                f"{self.path}: the fact {name} is {str(found)[:80]}. Nothing is known of it, and it may change what "
                "the model computes. Serve the model's safetensors version."
            )

    def error(self, name: str, found: Any, wanted: str) -> CheckpointError:
        text = repr(found)[:80]
        return CheckpointError(f"{self.path}: the fact {name} is {text}; it must be {wanted}. Download the file again.")


def numbers_of(tensor: GgufTensor) -> np.ndarray:
    """float32 [all numbers] of a small tensor. CheckpointError for one in blocks."""
    if tensor.type.name not in PLAIN:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has type {tensor.type.name}; it must be F32.")
    with mapped_rows(tensor) as rows:
        plain = decoded(rows, tensor.type)
        assert isinstance(plain, np.ndarray)
        return plain.astype(np.float32).reshape(-1)

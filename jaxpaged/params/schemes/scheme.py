"""A scheme: the tensors that there are in place of one weight. A quantization: which modules have which scheme.

Each format has lists of its own of what it leaves as it was, and an own way to match their entries with modules, which
is said here once for all (`Rule`).

Letters: I inputs and O outputs of a matrix.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jaxpaged.params.formats.stored_weight import Rows, StoredWeight

FLOATS = ("F32", "BF16", "F16")
"""The types of scales."""
LINEAR, HEAD, EMBEDDING, OTHER = "Linear", "head", "Embedding", ""
"""What a module may be: lists name the classes Linear, which a head is too, and Embedding."""


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors of a weight. `end` follows the module's name, in some files one of `others`. `dtypes` are
    those that it may have, as safetensors spells them, and `shapes` as well. `is_optional`: it may be missing.
    `is_read`: weights are made of it; else it is left where it is."""

    end: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False
    is_read: bool = True
    others: tuple[str, ...] = ()


def of_activations(*ends: str, dtypes: tuple[str, ...] = FLOATS) -> tuple[StoredTensor, ...]:
    """Scales and zeros of activations, which stay where they are."""
    return tuple(StoredTensor(end, dtypes, ((), (1,)), is_optional=True, is_read=False) for end in ends)


class Scheme(Protocol):
    """How one weight is stored. Schemes are frozen, and equal where they say the same."""

    @property
    def title(self) -> str:
        """`GPTQ of 4 bits in groups of 128`."""

    @property
    def numbers(self) -> "Numbers":
        """What kind of numbers there are, which decides what a weight can be on a device."""

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        """Of a matrix [O, I]. Raises ValueError where there is none of these sizes."""

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        """Some outputs of a matrix of so many inputs, of its tensors by their ends. Raises ValueError for numbers that
        cannot be."""


@dataclass(frozen=True)
class Numbers:
    """`values` is the name of the smallest type that holds them, float4_e2m1fn included. So many inputs of an output
    have a scale in common as `group` says; None: all of them. `may_be_ordered`: groups may be of inputs from
    anywhere."""

    values: str
    group: int | None = None
    has_zeros: bool = False
    may_be_ordered: bool = False


EXACT, INSIDE, NAMED, PATTERN, GLOB, CLASS = "exact", "inside", "named", "pattern", "glob", "class"
"""How an entry of a list is compared with the name of a module: equal; a part of it; its name, its last names, or the
name of what it is in; a regular expression that matches its beginning; with wildcards; with its class."""


@dataclass(frozen=True)
class Rule:
    """Modules that `entry` matches, by one of the ways above, are stored by `scheme`, or as they were if it is None."""

    how: str
    entry: str
    scheme: Scheme | None

    def matches(self, module: str, kind: str) -> bool:
        entry = self.entry
        if self.how == CLASS:
            return entry == kind or (entry == LINEAR and kind == HEAD)
        if self.how == INSIDE:
            return entry in module
        if self.how == NAMED:
            return f".{module}.".startswith(f".{entry}.") or f".{module}".endswith(f".{entry}")
        if self.how == PATTERN:
            return re.match(entry, module) is not None
        if self.how == GLOB:
            return fnmatch.fnmatchcase(module, entry)
        return module == entry


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of how its weights are stored.

    `method` is what the makers of the format call it, `source` the file that says so. The first of the `rules` that
    matches a module counts; a linear module that none matches has the scheme `default`. `says_which`: the checkpoint
    lists what it left as it was. Where it does not, its files are asked, whose answers are `plain` and `stored`: names
    of modules that are stored otherwise than it seemed. `facts` is what pages of keys and values are named by.
    """

    method: str
    source: str
    rules: tuple[Rule, ...]
    default: Scheme | None
    says_which: bool
    facts: str
    plain: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()

    def scheme_of(self, module: str, kind: str) -> Scheme | None:
        """How the weight of a module is stored; None: as it was."""
        kind = LINEAR if module in self.stored else kind
        rule = self.rule_of(module, kind)
        if rule is not None and rule.how != CLASS:
            return rule.scheme
        if module in self.plain:
            return None
        if rule is not None:
            return rule.scheme
        return self.default if kind == LINEAR else None

    def rule_of(self, module: str, kind: str) -> Rule | None:
        """The rule that says so, if one does."""
        names = tuple(spellings(module))
        return next((rule for rule in self.rules if any(rule.matches(name, kind) for name in names)), None)

    def only_named(self) -> "Quantization":
        """The same, with nothing understood of modules that no rule names."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule.how != CLASS), default=None)

    def asks_files(self, module: str, kind: str) -> bool:
        """Whether only the files know how a module is stored: nothing names it, and it is none of those of which it is
        understood."""
        rule = self.rule_of(module, kind)
        is_named = rule is not None and rule.how != CLASS
        return not is_named and (not self.says_which or kind != LINEAR)


PREFIXES = (
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head", "language_model.lm_head"),
    ("vision_tower.", "model.vision_tower."),
    ("visual.", "model.visual."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
"""How names of modules of a text model begin -> how they may begin in lists of a model that sees, too."""


def spellings(module: str) -> Iterator[str]:
    """The names under which lists may have a module."""
    yield module
    for own, other in PREFIXES:
        if module.startswith(own):
            yield other + module.removeprefix(own)

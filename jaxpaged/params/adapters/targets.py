"""Which matrices of a model an adapter can change: all that its specs describe as such, without a list of models.

A `Linear` has the path of its node in the tree of parameters, a table that of its leaf. Knows letters and no layers.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpaged.params.encoded import STACK, WEIGHT
from jaxpaged.params.quantized import OF_TOWERS
from jaxpaged.params.spec import Spec

LINEAR, EXPERTS, ROUTER, EMBEDDING, HEAD, CLASSIFIER, ABSORBED, TOWER = (
    "linear",
    "experts",
    "router",
    "embedding",
    "head",
    "classifier",
    "absorbed",
    "tower",
)
"""Kinds of targets. `ABSORBED`: one that queries or values of latent attention take in, and no product of its own."""

OF_POSITIONS = "g"
"""The letter of a learned table of positions, which no adapter changes."""

EMBED_TOKENS = re.compile(r"embed_tokens$")
OF_SCORES = re.compile(r"\.score(\.|$)")
"""Paths of what makes scores or labels of a vector, in a model that pools."""
TIED_HEAD = "lm_head"


@dataclass(frozen=True)
class Target:
    """A matrix that an adapter can change.

    `path`: of the `Linear`, or of the table, in the tree of parameters, as `jax.tree_util.keystr` writes it. `spec`: of
    its weight. `outputs` and `inputs`: its letters, without E or e, which experts have before them. `is_tied`: the
    output head of a model that has one table for it and for embeddings; then `path` leads to nothing in the tree, and
    `spec` is the table's.
    """

    path: str
    spec: Spec
    kind: str
    outputs: str
    inputs: str
    is_tied: bool = False

    @property
    def module(self) -> str:
        """What the checkpoint calls it; `{}` is in place of the number of an expert."""
        return TIED_HEAD if self.is_tied else self.spec.hf_name.removesuffix(f".{WEIGHT}")

    @property
    def is_experts(self) -> bool:
        return self.spec.stored_dims.startswith("E") and self.kind == EXPERTS

    @property
    def attribute(self) -> str:
        """What the layer calls it: `gate_proj`."""
        return self.path.rpartition(".")[2]


def targets_of(specs: Any) -> dict[str, Target]:
    """Path -> target, of all that adapters can change in a model with these specs."""
    leaves = jax.tree_util.tree_flatten_with_path(specs)[0]
    found = [target_of(jax.tree_util.keystr(path), spec) for path, spec in leaves]
    targets = {target.path: target for target in found if target is not None}
    tables = [target for path, target in targets.items() if EMBED_TOKENS.search(path)]
    is_pooling = hasattr(specs, "score")  # `models/pooling.py`: such a model has no head, or a classifier
    if not is_pooling and not any(target.kind == HEAD for target in targets.values()):
        for table in tables:
            path = EMBED_TOKENS.sub(TIED_HEAD, table.path)
            targets[path] = replace(table, path=path, kind=HEAD, is_tied=True)
    return targets


def target_of(path: str, spec: Spec) -> Target | None:
    """What a parameter is to an adapter; None: nothing."""
    axes = spec.hf_dims.split(" ")
    is_experts = spec.dims.startswith("e")
    num_axes = 3 if is_experts else 2
    has_weight = spec.hf_name.endswith(f".{WEIGHT}") or STACK.fullmatch(spec.hf_name) is not None
    if len(axes) != num_axes or not has_weight or axes[0] == OF_POSITIONS:
        return None
    inputs = axes[-1]
    outputs = spec.dims[is_experts : len(spec.dims) - len(inputs)]
    return Target(path.removesuffix(f".{WEIGHT}"), spec, kind_of_target(spec), outputs, inputs)


def kind_of_target(spec: Spec) -> str:
    first = spec.dims[0]
    if first == "e":
        return EXPERTS
    if OF_TOWERS & set(spec.dims):
        return TOWER
    if first == "E":
        return ROUTER
    if first in "VXi":  # the last are kinds of tokens
        return HEAD if spec.hf_name == f"{TIED_HEAD}.{WEIGHT}" else EMBEDDING
    if first == "Y":
        return CLASSIFIER
    return ABSORBED if spec.within else LINEAR

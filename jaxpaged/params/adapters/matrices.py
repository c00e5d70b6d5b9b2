"""The factors of a change, from the layouts of PEFT's files to those of one matrix each.

A module is a matrix with outputs O and inputs I as the checkpoint has it; it may be several parameters of the model end
to end, of which each takes its own outputs. Knows shapes, and neither files nor names.

Letters: P numbers of a rank, X the outputs of a module, which may be those of several parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxpaged.params.adapters.adapter import AdapterWeights
from jaxpaged.params.adapters.names import GATE_UP, Place
from jaxpaged.params.adapters.targets import Target
from jaxpaged.params.placing import extent, own_rows, stored_shape

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Factors:
    """Of one matrix, in float32: `a` [P, I], `b` [O, P] with the scaling in it, `magnitude` [O], or [I] of a table."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None


def own_outputs(place: Place, target: Target, sizes: Sizes) -> np.ndarray:
    """Which outputs of a module are those of one of its targets, in order."""
    if place.projection == GATE_UP and not target.spec.fused:  # the checkpoint has a tensor for each
        own = extent(target.outputs, sizes)
        return np.arange(own) + own * list(place.targets).index(target)
    if place.projection and place.projection != GATE_UP:  # a matrix of its own, whatever the checkpoint has
        return np.arange(extent(target.outputs, sizes))
    return own_rows(replace(target.spec, transposed=False), sizes)


def module_shape(place: Place, sizes: Sizes) -> tuple[int, int]:
    """(outputs, inputs) of a module."""
    first = place.targets[0]
    inputs = extent(first.inputs, sizes)
    if place.projection:
        return sum(extent(target.outputs, sizes) for target in place.targets), inputs
    return stored_shape(replace(first.spec, transposed=False), sizes)[-2], inputs


def cut(factors: Factors, place: Place, target: Target, sizes: Sizes) -> Factors:
    """Those of one of a module's targets."""
    if len(place.targets) == 1 and not target.spec.fused:
        return factors
    rows = own_outputs(place, target, sizes)
    magnitude = None if factors.magnitude is None else factors.magnitude[rows]
    return Factors(factors.a, factors.b[rows], magnitude)


def of_table(a_PV: np.ndarray, b_DP: np.ndarray, scaling: float, magnitude_D: np.ndarray | None) -> Factors:
    """Of an embedding, whose A reads tokens: as a matrix with outputs V and inputs D."""
    return Factors(as_float32(b_DP.T), as_float32(a_PV.T) * np.float32(scaling), magnitude_D)


def of_matrix(a_PI: np.ndarray, b_XP: np.ndarray, scaling: float, magnitude_X: np.ndarray | None = None) -> Factors:
    return Factors(as_float32(a_PI), as_float32(b_XP) * np.float32(scaling), magnitude_X)


def as_float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


# ---- experts in one parameter ----------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Which of an experts' block's parameters two tensors adapt. `is_turned`: A reads what are outputs, and B writes
    what are inputs."""

    place: Place
    is_turned: bool


def stack_of(
    a: tuple[int, ...], b: tuple[int, ...], place: Place, sizes: Sizes, is_old: bool, is_transposed: bool
) -> Stack | None:
    """The parameter that tensors of these shapes adapt; None: they fit none.

    PEFT before 0.19 (`is_old`) took inputs for outputs, unless a model stores its experts so (`is_transposed`). Where
    both numbers are equal, only that tells the layout.
    """
    if len(a) != 2 or len(b) != 2:
        return None
    by_name = {target.attribute: target for target in place.targets}
    for projection, attributes in ((GATE_UP, ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        if not all(attribute in by_name for attribute in attributes):
            continue
        whole = replace(place, targets=[by_name[attribute] for attribute in attributes], projection=projection)
        outputs, inputs = module_shape(whole, sizes)
        if (b[0], a[1]) == (outputs, inputs) and (outputs != inputs or not is_old or is_transposed):
            return Stack(whole, False)
        if (b[0], a[1]) == (inputs, outputs):
            return Stack(whole, True)
    return None


def of_stack(a: np.ndarray, b: np.ndarray, scaling: float, num_experts: int, is_turned: bool) -> list[Factors]:
    """Of each expert, of a parameter with all of them: A [E x P, inputs] has experts slowest, and B [outputs, P x E]
    has them fastest."""
    a_EPI = as_float32(a).reshape(num_experts, -1, a.shape[1])
    b_EXP = (as_float32(b) * np.float32(scaling)).reshape(b.shape[0], -1, num_experts).transpose(2, 0, 1)
    if is_turned:
        return [Factors(b_XP.T, a_PI.T) for a_PI, b_XP in zip(a_EPI, b_EXP, strict=True)]
    return [Factors(a_PI, b_XP) for a_PI, b_XP in zip(a_EPI, b_EXP, strict=True)]


# ---- what the model uses ---------------------------------------------------------------------------


def weights_of(target: Target, pieces: Mapping[int | None, Factors], sizes: Sizes) -> AdapterWeights:
    """The factors of a target, in its axes, in float32: of its only piece, or of those of its experts. Experts without
    one, and numbers behind those of a smaller rank, are zeros. The magnitude is the trained one."""
    outputs, inputs = ([sizes[letter] for letter in letters] for letters in (target.outputs, plain(target.inputs)))
    if not target.is_experts:
        piece = pieces[None]
        return AdapterWeights(piece.a.reshape(-1, *inputs), piece.b.reshape(*outputs, -1), piece.magnitude)
    rank = max(piece.a.shape[0] for piece in pieces.values())
    a_EPI = np.zeros((sizes["E"], rank, extent(target.inputs, sizes)), np.float32)
    b_EOP = np.zeros((sizes["E"], extent(target.outputs, sizes), rank), np.float32)
    for expert, piece in pieces.items():
        a_EPI[expert, : len(piece.a)], b_EOP[expert, :, : len(piece.a)] = piece.a, piece.b
    return AdapterWeights(a_EPI.reshape(sizes["E"], rank, *inputs), b_EOP.reshape(sizes["E"], *outputs, rank))


def plain(letters: str) -> str:
    """Without an axis of size 1 that the model does without."""
    return letters.replace("1", "")


def product(weights: AdapterWeights, target: Target) -> np.ndarray:
    """b @ a, in the axes of the target."""
    if not target.is_experts:
        return np.tensordot(weights.b, weights.a, 1)
    return np.stack([np.tensordot(b, a, 1) for a, b in zip(weights.a, weights.b, strict=True)])

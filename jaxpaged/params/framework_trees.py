"""Weights in the trees of frameworks that train: from them to the checkpoint's names, and back.

What is missing of a tree or left over in it is an error that names it, and so is a weight of the model that a layout
has no place for. Knows letters and `tree_layouts.py`; what a model is comes in as specs. flax is not imported.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from jaxpaged.errors import CheckpointError, UsageError, did_you_mean
from jaxpaged.params.spec import Spec
from jaxpaged.params.tree_layouts import LAYOUTS, MAPPINGS, NNX, Layers, Layout, Row

LAYER = re.compile(r".*\blayers\.(\d+)\.")
EMBEDDING = "embed_tokens.weight"
ROOTS = ("params", "base", "model")
"""What frameworks have around the whole tree."""
PADDED = "padded"
"""The step of arrays that may have more rows of the vocabulary than the model."""
MOST_NAMED = 5

Sizes = Mapping[str, int]
CONDITIONS: dict[str, Callable[[Sizes], bool]] = {
    "N>K": lambda sizes: sizes["N"] > sizes["K"],
    "N=K": lambda sizes: sizes["N"] == sizes["K"],
}


@dataclass(frozen=True)
class Named:
    """A model's weights: checkpoint name -> its parameter; letter -> size; the class that config.json names, and how it
    stretches angles of positions."""

    specs: Mapping[str, Spec]
    sizes: Sizes
    architecture: str
    rope_type: str

    @classmethod
    def of(cls, config: Any, specs: Iterable[Spec]) -> Self:
        """Those of a model's config, of some of its parameters."""
        sizes = config.dim_sizes()
        ropes = [layer.rope.rope_type for layer in config.layers if layer.rope is not None]
        names = {name: spec for spec in specs for name in spec.tensor_names(sizes)}
        return cls(names, sizes, config.architecture, ropes[0] if ropes else "default")

    @property
    def prefix(self) -> str:
        """What the names of layers begin with."""
        found = [name.removesuffix(EMBEDDING) for name in self.specs if name.endswith(EMBEDDING)]
        return found[0] if found else "model."

    @property
    def num_layers(self) -> int:
        return 1 + max((int(found[1]) for name in self.specs if (found := LAYER.match(name))), default=-1)


@dataclass
class Leaf:
    """An array of a tree. `axes`: the letters of each axis. `counted`: those of axes that number tensors; `tensors`:
    the numbers there -> name in the checkpoint."""

    axes: tuple[str, ...]
    counted: str = ""
    steps: Sequence[str] = ()
    tensors: dict[tuple[int, ...], str] = field(default_factory=dict)

    @property
    def letters(self) -> str:
        """One for each axis, none merged."""
        return "".join(self.axes).replace("1", "")

    def numbers(self, letter: str) -> list[int]:
        """Those that an axis of tensors has."""
        return sorted({place[self.counted.index(letter)] for place in self.tensors})

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Of the array with no axes merged."""
        return tuple(len(self.numbers(each)) if each in self.counted else sizes[each] for each in self.letters)

    def merged(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the array itself, given `shape`."""
        size_of = dict(zip(self.letters, shape))
        return tuple(math.prod(size_of.get(each, 1) for each in group) for group in self.axes)

    def takes(self, shape: Sequence[int], sizes: Sizes) -> bool:
        """Whether an array may have a shape: heads apart or merged, and rows of the vocabulary that are too many."""
        wanted, found = self.shape(sizes), tuple(shape)
        if PADDED in self.steps and len(found) == len(wanted):
            at = self.letters.index("V")
            found = (*found[:at], min(found[at], wanted[at]), *found[at + 1 :])
        return found in (wanted, self.merged(wanted))

    def index(self, place: Sequence[int]) -> tuple[Any, ...]:
        """Where a tensor lies."""
        at = {letter: self.numbers(letter).index(number) for letter, number in zip(self.counted, place)}
        return tuple(at.get(each, slice(None)) for each in self.letters)


# ---- which arrays there are ----------------------------------------------------------------------


def leaves_of(mapping: str, layout: Layout | None, layers: Layers | None, model: Named) -> dict[str, Leaf]:
    """Path -> array, for all weights of a model. Raises CheckpointError for those that the layout has no place for."""
    leaves: dict[str, Leaf] = {}
    found = nnx_tensors(model) if layout is None or layers is None else layout_tensors(layout, layers, model)
    for path, leaf, place, name in found:
        if name in model.specs:
            leaves.setdefault(path, leaf).tensors[place] = name
    have = {name for leaf in leaves.values() for name in leaf.tensors.values()}
    if left := [name for name in model.specs if name not in have]:
        raise CheckpointError(f"the mapping {mapping} has no place for {listed(left)} of {model.architecture}.")
    return leaves


Tensors = Iterator[tuple[str, Leaf, tuple[int, ...], str]]
"""(path, an array without tensors, place there, name in the checkpoint), of names that a model may have."""


def layout_tensors(layout: Layout, layers: Layers, model: Named) -> Tensors:
    """Those of a table."""
    for row in layout.rows:
        if all(CONDITIONS[step](model.sizes) for step in row.steps if step in CONDITIONS):
            yield from row_tensors(row, layers, model)


def row_tensors(row: Row, layers: Layers, model: Named) -> Tensors:
    num_layers = model.num_layers if row.is_of_layer else 1
    num_whole = num_layers - num_layers % layers.period if layers.rest else num_layers
    steps = [step for step in row.steps if step not in CONDITIONS]
    own_experts = "{E}" in row.tensors[0]
    for layer in range(num_layers):
        where = layers.path if layer < num_whole else layers.rest or layers.path
        axes = groups_of(row.axes)
        if row.is_of_layer and layers.stacked and layer < num_whole:
            axes = (*axes[:1], "L", *axes[1:])
        counted = "".join(each for each in axes if each in "L2" or (each == "E" and own_experts))
        side = layers.sides[layer % len(layers.sides)]
        within = where.format(L=layer, I=layer // layers.period, P=layer % layers.period)
        path = f"{within}.{row.path[1:].format(side=side)}" if row.is_of_layer else row.path
        for expert in range(model.sizes.get("E", 0) if own_experts else 1):
            for part, tensor in enumerate(row.tensors):
                at = {"L": layer, "E": expert, "2": part}
                name = tensor.format(L=layer, E=expert).replace("~", model.prefix)
                yield path, Leaf(axes, counted, steps), tuple(at[each] for each in counted), name


def nnx_tensors(model: Named) -> Tensors:
    """Those of modules that have the checkpoint's names: kernels are [in, out], merged or not."""
    for name, spec in model.specs.items():
        module, _, end = name.rpartition(".")
        axes = tensor_axes(spec)
        own = {"weight": "kernel" if len(axes) > 1 else "scale"}.get(end, end)
        if name.endswith(EMBEDDING):
            own = "embedding"
        yield f"{module}.{own}", Leaf(axes[::-1] if own == "kernel" else axes), (), name


def groups_of(axes: str) -> tuple[str, ...]:
    """The letters of each axis of a row: brackets are around those of one axis."""
    return tuple(several or one for several, one in re.findall(r"\((\w+)\)|(\w)", axes))


def tensor_axes(spec: Spec) -> tuple[str, ...]:
    """The letters of each axis of one of a parameter's tensors. Raises CheckpointError where it is a part of one."""
    if spec.fused or spec.transposed:
        raise CheckpointError(
            f"{spec.hf_name} holds several parameters in the checkpoint, and no mapping divides them."
        )
    axes = tuple(spec.hf_dims.split(" "))
    return axes[1:] if spec.is_stacked else axes


# ---- from a tree, and to one -----------------------------------------------------------------------


def named_tensors(tree: Any, mapping: str, model: Named, is_partial: bool = False) -> dict[str, np.ndarray]:
    """The weights of a tree by the checkpoint's names, copied to the host. `is_partial`: not all have to be there.

    Raises UsageError for a mapping or an architecture that is not known, and CheckpointError for leaves that are
    missing, left over, deleted or of another shape.
    """
    arrays = inside(flat(tree), mapping)
    leaves = checked_leaves(arrays, mapping, model, is_partial)
    found: dict[str, np.ndarray] = {}
    for path, array in arrays.items():
        found |= tensors_of_leaf(path, array, leaves[path], model)
    return found


def checked_leaves(arrays: Mapping[str, Any], mapping: str, model: Named, is_partial: bool) -> dict[str, Leaf]:
    """What the arrays of a tree are, of which only paths and shapes are looked at. Raises what `named_tensors` does."""
    _, leaves = fitting(arrays, mapping, model)
    left = [path for path in arrays if path not in leaves]
    missing = [path for path in leaves if path not in arrays]
    if left:
        raise CheckpointError(
            f"the tree has {listed(left)}, which {model.architecture} has not as {mapping} keeps it."
            f"{did_you_mean(left[0], missing)}"
        )
    if missing and not is_partial:
        raise CheckpointError(f"the tree lacks {listed(missing)} of {model.architecture} as {mapping} keeps it.")
    for path, array in arrays.items():
        if not leaves[path].takes(array.shape, model.sizes):
            wanted = leaves[path].merged(leaves[path].shape(model.sizes))
            raise CheckpointError(f"{path} has shape {array.shape}, but the model makes it {wanted}.")
    return leaves


def tree_of(tensors: Mapping[str, Any], mapping: str, model: Named, stacked: bool = False) -> dict[str, Any]:
    """Weights by the checkpoint's names as a framework's tree of dicts, on the host. `stacked`: where it may keep its
    layers in one array, it does. Raises UsageError, and CheckpointError where one is missing."""
    ways = ways_of(mapping, model)
    layout, layers = ([way for way in ways if way[1] is not None and way[1].stacked == stacked] or ways)[0]
    tree: dict[str, Any] = {}
    for path, leaf in leaves_of(mapping, layout, layers, model).items():
        if missing := [name for name in leaf.tensors.values() if name not in tensors]:
            raise CheckpointError(f"{listed(missing)} is missing, of which {path} is made.")
        *above, last = path.split(".")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf_of_tensors(leaf, tensors, model)
    return tree


def ways_of(mapping: str, model: Named) -> list[tuple[Layout | None, Layers | None]]:
    """How a framework may keep a model. Raises UsageError."""
    if mapping not in MAPPINGS:
        raise UsageError(f"mapping is {mapping!r}.{did_you_mean(mapping, MAPPINGS)} There are {', '.join(MAPPINGS)}.")
    if mapping == NNX:
        return [(None, None)]
    layouts = [
        each
        for each in LAYOUTS[mapping]
        if model.architecture in each.architectures and each.rope_type in (None, model.rope_type)
    ]
    if not layouts:
        known = ", ".join(dict.fromkeys(name for each in LAYOUTS[mapping] for name in each.architectures))
        raise UsageError(
            f"the mapping {mapping} has no table for {model.architecture}; it has those of {known}. Send arrays by the "
            "checkpoint's names."
        )
    return [(layouts[0], layers) for layers in layouts[0].layers]


def fitting(arrays: Mapping[str, Any], mapping: str, model: Named) -> tuple[int, dict[str, Leaf]]:
    """How many arrays have a path of the best way in which a framework may keep the model, and its leaves."""
    found = [leaves_of(mapping, *way, model) for way in ways_of(mapping, model)]
    return max(((len(arrays.keys() & each.keys()), each) for each in found), key=lambda pair: pair[0])


def tensors_of_leaf(path: str, array: Any, leaf: Leaf, model: Named) -> dict[str, np.ndarray]:
    """The tensors of one array."""
    if getattr(array, "is_deleted", lambda: False)():
        raise CheckpointError(f"{path} was deleted: a program that it was donated to has its memory.")
    whole, shape = np.asarray(array), leaf.shape(model.sizes)
    if PADDED in leaf.steps and whole.ndim == len(shape):
        at = leaf.letters.index("V")
        whole = whole[(slice(None),) * at + (slice(shape[at]),)]
    whole = whole.reshape(shape)
    found = {}
    for place, name in leaf.tensors.items():
        letters, axes = own_letters(leaf), tensor_axes(model.specs[name])
        piece = stepped(whole[leaf.index(place)], letters, leaf.steps, model.sizes, back=True)
        in_order = piece.transpose([letters.index(each) for each in spelled(axes, letters)])
        found[name] = in_order.reshape([math.prod(model.sizes.get(each, 1) for each in group) for group in axes])
    return found


def leaf_of_tensors(leaf: Leaf, tensors: Mapping[str, Any], model: Named) -> np.ndarray:
    """One array of a tree."""
    shape = leaf.shape(model.sizes)
    first = np.asarray(tensors[next(iter(leaf.tensors.values()))])
    whole = np.empty(shape, first.dtype)
    for place, name in leaf.tensors.items():
        letters = own_letters(leaf)
        stored = spelled(tensor_axes(model.specs[name]), letters)
        piece = np.asarray(tensors[name]).reshape([model.sizes[each] for each in stored])
        piece = piece.transpose([stored.index(each) for each in letters])
        whole[leaf.index(place)] = stepped(piece, letters, leaf.steps, model.sizes, back=False)
    return whole.reshape(leaf.merged(shape))


def own_letters(leaf: Leaf) -> str:
    """Those of one of its tensors."""
    return "".join(each for each in leaf.letters if each not in leaf.counted)


def spelled(axes: Sequence[str], letters: str) -> str:
    """The letters of a tensor's axes, in their order there; of queries that lie beside as many keys those of keys."""
    stored = "".join(axes).replace("1", "")
    stored = stored if "N" in letters else stored.replace("N", "K")
    assert sorted(stored) == sorted(letters), f"a table says {letters}, but the checkpoint has {stored}"
    return stored


# ---- numbers ---------------------------------------------------------------------------------------


def stepped(piece: np.ndarray, letters: str, steps: Sequence[str], sizes: Sizes, *, back: bool) -> np.ndarray:
    """The numbers of one tensor after all steps, or after undoing them. They are made in float32, and rounded once."""
    changing = [step for step in steps if step != PADDED]
    if not changing:
        return piece
    numbers = piece.astype(np.float32)
    for step in reversed(changing) if back else changing:
        numbers = STEPS[step](numbers, letters, sizes, back)
    return numbers.astype(piece.dtype)


def plus_one(x: np.ndarray, letters: str, sizes: Sizes, back: bool) -> np.ndarray:
    """Norms with their whole factor, where the checkpoint has how far it is from 1."""
    return x - 1 if back else x + 1


def times_root_width(x: np.ndarray, letters: str, sizes: Sizes, back: bool) -> np.ndarray:
    """Embeddings with the scale that the model multiplies by."""
    root = np.float32(sizes["D"] ** 0.5)
    return x / root if back else x * root


def over_root_head(x: np.ndarray, letters: str, sizes: Sizes, back: bool) -> np.ndarray:
    """Queries with the scale of attention scores."""
    root = np.float32(sizes["H"] ** 0.5)
    return x * root if back else x / root


def in_pairs(x: np.ndarray, letters: str, sizes: Sizes, back: bool) -> np.ndarray:
    """Heads whose numbers are rotated with their neighbours; the checkpoint's are with those of the other half."""
    assert letters[-1] == "H", letters
    if back:
        return np.concatenate([x[..., ::2], x[..., 1::2]], -1)
    return np.stack(np.split(x, 2, -1), -1).reshape(x.shape)


STEPS: dict[str, Callable[[np.ndarray, str, Sizes, bool], np.ndarray]] = {
    "plus_one": plus_one,
    "times_root_D": times_root_width,
    "over_root_H": over_root_head,
    "pairs": in_pairs,
}


# ---- trees -------------------------------------------------------------------------------------------


def flat(tree: Any) -> dict[str, Any]:
    """Path -> array, of dicts, lists, `nnx.State`, `nnx.Param`, or a module of nnx, of which parameters are taken.
    Raises CheckpointError for what is no array."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    return dict(walked(tree, ""))


def inside(arrays: Mapping[str, Any], mapping: str) -> Mapping[str, Any]:
    """The arrays by their paths below what frameworks have around a tree."""
    roots = ROOTS if mapping in LAYOUTS else ROOTS[:1]
    while any(arrays and all(path.startswith(f"{root}.") for path in arrays) for root in roots):
        arrays = {path.partition(".")[2]: array for path, array in arrays.items()}
    return arrays


def walked(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) or (isinstance(node, list | tuple) and not hasattr(node, "shape")):
        items = node.items() if isinstance(node, Mapping) else enumerate(node)
        for key, child in items:
            yield from walked(child, f"{path}.{key}" if path else str(key))
        return
    if node is None:
        return
    value = node.get_value() if hasattr(node, "get_value") else node
    path = path.removesuffix(".value")  # as flax writes its variables
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise CheckpointError(f"{path or 'the tree'} is a {type(value).__name__}, and no array.")
    yield path, value


def listed(names: Sequence[str]) -> str:
    """Some names, for people."""
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more

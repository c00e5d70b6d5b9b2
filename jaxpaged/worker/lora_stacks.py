"""The stacks of an engine's adapters: which parameters have some, what shapes they have, how they lie on devices, and
an adapter's own part of them, which moves into a slot.

A part travels as few arrays: for each device all that it gets, one array of each type. So moving an adapter is one
transfer of each and one program, however many layers there are.

Letters: S slots, X devices, B numbers of a device.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import ConfigError
from jaxpaged.layers.lora import ExpertStack, LoraStack, LoraStacks, TableStack, WholeStack
from jaxpaged.models.joined import concatenated
from jaxpaged.params.adapters.adapter import AdapterWeights
from jaxpaged.params.adapters.targets import (
    ABSORBED,
    EMBED_TOKENS,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LINEAR,
    OF_SCORES,
    ROUTER,
    TOWER,
    Target,
)
from jaxpaged.params.placing import cut
from jaxpaged.params.sharding import (
    MESH_AXES_OF,
    Split,
    bytes_on_device,
    num_ranks,
    partition_spec,
    sizes_on,
)
from jaxpaged.worker.expert_placing import first_experts

KINDS = frozenset((LINEAR, ROUTER, EXPERTS, ABSORBED))
"""Of targets that have stacks where nothing else is asked for."""
ALL_LINEAR = "all-linear"
"""What PEFT calls all of these."""
SMALL_RANK = 16
"""Ranks of the first part of stacks: adapters of at most so many pay for no more."""

OF_EMBEDS = frozenset("muD")
"""Letters of a tower's layers behind the one in which patches become embeddings."""
OF_TOWER = ".vision"
"""What the parameters of a tower are called among all (`models/seeing.py`)."""

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What a parameter is called that lies in place of several (`models/joined.py`)."""


@dataclass(frozen=True)
class Stacked:
    """A linear layer that has stacks: of one target, or of those whose weights lie side by side. Ranks are then those
    of one target behind those of the other."""

    targets: tuple[Target, ...]
    sizes: Mapping[str, int]
    stored_sizes: Mapping[str, int]

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in self.targets[0].inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        shapes = [self._outputs_of(target) for target in self.targets]
        if len(shapes) == 1:
            return shapes[0]
        return (shapes[-1][0], sum(shape[0] // shapes[-1][0] for shape in shapes), *shapes[0][1:])

    def _outputs_of(self, target: Target) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in target.outputs)

    @property
    def is_whole(self) -> bool:
        """Whether every device has all of it, whatever its axes are."""
        return self.targets[0].spec.whole

    @property
    def in_axes(self) -> PartitionSpec:
        return PartitionSpec(*[None] * len(self.inputs)) if self.is_whole else partition_spec(self.targets[0].inputs)

    @property
    def out_axes(self) -> PartitionSpec:
        if self.is_whole:
            return PartitionSpec(*[None] * len(self.outputs))
        first, *others = partition_spec(self.targets[0].outputs)
        return PartitionSpec(first, *([None] if len(self.targets) > 1 else []), *others)

    def split(self, mesh: Mesh | AbstractMesh) -> Split | None:
        """Over which axes the layer is split; None: there is one device."""
        if mesh.size == 1 or self.is_whole:
            return None
        first = self.targets[0]
        return Split(mesh, MESH_AXES_OF.get(first.outputs[0]), MESH_AXES_OF.get(first.inputs[0]))

    # ---- an adapter's own part -------------------------------------------------------------------

    @property
    def is_experts(self) -> bool:
        return self.targets[0].kind == EXPERTS

    @property
    def is_table(self) -> bool:
        """Whether rows of it are looked up."""
        return self.targets[0].kind == EMBEDDING

    @property
    def reads_embeds(self) -> bool:
        """Whether a layer of a tower computes rows of embeddings, and not of patches."""
        return any(not OF_EMBEDS.isdisjoint((*target.outputs, *target.inputs)) for target in self.targets)

    @property
    def growing(self) -> tuple[tuple[int, ...], PartitionSpec]:
        """The axes of what DoRA scales, and how they lie."""
        return (self.inputs, self.in_axes) if self.is_table else (self.outputs, self.out_axes)

    def slot_axes(self) -> tuple[int, int, int]:
        """Which axes of `a`, of `b` and of what DoRA scales by are the slots."""
        return (1, 1 + len(self.outputs), 1) if self.is_experts else (0, 0, 0)

    def part_of_experts(self, weights: Mapping[str, AdapterWeights], ranks: range) -> tuple[np.ndarray, np.ndarray]:
        """(a [e, r, inputs...], b [e, outputs..., r]) of some ranks; zeros where none are."""
        (target,), num_places = self.targets, self.sizes["e"]
        a = np.zeros((num_places, len(ranks), *self.inputs), np.float32)
        b = np.zeros((num_places, *self.outputs, len(ranks)), np.float32)
        if (own := weights.get(target.path)) is not None:
            own_a, own_b = own.a[:, ranks.start : ranks.stop], own.b[..., ranks.start : ranks.stop]
            if own.magnitude is not None:
                own_b = own_b * own.magnitude[..., None]
            expert_e = first_experts(len(own_a), num_places)
            a[:, : own_a.shape[1]], b[..., : own_b.shape[-1]] = own_a[expert_e], own_b[expert_e]
        return a, b

    def part_of_table(self, weights: Mapping[str, AdapterWeights], ranks: range) -> tuple[np.ndarray, np.ndarray]:
        """(a [r, D], b [V, r]) of some ranks; zeros where none are."""
        (target,) = self.targets
        a, b = np.zeros((len(ranks), *self.inputs), np.float32), np.zeros((*self.outputs, len(ranks)), np.float32)
        if (own := weights.get(target.path)) is not None:
            own_a, own_b = own.a[ranks.start : ranks.stop].astype(np.float32), own.b[..., ranks.start : ranks.stop]
            a[: len(own_a)] = own_a if own.magnitude is None else own_a * own.magnitude
            b[: len(own_b), : own_b.shape[1]] = own_b
        return a, b

    def part_of(self, weights: Mapping[str, AdapterWeights], ranks: range) -> tuple[np.ndarray, np.ndarray]:
        """(a [r, inputs...], b [r, outputs...]) of some ranks, in the sizes of devices, zeros where none are."""
        if self.is_experts:
            return self.part_of_experts(weights, ranks)
        if self.is_table:
            return self.part_of_table(weights, ranks)
        count = len(ranks)
        a = np.zeros((len(self.targets), count, *self.inputs), np.float32)
        parts_b = []
        for i, target in enumerate(self.targets):
            shape = self._outputs_of(target)
            part_b = np.zeros((len(self.targets), count, *shape), np.float32)
            if (own := weights.get(target.path)) is not None:
                own_a = own.a[ranks.start : ranks.stop]
                own_b = np.moveaxis(own.b[..., ranks.start : ranks.stop], -1, 0)
                if own.magnitude is not None:
                    own_b = own_b * own.magnitude
                a[i, : len(own_a)] = self._placed(own_a, target.inputs)
                part_b[i, : len(own_b)] = self._placed(own_b, target.outputs)
            parts_b.append(part_b.reshape(len(self.targets) * count, *shape))
        return a.reshape(-1, *self.inputs), self._joined(parts_b)

    def growth_of(self, weights: Mapping[str, AdapterWeights]) -> np.ndarray:
        """Float32 [outputs...], [e, outputs...] of experts, [D] of a table: by how much more W x, or rows, count."""
        if self.is_experts:
            return self._growth_of_experts(weights.get(self.targets[0].path))
        parts = []
        for target in self.targets:
            shape, letters = self._outputs_of(target), target.outputs
            if self.is_table:
                shape, letters = self.inputs, target.inputs
            part, own = np.zeros((1, *shape), np.float32), weights.get(target.path)
            if own is not None and own.magnitude is not None:
                part = self._placed(own.magnitude[None] - np.float32(1), letters)
            parts.append(part)
        return self._joined(parts)[0]

    def _growth_of_experts(self, own: AdapterWeights | None) -> np.ndarray:
        num_places = self.sizes["e"]
        if own is None or own.magnitude is None:
            return np.zeros((num_places, *self.outputs), np.float32)
        return own.magnitude[first_experts(len(own.magnitude), num_places)] - np.float32(1)

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """[r, outputs...] of those of each target."""
        return parts[0] if len(parts) == 1 else concatenated(1, *parts, arrays=np)

    def _placed(self, array: np.ndarray, letters: str) -> np.ndarray:
        """[r, ...] with the axes of these letters in the sizes of devices."""
        for axis, letter in enumerate(letters, start=1):
            full = self.sizes[letter]
            array = cut(array, axis, letter, range(full), full, self.stored_sizes[letter])
        return array


SCORING = ("score", "classifier")
"""Modules that PEFT trains as a whole, which make scores of vectors."""


def scores_of(specs: Any, sizes: Mapping[str, int], modules: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    """Path -> shape of what makes scores of vectors, unless `modules` leave it out; empty for other models."""
    if modules is not None and not {ALL_LINEAR, *SCORING} & {*modules}:
        return {}
    leaves = [(jax.tree_util.keystr(path), spec) for path, spec in jax.tree_util.tree_flatten_with_path(specs)[0]]
    return {path: tuple(sizes[letter] for letter in spec.dims) for path, spec in leaves if OF_SCORES.match(path)}


def is_wanted(target: Target, modules: Sequence[str] | None, with_tower: bool = False) -> bool:
    """Whether a target has stacks: those of linear layers, or of these modules alone. Embeddings of tokens and the
    output head have some where they are named, a tower where `with_tower` says so."""
    named = modules or (ALL_LINEAR,)
    is_named = target.module.rpartition(".")[2] in named or target.attribute in named
    if OF_SCORES.match(target.path):  # each adapter has all of these as a whole
        return False
    if target.kind == HEAD or (target.kind == EMBEDDING and EMBED_TOKENS.search(target.path)):
        return is_named
    is_layer = target.kind in KINDS or (with_tower and target.kind == TOWER)
    if not is_layer or not target.outputs:  # a vector is no linear layer
        return False
    return is_named or ALL_LINEAR in named


def check_modules(targets: Mapping[str, Target], modules: Sequence[str] | None, with_tower: bool) -> None:
    """Raise ConfigError when no target of a model is among `modules`."""
    if not any(is_wanted(target, modules, with_tower) for target in targets.values()):
        known = ", ".join(sorted({target.attribute for target in targets.values()}))
        raise ConfigError(f"lora_target_modules are {modules}, and no module of the model is one. There are {known}.")


@dataclass(frozen=True, eq=False)
class LoraSpec:
    """The stacks of an engine, or of a stage of it, known from shapes. `linears`: by path in the parameters that
    programs of tokens take; `max_rank` and `dtype` are those of all adapters. `scores`: the shapes of what makes scores
    of vectors, by path, of which adapters have their own."""

    max_loras: int
    max_rank: int
    dtype: Any
    mesh: Mesh | AbstractMesh
    linears: Mapping[str, Stacked]
    scores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> tuple[range, ...]:
        """The ranks of each part."""
        small = min(SMALL_RANK, self.max_rank)
        return tuple(each for each in (range(small), range(small, self.max_rank)) if each)

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """The stacks by path, as shapes with shardings: `LoraStacks` and, of scores, `WholeStack`."""
        stacks: dict[str, Any] = {path: self._stacks_of(linear) for path, linear in self.linears.items()}
        whole = NamedSharding(self.mesh, PartitionSpec())
        for path, shape in self.scores.items():
            values = jax.ShapeDtypeStruct((self.max_loras, *shape), jnp.float32, sharding=whole)
            stacks[path] = WholeStack(values, jax.ShapeDtypeStruct((self.max_loras,), jnp.float32, sharding=whole))
        return stacks

    def _stacks_of(self, linear: Stacked) -> LoraStacks:
        if linear.is_experts:
            return self._stacks_of_experts(linear)

        def shape(sizes: tuple[int, ...], axes: PartitionSpec, dtype: Any, *ranks: int) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec(None, *[None] * len(ranks), *axes)
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct((self.max_loras, *ranks, *sizes), dtype, sharding=sharding)

        def part(ranks: range) -> LoraStack:
            if linear.is_table:  # whole on every device: what it is added to is
                a = shape(linear.inputs, linear.in_axes, self.dtype, len(ranks))
                b = shape((*linear.outputs, len(ranks)), PartitionSpec(None, None), self.dtype)
                return TableStack(a, b)
            count = len(linear.targets) * len(ranks)
            return LoraStack(
                shape(linear.inputs, linear.in_axes, self.dtype, count),
                shape(linear.outputs, linear.out_axes, self.dtype, count),
            )

        return LoraStacks(tuple(map(part, self.ranks)), shape(*linear.growing, jnp.float32))

    def _stacks_of_experts(self, linear: Stacked) -> LoraStacks:
        (places,) = partition_spec("e", num_ranks(self.mesh))

        def shape(axes: PartitionSpec, dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, PartitionSpec(places, *axes))
            return jax.ShapeDtypeStruct((linear.sizes["e"], *sizes), dtype, sharding=sharding)

        def part(ranks: range) -> ExpertStack:
            return ExpertStack(
                shape(a_axes, self.dtype, self.max_loras, len(ranks), *linear.inputs),
                shape(linear.out_axes, self.dtype, *linear.outputs, self.max_loras, len(ranks)),
            )

        a_axes, growth_axes = PartitionSpec(None, None, *linear.in_axes), PartitionSpec(None, *linear.out_axes)
        growth = shape(growth_axes, jnp.float32, self.max_loras, *linear.outputs)
        return LoraStacks(tuple(map(part, self.ranks)), growth)

    @property
    def num_bytes(self) -> int:
        """Of each device."""
        return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(self.shapes))

    def level_of(self, rank: int, grows: bool) -> int:
        """The least level that an adapter needs."""
        return 1 if not grows and rank <= self.ranks[0].stop else self.num_levels

    @property
    def num_levels(self) -> int:
        """Levels of programs: no adapter is 0, the first part of the stacks 1, and the last one has all parts, and what
        DoRA scales by, which costs other adapters a fifth of their launches on a GPU."""
        return 2

    def changes_layers(self, weights: Mapping[str, AdapterWeights]) -> bool:
        """Whether an adapter changes what layers make of all tokens, and not tables alone."""
        return not self.layers.isdisjoint(weights)

    @cached_property
    def head(self) -> str | None:
        """Whose stacks are those of the output head, if some are."""
        return next((path for path, linear in self.linears.items() if linear.targets[0].kind == HEAD), None)

    @cached_property
    def tower(self) -> Mapping[str, str]:
        """Of the encoder of pictures the paths in its own parameters -> those in all (`models.seeing.tower_of`)."""
        own = [path for path, linear in self.linears.items() if linear.targets[0].kind == TOWER]
        return {path.partition(OF_TOWER)[2]: path for path in own}

    def tower_stacks(self, stacks: Mapping[str, Any]) -> dict[str, Any]:
        """Its stacks, of all, by its own paths."""
        return {own: stacks[path] for own, path in self.tower.items()}

    def changes_tower(self, weights: Mapping[str, AdapterWeights]) -> bool:
        targets = (target for path in self.tower.values() for target in self.linears[path].targets)
        return any(target.path in weights for target in targets)

    @property
    def of_lines(self) -> tuple[str, ...]:
        """Whose stacks belong to what is computed of single hidden states: the head, or what makes scores."""
        return tuple(self.scores) if self.head is None else (self.head,)

    @cached_property
    def layers(self) -> frozenset[str]:
        """The targets that are parts of layers."""
        targets = (target for linear in self.linears.values() for target in linear.targets)
        return frozenset(target.path for target in targets if target.kind in KINDS)

    @cached_property
    def paths(self) -> frozenset[str]:
        """The targets that have stacks here, by their paths in the whole model."""
        return frozenset(target.path for linear in self.linears.values() for target in linear.targets)

    # ---- what moves into a slot ------------------------------------------------------------------

    @cached_property
    def pieces(self) -> tuple["Piece", ...]:
        """Where each leaf of the stacks finds a slot's part in what travels."""
        ends, pieces = dict.fromkeys(self.dtypes, 0), []
        for leaf, (path, axis) in zip(jax.tree.leaves(self.shapes), self._slot_axes(), strict=True):
            name = jnp.dtype(leaf.dtype).name
            shape = without(axis, leaf.sharding.shard_shape(leaf.shape))
            begin = ends[name]
            ends[name] = end = begin + math.prod(shape)
            are_experts = path in self.linears and self.linears[path].is_experts
            pieces.append(Piece(name, slice(begin, end), shape, axis, path.rpartition(".")[0] if are_experts else ""))
        return tuple(pieces)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The types of the arrays that travel, in their order."""
        return tuple(dict.fromkeys(jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(self.shapes)))

    @cached_property
    def upload(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes [X, B] of what travels: a line for each device."""
        of_devices = NamedSharding(self.mesh, PartitionSpec(tuple(self.mesh.axis_names)))
        return tuple(
            jax.ShapeDtypeStruct((self.mesh.size, self._length(name)), jnp.dtype(name), sharding=of_devices)
            for name in self.dtypes
        )

    def _length(self, name: str) -> int:
        return max(piece.place.stop for piece in self.pieces if piece.dtype == name)

    def pack(
        self, weights: Mapping[str, AdapterWeights], replaced: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> tuple[dict[int, np.ndarray], ...]:
        """What travels of an adapter: for each type the lines of this process's devices, by place in the mesh.
        `replaced`: see `Adapter`."""
        places = {device: place for place, device in enumerate(self.mesh.devices.flat)}
        local = [device for device in places if device.process_index == jax.process_index()]
        lines = tuple(
            {places[device]: np.empty(self._length(name), jnp.dtype(name)) for device in local} for name in self.dtypes
        )
        leaves = jax.tree.leaves(self.shapes)
        for piece, leaf, array in zip(self.pieces, leaves, self._arrays(weights, replaced), strict=True):
            axes = (*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec)))
            own = NamedSharding(self.mesh, PartitionSpec(*without(piece.axis, axes)))
            indices = own.devices_indices_map(array.shape)
            for device in local:
                line = lines[self.dtypes.index(piece.dtype)][places[device]]
                line[piece.place] = array[indices[device]].reshape(-1)
        return lines

    def _arrays(
        self, weights: Mapping[str, AdapterWeights], replaced: Mapping[str, np.ndarray]
    ) -> Iterator[np.ndarray]:
        """A slot's part of every leaf, in the order of the tree, which is that of sorted paths."""
        for path in sorted((*self.linears, *self.scores)):
            if path in self.scores:
                yield replaced.get(path, np.zeros(self.scores[path], np.float32))
                yield np.asarray(path in replaced, np.float32)
                continue
            for ranks in self.ranks:
                yield from self.linears[path].part_of(weights, ranks)
            yield self.linears[path].growth_of(weights)

    def _slot_axes(self) -> Iterator[tuple[str, int]]:
        """Whose every leaf is, and which axis of it is the slots, in the same order."""
        for path in sorted((*self.linears, *self.scores)):
            if path in self.scores:
                axes: Sequence[int] = (0, 0)
            else:
                *of_part, of_growth = self.linears[path].slot_axes()
                axes = (*of_part * len(self.ranks), of_growth)
            yield from ((path, axis) for axis in axes)


@dataclass(frozen=True)
class Piece:
    """Where a part of a stack is in the array of its type, its shape on one device, and which axis of the stack is the
    slots. `block`: of experts the path of their block; what travels has them where they are when weights are loaded."""

    dtype: str
    place: slice
    shape: tuple[int, ...]
    axis: int
    block: str = ""


def without(axis: int, sizes: Sequence[Any]) -> tuple[Any, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def of_stage(whole: Mapping[str, Target], own: Mapping[str, Target]) -> dict[str, Target]:
    """The targets of a stage by their paths in it; each has its own path in the whole model. A stage without the head
    looks as if its table were the head, too."""
    of_parameter = lambda target: (target.spec.hf_name, target.spec.part, target.is_tied)
    paths = {of_parameter(target): target.path for target in whole.values()}
    there = {path: target for path, target in own.items() if of_parameter(target) in paths}
    return {path: replace(target, path=paths[of_parameter(target)]) for path, target in there.items()}


def lora_spec(
    targets: Mapping[str, Target],
    params: Any,
    sizes: Mapping[str, int],
    mesh: Mesh | AbstractMesh,
    *,
    max_loras: int,
    max_rank: int,
    dtype: Any,
    modules: Sequence[str] | None = None,
    with_tower: bool = False,
    prefix: str = "",
    scores: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> LoraSpec:
    """The stacks for some of a model's targets. `params`: shapes of the parameters as programs take them, in which
    weights may be joined, and whose targets are below `prefix`. `sizes`: letter -> size in the checkpoint."""
    wanted = {path: target for path, target in targets.items() if is_wanted(target, modules, with_tower)}
    there = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    placed, linears = sizes_on(mesh, sizes), dict[str, Stacked]()
    joined = {part: name for name, parts in JOINED.items() for part in parts}
    for path, target in wanted.items():
        block, _, attribute = path.rpartition(".")
        name = joined.get(attribute, attribute)
        if name != attribute and any(each.startswith(f"{prefix}{block}.{name}.") for each in there):
            # All of them have a place, also where some are not wanted.
            parts = [targets[f"{block}.{part}"] for part in JOINED[name]]
            linears[f"{prefix}{block}.{name}"] = Stacked(tuple(parts), placed, sizes)
        else:
            linears[f"{prefix}{path}"] = Stacked((target,), placed, sizes)
    return LoraSpec(max_loras, max_rank, dtype, mesh, linears, scores)

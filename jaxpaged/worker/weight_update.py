"""Other weights for an engine under way, in place of those that it has: what came is checked, then put on the devices.

Weights are replaced parameter by parameter, and each old one is freed when its new one is there, so that the most
memory is that of all weights and one parameter more. Where weights are joined (`models/joined.py`) it is one block
more. The largest one is made first, before any is replaced: if there is room for it, there is room for all that follow.
Programs take parameters as arguments, so nothing is compiled anew.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpaged.config.offer_address import is_offer
from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.layers.experts import Experts
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models.decoder import Attention
from jaxpaged.models.drafted import DraftedParams
from jaxpaged.models.joined import joined_params
from jaxpaged.params.arriving import ArrivingWeights, Model
from jaxpaged.params.framework_trees import Named, checked_leaves, inside, named_tensors, ways_of
from jaxpaged.params.offered import pulled
from jaxpaged.params.orbax_trees import read_tree
from jaxpaged.params.patches import why_not
from jaxpaged.params.quantized import is_quantized
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.safetensors_reader import TensorEntry
from jaxpaged.params.sharding import bytes_on_device, param_shapes
from jaxpaged.params.spec import Spec
from jaxpaged.worker.engine_spec import EngineSpec

JOINED = (Attention, Mlp, Experts)
"""Blocks whose weights may be joined."""


class Made(NamedTuple):
    """Parameters that are on the devices before they are needed, and of which block of a stage."""

    place: int
    params: Any


class WeightUpdate:
    """An update that was begun. Raises UsageError for an engine whose weights cannot be updated."""

    def __init__(self, stages: Sequence[EngineSpec], is_partial: bool):
        if stages[-1].config.parallel.expert_balance is not None:
            raise UsageError("experts are moved between devices while the engine runs (eplb), so weights stay.")
        self._stages, self._models = stages, [Model(stage.specs, stage.decoder) for stage in stages]
        self._arriving = ArrivingWeights(self._models, is_partial)
        self._first: dict[int, Made] = {}  # by stage

    def add(self, weights: Any, mapping: str | None) -> int:
        """See `ArrivingWeights.add`, or `named_by_framework` with a mapping; returns how many bytes have come. Raises
        CheckpointError, ServerError, UsageError."""
        self._arriving.settle()
        if mapping is not None:
            weights = named_by_framework(self._stages, weights, mapping, self._arriving.is_partial)
        self._arriving.add(weights)
        return self._arriving.num_bytes

    def sums_of_last(self) -> dict[str, int]:
        """See `ArrivingWeights.sums_of_last`."""
        return self._arriving.sums_of_last()

    def take_back(self) -> int:
        """See `ArrivingWeights.take_back`; returns how many bytes are left."""
        self._arriving.take_back()
        return self._arriving.num_bytes

    def check(self) -> None:
        """Raise CheckpointError unless all is there that is to be replaced."""
        self._arriving.check_complete()
        for stage, model in zip(self._stages, self._models):
            for block in jax.tree.leaves(model.specs, is_leaf=self._is_block(stage)):
                came = [self._arriving.brings(spec) for spec in jax.tree.leaves(block)]
                if any(came) and not all(came):
                    missing = jax.tree.leaves(block)[came.index(False)]
                    raise CheckpointError(
                        f"{missing.hf_name} did not come, but its weights lie beside others on this device that did. "
                        "Send all weights of a block together."
                    )
            self._check_parts(stage, model)

    def _check_parts(self, stage: EngineSpec, model: Model) -> None:
        """Raise CheckpointError for a parameter of which a part came, and which only can be replaced as a whole."""
        specs = jax.tree.leaves(model.specs)
        parts = [spec for spec in specs if self._arriving.brings(spec) and not self._arriving.brings_all(spec)]
        if not parts:
            return
        shapes = param_shapes(model.specs, model.config, stage.mesh, stage.dtype)
        own = dict(zip(specs, jax.tree.leaves(shapes, is_leaf=is_quantized), strict=True))
        blocks = jax.tree.leaves(model.specs, is_leaf=self._is_block(stage))
        alone = {block for block in blocks if isinstance(block, Spec)}
        for spec in parts:
            why = why_not(spec, own[spec], model.config.dim_sizes())
            if why is None and spec not in alone:
                why = "it lies beside others on this device"
            if why is not None:
                raise CheckpointError(f"a part of {spec.hf_name} came, but {why}. Send all of it.")

    @property
    def is_complete(self) -> bool:
        """Whether nothing stays of the old weights."""
        return all(self._arriving.brings_all(spec) for model in self._models for spec in jax.tree.leaves(model.specs))

    def make_first(self, params: Any) -> None:
        """Make the largest block that is to be replaced of each stage, beside all that is there. Where memory is too
        little this raises, and nothing was replaced."""
        size = lambda before: sum(map(bytes_on_device, jax.tree.leaves(before)))
        for number, part in enumerate(self._parts(params)):
            blocks, _ = self._blocks(number, part)
            sizes = {place: size(before) for place, (block, before) in enumerate(blocks) if self._brings(block)}
            if sizes:
                place = max(sizes, key=sizes.__getitem__)
                made = self._made(number, *blocks[place], Rooms())
                self._first[number] = Made(place, jax.block_until_ready(made))

    def replace(self, params: Any, release: Callable[[Any], None]) -> Any:
        """The parameters with what came in them. `release` frees those that are replaced."""
        parts = tuple(self._replaced(i, part, release) for i, part in enumerate(self._parts(params)))
        decoder = parts if len(parts) > 1 else parts[0]
        return params.replace(decoder=decoder) if isinstance(params, DraftedParams) else decoder

    def _parts(self, params: Any) -> Sequence[Any]:
        """The parameters of each stage, without a draft's."""
        params = params.decoder if isinstance(params, DraftedParams) else params
        return params if len(self._stages) > 1 else [params]

    def _is_block(self, stage: EngineSpec) -> Callable[[Any], bool]:
        kinds = (Spec, *JOINED) if stage.joins_weights else Spec
        return lambda node: isinstance(node, kinds)

    def _blocks(self, number: int, params: Any) -> tuple[list[tuple[Any, Any]], Any]:
        """Each block of a stage with its parameters, and their tree."""
        blocks, tree = jax.tree.flatten(self._models[number].specs, is_leaf=self._is_block(self._stages[number]))
        return list(zip(blocks, tree.flatten_up_to(params), strict=True)), tree

    def _brings(self, block: Any) -> bool:
        """Whether anything of a block has come."""
        return any(self._arriving.brings(spec) for spec in jax.tree.leaves(block))

    def _replaced(self, number: int, params: Any, release: Callable[[Any], None]) -> Any:
        """`replace` of a stage. What was made first goes first, and leaves its room to the others."""
        blocks, tree = self._blocks(number, params)
        rooms, found = Rooms(), [before for _, before in blocks]
        if (first := self._first.pop(number, None)) is not None:
            release(found[first.place])
            found[first.place] = first.params
        for place, (block, before) in enumerate(blocks):
            if self._brings(block) and (first is None or place != first.place):
                found[place] = self._made(number, block, before, rooms)
                release(before)
        return tree.unflatten(found)

    def _made(self, number: int, block: Any, before: Any, rooms: Rooms) -> Any:
        """The parameters of a block with what came, on their devices."""
        if isinstance(block, Spec) and not self._arriving.brings_all(block):
            return self._arriving.changed(block, before)
        stage, model = self._stages[number], self._models[number]
        load = lambda spec: self._arriving.placed(spec, model, stage.mesh, stage.dtype, rooms)
        make = lambda: jax.tree.map(load, block)
        return joined_params(make) if stage.joins_weights else make()


def named_by_framework(stages: Sequence[EngineSpec], weights: Any, mapping: str, is_partial: bool) -> dict[str, Any]:
    """Arrays by the checkpoint's names, of a framework's tree: itself, or where it is, an orbax checkpoint's path or
    the address of an offer, which is pulled if all of it fits. Raises CheckpointError, ServerError, UsageError."""
    model = Named.of(stages[-1].decoder, [spec for stage in stages for spec in jax.tree.leaves(stage.specs)])
    ways_of(mapping, model)  # raises for a mapping that the model has not, before anything is read

    def all_that_fit(entries: Sequence[TensorEntry]) -> Sequence[TensorEntry]:
        checked_leaves(inside({entry.name: entry for entry in entries}, mapping), mapping, model, is_partial)
        return entries

    if isinstance(weights, Sequence):
        if len(weights) != 1:
            raise UsageError(
                f"{len(weights)} paths or addresses came with the mapping {mapping}, which takes one. Begin an update "
                "with is_partial, and send one after the other."
            )
        [source] = weights
        if is_offer(source):
            weights = {tensor.name: tensor.array for tensor in pulled(source, all_that_fit)}
        else:
            weights = read_tree(Path(source))
    return named_tensors(weights, mapping, model, is_partial)


def adopted(tree: Any, params: Any) -> Any:
    """Parameters of somebody else's arrays, in the structure of `params`. Arrays that lie as the engine's do are taken
    as they are, without a copy; others are converted by way of the host. Raises CheckpointError."""
    wanted, structure = jax.tree_util.tree_flatten_with_path(params)
    if (found := jax.tree.structure(tree)) != structure:
        raise CheckpointError(
            f"the tree has {found.num_leaves} arrays, the engine's parameters {structure.num_leaves}, and they are not "
            "of one structure. Give what `apply_model(lambda params: params)` returns, with other arrays in it, or "
            "arrays by the checkpoint's names."
        )
    return structure.unflatten(
        adopted_array(jax.tree_util.keystr(path), leaf, own)
        for (path, own), leaf in zip(wanted, jax.tree.leaves(tree), strict=True)
    )


def adopted_array(name: str, array: Any, own: jax.Array) -> jax.Array:
    """An array in the type and on the devices of `own`."""
    if isinstance(array, jax.Array) and array.is_deleted():
        raise CheckpointError(f"params{name} was deleted: a program that it was donated to has its memory.")
    if np.shape(array) != own.shape:
        raise CheckpointError(f"params{name} has shape {np.shape(array)}, the engine's {own.shape}.")
    if isinstance(array, jax.Array) and array.dtype == own.dtype:
        if array.sharding.is_equivalent_to(own.sharding, own.ndim):
            return array
        return jax.device_put(array, own.sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(own.shape, own.sharding, lambda index: whole[index].astype(own.dtype))

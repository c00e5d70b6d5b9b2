"""An adapter's folder -> the arrays of an `Adapter`, in the axes of the model's parameters.

Strict, since an adapter that loads and does nothing, or something else, is found by nobody: every tensor is used, each
is there with its partner in the shapes of the model, and ranks are those of the configuration. Knows letters and names,
and no devices.

Letters: E experts of a block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.config.lora import ADAPTER_CONFIG, RANKS
from jaxpaged.errors import CheckpointError, did_you_mean
from jaxpaged.params.adapters import names
from jaxpaged.params.adapters.adapter import Adapter, AdapterWeights
from jaxpaged.params.adapters.description import WITH_PEFT
from jaxpaged.params.adapters.folder import WEIGHTS, AdapterFiles, read_files
from jaxpaged.params.adapters.matrices import (
    Factors,
    Sizes,
    cut,
    module_shape,
    of_matrix,
    of_stack,
    of_table,
    stack_of,
    weights_of,
)
from jaxpaged.params.adapters.names import Modules, PartName, Place
from jaxpaged.params.adapters.norms import scaled_magnitude
from jaxpaged.params.adapters.targets import EMBEDDING, HEAD, OF_SCORES, Target, targets_of
from jaxpaged.params.placing import stored_shape
from jaxpaged.params.spec import Spec

OTHER_MODEL = (
    f"Check that the adapter belongs to this model: base_model_name_or_path in its {ADAPTER_CONFIG} names the one that "
    "it was trained for."
)
MERGE = "Merge it into its model with `jaxpaged merge`, and serve the folder that you get."
BaseWeight = Callable[[Spec], np.ndarray]
"""The checkpoint's own weight, in float32 and the parameter's axes (`base.BaseWeights`)."""
COPIES = (names.BASE, names.WHOLE, names.WHOLE_BIAS)
"""Parts of a module that are tensors of a checkpoint, and no factors."""
Pieces = dict[int | None, Factors]
"""Expert -> its factors; of other matrices None -> the only ones."""


@dataclass
class Module:
    """The tensors of one module: part -> tensor. `place`: None for a module that is no matrix of the model."""

    name: PartName
    place: Place | None
    parts: dict[str, np.ndarray] = field(default_factory=dict)


def read_adapter(
    folder: Path,
    specs: Any,
    config: Any,
    *,
    dtype: Any,
    max_rank: int | None = None,
    base_weight: BaseWeight | None = None,
    may_replace: bool = False,
) -> Adapter:
    """The adapter in a folder, for the model with these specs and this config, in `dtype`.

    `max_rank`: the largest that is taken; None: any. `base_weight` is asked where magnitudes (DoRA) need the norms of
    rows. They follow from the weights in the checkpoint: neither how these are split nor how an engine rounds them
    changes anything. None: there are no files. `may_replace`: any parameter may be there as a whole, and not only a
    classifier. Raises CheckpointError that names the tensor or field at fault.
    """
    files = read_files(Path(folder))
    reading = Reading(files, targets_of(specs), config.dim_sizes(), base_weight)
    for module in reading.modules():
        reading.take(module)
    replaced = reading.replaced(specs, may_replace)
    weights = reading.weights(np.dtype(dtype))
    reading.check_acts(weights, replaced)
    if max_rank is not None and reading.rank > max_rank:
        needed = next((rank for rank in RANKS if rank >= reading.rank), None)
        raise CheckpointError(
            f"{files.folder / ADAPTER_CONFIG}: the adapter has rank {reading.rank}, but max_lora_rank is {max_rank}. "
            + (f"Start with --max-lora-rank {needed}." if needed else f"Larger ones are not supported. {MERGE}")
        )
    return Adapter(files.digest, reading.rank, len(files.tensors), weights, replaced)


class Reading:
    """One adapter on its way."""

    def __init__(
        self, files: AdapterFiles, targets: Mapping[str, Target], sizes: Sizes, base_weight: BaseWeight | None
    ):
        self._files, self._targets, self._sizes, self._base_weight = files, targets, sizes, base_weight
        self._description = files.description
        self._known = Modules(targets)
        self._pieces: dict[str, Pieces] = {}
        self._whole: dict[str, np.ndarray] = {}  # name of a tensor in a checkpoint -> what replaces it
        self.rank = 1

    # ---- from tensors to modules ----

    def modules(self) -> list[Module]:
        """The tensors by module. CheckpointError for tensors of no module, or of none that the model has."""
        found: dict[str, Module] = {}
        foreign: list[str] = []
        for name, tensor in self._files.tensors.items():
            part = names.part_name(name)
            if part is None:
                raise self._error(
                    f"tensor {name} is no part of a LoRA that is known: lora_A, lora_B, lora_embedding_A, "
                    f"lora_embedding_B, lora_magnitude_vector, or a module as a whole. {WITH_PEFT}"
                )
            module = found.setdefault(part.given, Module(part, self._known.find(part.module)))
            if part.part in module.parts:
                raise self._error(f"{part.given} has two tensors that are its {part.part}. Save the adapter again.")
            module.parts[part.part] = tensor
            if module.place is None and part.part not in COPIES:
                foreign.append(name)
        if foreign:
            near = did_you_mean(names.part_name(foreign[0]).module, self._known.names())  # type: ignore[union-attr]
            raise self._error(
                f"{len(foreign)} of {len(self._files.tensors)} tensors are of modules that this model does not have, "
                f"or that no adapter can change, the first is {foreign[0]}.{near} {OTHER_MODEL}"
            )
        return list(found.values())

    def take(self, module: Module) -> None:
        """Note what the tensors of one module are. CheckpointError where they do not fit together, or the model."""
        parts = module.parts
        for copy in COPIES:
            if copy in parts:
                self._take_whole(module, copy)
        adapted = parts.keys() - COPIES
        if not adapted:
            return
        place = module.place
        assert place is not None, "modules() has refused others"
        if place.inner is not None:
            self._take_stack(module, place)
            return
        is_table = place.targets[0].kind == EMBEDDING
        reads, writes = (names.EMBEDDING_A, names.EMBEDDING_B) if is_table else (names.A, names.B)
        a, b = self._pair(module, reads, writes)
        magnitude = self._magnitude(module)
        outputs, inputs = module_shape(place, self._sizes)
        scaling = self._checked_scaling(module.name.given, reads, a, 1)
        if is_table:
            self._check_shapes(module, reads, writes, (a.shape[0], outputs), (inputs, a.shape[0]))
            factors, length = of_table(a, b, scaling, magnitude), inputs
        else:
            self._check_shapes(module, reads, writes, (a.shape[0], inputs), (outputs, a.shape[0]))
            factors, length = of_matrix(a, b, scaling, magnitude), outputs
        if magnitude is not None and magnitude.shape != (length,):
            raise self._wrong_shape(module, names.MAGNITUDE, (length,))
        self._put(module, place, place.expert, factors)

    def _take_stack(self, module: Module, place: Place) -> None:
        """The tensors of a parameter with all experts of a block."""
        given = module.name.given
        if self._description.is_dora:
            raise self._error(
                f"{given} is one parameter with all experts, and use_dora is true. PEFT has magnitudes (DoRA) of "
                "modules alone, so it is not known what they would be here. Train it without use_dora."
            )
        a, b = self._pair(module, names.A, names.B)
        first = place.targets[0].spec
        stack = stack_of(a.shape, b.shape, place, self._sizes, self._description.is_old, first.transposed)
        num_experts = self._sizes["E"]
        if stack is None or a.shape[0] != b.shape[1] or a.shape[0] % num_experts:
            raise self._error(
                f"{given} has lora_A {a.shape} and lora_B {b.shape}, which are those of no matrix of its "
                f"{num_experts} experts in PEFT's layout of target_parameters. {OTHER_MODEL}"
            )
        block = given.removesuffix(".base_layer" * (place.inner or 0))
        scaling = self._checked_scaling(f"{block}.{stack.place.projection}", names.A, a, num_experts)
        for expert, factors in enumerate(of_stack(a, b, scaling, num_experts, stack.is_turned)):
            self._put(module, stack.place, expert, factors)

    def _put(self, module: Module, place: Place, expert: int | None, factors: Factors) -> None:
        if expert is not None and expert >= self._sizes["E"]:
            raise self._error(
                f"{module.name.given} is not there: the model has {self._sizes['E']} experts. {OTHER_MODEL}"
            )
        for target in place.targets:
            pieces = self._pieces.setdefault(target.path, {})
            if expert in pieces:
                raise self._error(f"{module.name.given} is adapted twice, under two names. Save the adapter again.")
            pieces[expert] = cut(factors, place, target, self._sizes)

    # ---- checks ----

    def _pair(self, module: Module, reads: str, writes: str) -> tuple[np.ndarray, np.ndarray]:
        """A and B. CheckpointError unless both are there, and nothing of another kind."""
        given = module.name.given
        for wanted, other in ((reads, writes), (writes, reads)):
            if wanted not in module.parts:
                there = other if other in module.parts else next(iter(module.parts))
                raise self._error(f"{given} has {there} but no {wanted}. Save the adapter again, or download it again.")
        strange = module.parts.keys() - {reads, writes, names.MAGNITUDE, *COPIES}
        if strange:
            raise self._error(f"{given} has {min(strange)}, which it cannot have beside {reads}. {OTHER_MODEL}")
        a, b = module.parts[reads], module.parts[writes]
        if a.ndim != 2 or b.ndim != 2:
            raise self._error(
                f"{given} has {reads} {a.shape} and {writes} {b.shape}; both must have two axes. It was saved before "
                "its parts were gathered from the devices that trained it, or is of another kind: save it again."
            )
        return a, b

    def _magnitude(self, module: Module) -> np.ndarray | None:
        """CheckpointError unless the module has one exactly where the configuration says so."""
        found = module.parts.get(names.MAGNITUDE)
        if (found is None) == self._description.is_dora:
            state = (
                "no lora_magnitude_vector, but use_dora is true"
                if found is None
                else ("lora_magnitude_vector, but use_dora is false")
            )
            raise self._error(f"{module.name.given} has {state} in {ADAPTER_CONFIG}. Save the adapter again.")
        return None if found is None else found.astype(np.float32).reshape(-1)

    def _checked_scaling(self, name: str, part: str, a: np.ndarray, num_experts: int) -> float:
        """Of a module or parameter. CheckpointError where its rank is not that of the configuration."""
        name = f"{name}.weight" if self._description.is_parameter(f"{name}.weight") else name
        rank, wanted = a.shape[0] // num_experts, self._description.rank_of(name)
        if rank != wanted:
            raise self._error(
                f"{name} has {part} of rank {rank}, but {ADAPTER_CONFIG} makes it {wanted} (r, rank_pattern), and its "
                "scaling follows from that. Check that both files are of one adapter."
            )
        self.rank = max(self.rank, rank)
        return self._description.scaling_of(name)

    def _check_shapes(self, module: Module, reads: str, writes: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        for part, wanted in ((reads, a), (writes, b)):
            if module.parts[part].shape != wanted:
                raise self._wrong_shape(module, part, wanted)

    def _wrong_shape(self, module: Module, part: str, wanted: tuple[int, ...]) -> CheckpointError:
        what = f"{module.name.given}.{part} has shape {module.parts[part].shape}"
        place = module.place
        if place is not None and place.targets[0].kind in (EMBEDDING, HEAD):
            grown = f" Adapters of a vocabulary that was changed are not supported. {WITH_PEFT}"
        else:
            grown = f" {OTHER_MODEL}"
        return self._error(f"{what}, but this model makes it {wanted}.{grown}")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._files.folder / WEIGHTS}: {what}")

    # ---- modules as a whole ----

    def _take_whole(self, module: Module, part: str) -> None:
        """A module that was saved as a whole: trained so, or a copy of the base's, which says nothing."""
        given, tensor = module.name.given, module.parts[part]
        is_trained = part != names.BASE and any(f".{name}." in f".{given}." for name in self._description.saved)
        if is_trained:
            self._whole[f"{module.name.module}.{part}"] = tensor
            return
        place = module.place
        if (
            part == names.WHOLE_BIAS
            or place is None
            or len(place.targets) != 1
            or place.targets[0].kind not in (EMBEDDING, HEAD)
        ):
            raise self._error(
                f"tensor {given}.{part} is of no module that modules_to_save in {ADAPTER_CONFIG} names. {OTHER_MODEL}"
            )
        (target,) = place.targets
        if tensor.shape != module_shape(place, self._sizes):
            raise self._wrong_shape(module, part, module_shape(place, self._sizes))
        if self._base_weight is None or not np.array_equal(tensor.astype(np.float32), self._base_weight(target.spec)):
            raise self._error(
                f"{given} is there as a whole, and differs from the base's own, which adapters cannot change. "
                "`jaxpaged merge` writes a model with it, if modules_to_save names it."
            )

    def replaced(self, specs: Any, may_replace: bool) -> dict[str, np.ndarray]:
        """Path -> what replaces a parameter. CheckpointError for modules that the model does not have, or that are no
        classifier, unless they may be replaced."""
        if self._description.saved and not self._whole:
            raise self._error(
                f"modules_to_save in {ADAPTER_CONFIG} names {', '.join(self._description.saved)}, but no tensor is one "
                "of these. Save the adapter again."
            )
        leaves = jax.tree_util.tree_flatten_with_path(specs)[0]
        by_name = {spec.hf_name: (jax.tree_util.keystr(path), spec) for path, spec in leaves if not spec.fused}
        found = {}
        for name, tensor in self._whole.items():
            if name not in by_name:
                raise self._error(f"{name} replaces a module that this model does not have. {OTHER_MODEL}")
            path, spec = by_name[name]
            if not may_replace and not OF_SCORES.match(path):
                raise self._error(
                    f"{name} replaces a whole module (modules_to_save), which only classifiers may have beside others "
                    "in one engine. `jaxpaged merge` writes a model with it."
                )
            if tensor.shape != (wanted := stored_shape(spec, self._sizes)):
                raise self._error(f"{name} has shape {tensor.shape}, but this model makes it {wanted}. {OTHER_MODEL}")
            found[path] = tensor.astype(np.float32)
        return found

    # ---- what the model uses ----

    def weights(self, dtype: np.dtype) -> dict[str, AdapterWeights]:
        """Path -> factors in `dtype`, magnitudes over the norms of rows."""
        found = {}
        for path, pieces in self._pieces.items():
            target = self._targets[path]
            weights = weights_of(target, pieces, self._sizes)
            if self._description.is_dora:
                if self._base_weight is None:
                    raise self._error(
                        "the adapter has magnitudes (DoRA), which need the base's weights, but there are no files of "
                        "these. Load the model with its weights, or train without use_dora."
                    )
                magnitude = scaled_magnitude(target, weights, pieces, self._base_weight(target.spec))
                weights = replace(weights, magnitude=magnitude)
            with np.errstate(over="ignore"):  # it is found below
                a, b = weights.a.astype(dtype), weights.b.astype(dtype)
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise self._error(f"{target.module} has numbers that {dtype} cannot hold. Use another lora_dtype.")
            found[path] = replace(weights, a=a, b=b)
        return found

    def check_acts(self, weights: Mapping[str, AdapterWeights], replaced: Mapping[str, np.ndarray]) -> None:
        """CheckpointError for an adapter with which the model says what it says without it."""
        does = lambda each: (
            (each.a.any() and each.b.any())
            or (each.magnitude is not None and bool((abs(each.magnitude - 1) > LEAST_CHANGE).any()))
        )
        if not replaced and not any(does(each) for each in weights.values()):
            raise self._error(
                f"the adapter does nothing: lora_B or lora_A is zero in all of its {len(self._pieces)} matrices, as "
                "it is before training. Use one that was trained."
            )


LEAST_CHANGE = 1e-5
"""Of what an output is multiplied by, beyond rounding."""

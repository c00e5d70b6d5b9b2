"""Which tensors a checkpoint must hold for its specs: all of them, in their types and shapes, and no others.

What config.json and the files say of which weights were quantised must agree. Every way in which they do not is an
error of its own, before anything is read. Knows letters and headers of files, and no models.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError, did_you_mean
from jaxpaged.params.encoded import WEIGHT, matrix_names, module_of, names_of, tensors_of_matrix
from jaxpaged.params.other_formats import refuse_quantised_tensors
from jaxpaged.params.placing import stored_shape
from jaxpaged.params.safetensors_reader import DTYPES, EIGHT_BITS, WHOLE_DTYPES, TensorEntry, mapped
from jaxpaged.params.schemes.scheme import Scheme
from jaxpaged.params.spec import Spec
from jaxpaged.params.unused import check_unused

AGREE = "Download both again; or, if the weights are right, correct the list in config.json."


@dataclass(frozen=True)
class Expected:
    """A tensor of a parameter: the names that it may have, its types and its shapes."""

    spec: Spec
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    is_optional: bool = False


def dtypes_of(spec: Spec) -> Mapping[str, np.dtype]:
    """The types that a tensor of a parameter may have which nobody quantised."""
    return WHOLE_DTYPES if spec.dtype in WHOLE_DTYPES.values() else DTYPES


@contextmanager
def stored_tensors(
    spec: Spec, entries: Mapping[str, TensorEntry], sizes: Mapping[str, int]
) -> Iterator[list[np.ndarray]]:
    """The tensors of a parameter that nobody quantised, as they lie in files, which are open in the meantime. Raises
    CheckpointError for files that are damaged."""
    with ExitStack() as maps:
        yield [maps.enter_context(mapped(entries[name], dtypes_of(spec))) for name in spec.tensor_names(sizes)]


def expected_of(spec: Spec, sizes: Mapping[str, int]) -> Iterator[Expected]:
    """The tensors of a parameter."""
    shape = stored_shape(spec, sizes)
    if spec.scheme is None:
        for name in spec.tensor_names(sizes):
            shapes = (shape,) if spec.dims else (shape, ())  # a scalar is stored with an axis, or without
            yield Expected(spec, (name,), tuple(dtypes_of(spec)), shapes)
        return
    tensors = tensors_of_matrix(spec, shape)
    for name in matrix_names(spec, sizes):
        for each in tensors:
            yield Expected(spec, names_of(name, each), each.dtypes, each.shapes, each.is_optional)


def tensors_of(specs: Sequence[Spec], sizes: Mapping[str, int]) -> dict[str, Spec]:
    """Tensor name -> the parameter that it is, or belongs to."""
    all_of_them = chain.from_iterable(expected_of(spec, sizes) for spec in specs)
    return {name: each.spec for each in all_of_them for name in each.names}


def check_entries(specs: Sequence[Spec], entries: Mapping[str, TensorEntry], config: Any, folder: Path) -> None:
    """CheckpointError unless the tensors are exactly those of the specs, in their types and shapes, and others that
    have a reason (`unused.py`)."""
    sizes = config.dim_sizes()
    wanted = list(chain.from_iterable(expected_of(spec, sizes) for spec in specs))
    known = {name for each in wanted for name in each.names}
    extra = check_unused((name for name in entries if name not in known), entries, config)
    missing = [each for each in wanted if not (each.is_optional or any(name in entries for name in each.names))]
    is_quantised = any(spec.scheme is not None for spec in specs)
    if missing:
        refuse_missing(missing, len(wanted), entries, extra, folder, is_quantised)
    if extra:
        refuse_extra(extra, entries, plain_modules(specs, sizes) if is_quantised else set())
    for each in wanted:
        for name in each.names:
            if name in entries:
                check_entry(entries[name], each)


def refuse_missing(
    missing: Sequence[Expected],
    num_wanted: int,
    entries: Mapping[str, TensorEntry],
    extra: list[str],
    folder: Path,
    is_quantised: bool,
) -> None:
    """Raise CheckpointError for tensors that are not there; the first of them says why."""
    first, spec = missing[0], missing[0].spec
    name = first.names[0]
    if spec.scheme is None:
        module = name.removesuffix(f".{WEIGHT}")
        others = [each for each in extra if each.startswith(f"{module}.")]
        if others and is_quantised:
            raise disagreement(entries[others[0]], None, module)
        refuse_quantised_tensors(extra)
        raise CheckpointError(
            f"{folder}: {len(missing)} of {num_wanted} tensors are missing, the first is {name}."
            f"{did_you_mean(name, extra)} Download the model again, or check that config.json belongs to it."
        )
    plain = entries.get(f"{name.rpartition('.')[0]}.{WEIGHT}")
    if plain is not None and plain.dtype in DTYPES:
        module = plain.name.removesuffix(f".{WEIGHT}")
        raise disagreement(plain, spec.scheme, module)
    raise CheckpointError(
        f"{folder}: {name} is missing, one of {len(missing)} tensors of weights in {spec.scheme.title} that are. "
        "Download the model again, or check that config.json belongs to it."
    )


def plain_modules(specs: Sequence[Spec], sizes: Mapping[str, int]) -> set[str]:
    """Names of modules whose weights nobody quantised, so far as config.json says."""
    names = chain.from_iterable(spec.tensor_names(sizes) for spec in specs if spec.scheme is None)
    return {name.removesuffix(f".{WEIGHT}") for name in names}


def refuse_extra(extra: Sequence[str], entries: Mapping[str, TensorEntry], plain: set[str]) -> None:
    """Raise CheckpointError for tensors that nothing reads; modules of a quantised checkpoint that are `plain` have no
    others than their weights."""
    name = extra[0]
    module = name.rpartition(".")[0]
    if module in plain:
        raise disagreement(entries[name], None, module)
    raise CheckpointError(
        f"{entries[name].path}: {len(extra)} tensors are not part of the model that config.json describes, "
        f"the first is {name}. Check that config.json belongs to these weights."
    )


def check_entry(entry: TensorEntry, expected: Expected) -> None:
    """CheckpointError for a tensor of another type or shape."""
    spec = expected.spec
    if entry.dtype not in expected.dtypes:
        if spec.scheme is None and (entry.dtype in EIGHT_BITS or entry.dtype == "U8"):
            raise disagreement(entry, None, module_of(spec))
        if spec.scheme is not None and entry.dtype in DTYPES and entry.name.endswith(f".{WEIGHT}"):
            raise disagreement(entry, spec.scheme, module_of(spec))
        raise CheckpointError(
            f"{entry.path}: tensor {entry.name} has type {entry.dtype}; supported: {', '.join(expected.dtypes)}. "
            "Use the model's bfloat16, float16 or float32 version."
        )
    if entry.shape not in expected.shapes:
        stored = f" for a weight in {spec.scheme.title}" if spec.scheme else ""
        raise CheckpointError(
            f"{entry.path}: tensor {entry.name} has shape {entry.shape}, but config.json makes it "
            f"{expected.shapes[0]}{stored}. Check that config.json belongs to these weights."
        )


def disagreement(entry: TensorEntry, scheme: Scheme | None, module: str) -> CheckpointError:
    """The error for a file that has the weight of a module otherwise than config.json says."""
    said = f"says that {module} is stored in {scheme.title}" if scheme else f"does not say that {module} is quantised"
    return CheckpointError(f"config.json {said}, but {entry.path} holds {entry.name} of type {entry.dtype}. {AGREE}")

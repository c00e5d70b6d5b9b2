"""Google's names of TPU slices and machines, as the topologies that they are: `v6e-8` is `v6e:2x4`.

A slice's name ends in its number of chips for v5e and v6e, and in that of its TensorCores for v5p and tpu7x, which have
two a chip. Names of Compute Engine's and GKE's machines, such as `ct6e-standard-8t`, always count chips.
"""

import math
import re

from jaxpaged.errors import ConfigError

Bounds = tuple[int, ...]

GENERATIONS = {
    "v5e": "v5e",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5-lite-device": "v5e",
    "ct5lp-hightpu": "v5e",
    "ct5l-hightpu": "v5e",
    "v5p": "v5p",
    "tpu-v5p-slice": "v5p",
    "ct5p-hightpu": "v5p",
    "v6e": "v6e",
    "trillium": "v6e",
    "tpu-v6e-slice": "v6e",
    "tpu-v6e-device": "v6e",
    "ct6e-standard": "v6e",
    "tpu7x": "tpu7x",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "tpu7x-standard": "tpu7x",
}
"""By every name that they have."""
CORES_PER_CHIP = {"v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 2}
PLANE = tuple((2 ** (k // 2), 2 ** ((k + 1) // 2)) for k in (0, 2, 3, 4, 5, 6, 7, 8))
CUBES = ((1, 1, 1), (2, 2, 1), *((2 ** (k // 3), 2 ** ((k + 1) // 3), 2 ** ((k + 2) // 3)) for k in range(3, 13)))
SHAPES: dict[str, tuple[Bounds, ...]] = {"v5e": PLANE, "v6e": PLANE, "v5p": CUBES, "tpu7x": CUBES}
"""What a slice of so many chips looks like, unless somebody asks for another shape (cloud.google.com/tpu/docs)."""
SLICE = re.compile(r"(?P<family>[a-z0-9-]+?)-(?P<count>[1-9]\d{0,4})(?P<machine>t?)")
OLD = re.compile(r"(tpu-)?v[234](i|-podslice|-lite)?([-:].*)?")


def topology_of(name: str) -> str:
    """The topology that one of Google's names means; other names as they are. Raises ConfigError for a slice that does
    not exist, and for generations that nothing is planned for."""
    lower = name.lower()
    if OLD.fullmatch(lower):
        raise ConfigError(f"target {name!r} is a TPU of an older generation than v5e, which jaxpaged does not run on.")
    slice_ = SLICE.fullmatch(lower)
    if slice_ is not None and slice_["family"] in GENERATIONS:
        return topology_of_slice(name, slice_["family"], int(slice_["count"]), bool(slice_["machine"]))
    family, colon, shape = lower.partition(":")
    return f"{GENERATIONS.get(family, family)}{colon}{shape}"


def topology_of_slice(name: str, family: str, count: int, is_machine: bool) -> str:
    generation = GENERATIONS[family]
    each = 1 if is_machine else CORES_PER_CHIP[generation]
    shapes = {math.prod(bounds) * each: "x".join(map(str, bounds)) for bounds in SHAPES[generation]}
    if count in shapes:
        return f"{generation}:{shapes[count]}"
    counted = "chips" if each == 1 else "TensorCores, two a chip"
    raise ConfigError(
        f"target {name!r}: no slice of {generation} has {count} {counted}. Known are {', '.join(map(str, shapes))}; "
        f"for another shape write its topology, as in {generation}:{shapes[4 * each]}."
    )

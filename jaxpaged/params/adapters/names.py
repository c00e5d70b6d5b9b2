"""Names of tensors in an adapter's file -> modules of the model, as its checkpoint calls them.

PEFT writes `base_model.model.` and the name that transformers has for a module. What trainers wrap around a model may
stand before it or within it, and so may the name that a model has inside of one that sees. Of experts a file has either
a module for each, or two parameters with those of all. Knows names only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpaged.params.adapters.targets import Target
from jaxpaged.params.checkpoint import canonical_name

PREFIX = "base_model.model."
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\.")
"""What compiling and training on several devices put into names."""

A, B, MAGNITUDE, EMBEDDING_A, EMBEDDING_B = (
    "lora_A",
    "lora_B",
    "lora_magnitude_vector",
    "lora_embedding_A",
    "lora_embedding_B",
)
WHOLE, WHOLE_BIAS, BASE = "weight", "bias", "base_layer.weight"
"""Of a module that was trained as a whole, and a copy of the base's own."""
PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector|lora_embedding_A|lora_embedding_B)"
    r"(\.default)?(\.weight)?"
)
SAVED = re.compile(r"(?P<module>.+?)(?P<base>\.base_layer)?\.(?P<whole>weight|bias)")
OF_SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)")

OF_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)")
OF_EXPERTS = re.compile(r"(?P<block>.+)\.experts(?P<inner>(\.base_layer)*)")
GATE_UP = "gate_up_proj"
ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Other names of the matrices of an expert."""


@dataclass(frozen=True)
class PartName:
    """What one tensor is: a part of a module. `given` is the module's name as PEFT matches patterns with it, `module`
    the one in the checkpoint of a text model."""

    given: str
    module: str
    part: str


def part_name(name: str) -> PartName | None:
    """What a tensor's name says; None: nothing that is known."""
    plain = WRAPPERS.sub("", name)
    while plain.startswith(PREFIX):
        plain = plain.removeprefix(PREFIX)
    if found := PART.fullmatch(plain):
        part = found["part"]
    elif found := SAVED.fullmatch(OF_SAVED.sub("", plain)):
        if found["whole"] == WHOLE_BIAS and (found["base"] or ".lora_" in plain):
            return None
        part = BASE if found["base"] else found["whole"]
    else:
        return None
    given = found["module"]
    name, before = f"{given}.", ""
    while name != before:  # a tower's names have had several beginnings, one inside of the other
        name, before = canonical_name(name), name
    return PartName(given, name.removesuffix("."), part)


@dataclass(frozen=True)
class Place:
    """Which matrices a module of an adapter is: `targets`, of which one, or several that lie end to end in it.

    Of experts: those of one `expert`, or of all of them; then `inner` says how deep the parameter is nested, which PEFT
    nests one inside of the other, the first innermost. `projection` is the expert's matrix, by its usual name.
    """

    targets: Sequence[Target]
    expert: int | None = None
    inner: int | None = None
    projection: str = ""


class Modules:
    """The modules of a model that adapters can change, by all of their names."""

    def __init__(self, targets: Mapping[str, Target]):
        self._plain: dict[str, list[Target]] = {}
        self._blocks: dict[str, dict[str, Target]] = {}
        for target in targets.values():
            if not target.is_experts:
                self._plain.setdefault(target.module, []).append(target)
                continue
            block = target.module.partition(".experts.")[0]
            self._blocks.setdefault(block, {})[target.attribute] = target
        for known in (self._plain, self._blocks):
            for name in [name for name in known if ".block_sparse_moe" in name]:
                known[name.replace(".block_sparse_moe", ".mlp")] = known[name]  # what newer versions call it

    def names(self) -> list[str]:
        """Those that have no number of an expert."""
        return list(self._plain)

    def find(self, module: str) -> Place | None:
        """What a module is; None: nothing of this model."""
        for name in (module, f"model.{module}", module.removeprefix("model.")):
            if name in self._plain:
                return Place(self._plain[name])
            if (place := self._of_experts(name)) is not None:
                return place
        return None

    def _of_experts(self, name: str) -> Place | None:
        if found := OF_EXPERT.fullmatch(name):
            block = self._blocks.get(found["block"], {})
            projection = ROLES.get(found["projection"], found["projection"])
            wanted = ("gate_proj", "up_proj") if projection == GATE_UP else (projection,)
            if all(each in block for each in wanted):
                return Place([block[each] for each in wanted], expert=int(found["expert"]), projection=projection)
        elif (found := OF_EXPERTS.fullmatch(name)) and found["block"] in self._blocks:
            return Place(list(self._blocks[found["block"]].values()), inner=found["inner"].count("."))
        return None

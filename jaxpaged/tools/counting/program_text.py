"""What a compiled program does, read from its text: its operations, what they move and multiply, and collectives.

XLA's own "bytes accessed" counts on-chip memory like any other, and a whole table where a few rows are looked up. Its
text says for every array which memory it is in (`S(1)` and the like; nothing: main memory), in which order the
instructions run, and, for a TPU, how many cycles its compiler expects of each. This module knows the text of XLA
programs and no model.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxpaged.tools.counting.parts import XLA_ITSELF, parts_of

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CONTRACTED = re.compile(r'lhs_contracting_(?:dims=\{|dimensions":\[)([\d,"]+)')
"""Axes of the first operand that a product sums over, as dots have them and calls of cuBLAS."""
WEIGHT = re.compile(r'op_name="(?:params|head)\b')
"""Of parameters: what the engine's programs call weights."""
KERNEL = re.compile(r'op_name="(?:[^"]*/)?(\w+)/pallas_call')
CUBLAS = 'custom_call_target="__cublas$'
GROUPS = re.compile(r"replica_groups=(?:mesh\[([^\]]*)\] \{([^}]*)\}|\{\{([\d,]*)\}|\[\d+,(\d+)\])")
"""Who takes part in a collective: named axes of a mesh with sizes, lists of devices, or how many lists of how many."""

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "copy-done",
    "slice-done",
    "send-done",
    "recv-done",
}
"""Instructions that move nothing: names for what is there, or ends of what was counted at its start."""
PRODUCTS = ("dot", "convolution")
LOOKUPS = {"gather", "dynamic-slice", "slice"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that write a part of their first operand in place, and which operand is that part."""
SAME = {"bitcast", "copy", "copy-start", "copy-done", "slice-start", "slice-done", "get-tuple-element", "opt-barrier"}
"""Instructions that give what their first operand is, or a part of it."""
HOST = {"infeed", "outfeed"}
"""Instructions that wait for the host; so do sends and receives that say so, and what has arrays in its memory."""


@dataclass
class Instruction:
    name: str
    opcode: str
    result: str
    operands: list[str]
    attributes: str


@dataclass(frozen=True)
class Operation:
    """What a device does at once: a kernel, a fusion, a copy. `bytes` are those to and from main memory, of which
    `weights` are read of weights, or of copies of them, and `logits` are moved of logits.

    part: the part of jaxpaged that it comes from. kernel: the name of one of ours; "" for XLA's own. cycles: what a
    TPU's compiler expects, or None where it does not say, as of our kernels. flops: of its products. sent: bytes that
    a device sends in a collective, around a ring, in `hops` steps that follow each other; beside: what runs until it is
    waited for.
    """

    name: str
    opcode: str
    part: str
    bytes: int
    flops: float = 0.0
    kernel: str = ""
    cycles: int | None = None
    sent: float = 0.0
    hops: int = 0
    beside: Sequence["Operation"] = ()
    weights: int = 0
    logits: int = 0


@dataclass(frozen=True)
class Choice:
    """A conditional: one of these branches runs."""

    name: str
    branches: Sequence["Region"]


@dataclass(frozen=True)
class Loop:
    """`times`: how often the body runs, or None where the program computes that."""

    body: "Region"
    times: int | None


Region = Sequence[Operation | Choice | Loop]
"""What runs one after the other."""


def total(region: Region, cost: Callable[[Operation], float], choose: Callable[..., float] = min) -> float:
    """The costs of all operations of a region, of conditionals those of the branch that costs most or, with `min`,
    least; a loop whose end is not known runs once."""
    found = 0.0
    for each in region:
        match each:
            case Operation():
                found += cost(each)
            case Loop():
                found += (each.times or 1) * total(each.body, cost, choose)
            case Choice():
                found += choose(total(branch, cost, choose) for branch in each.branches)
    return found


def chosen(
    region: Region, cost: Callable[[Operation], float], choose: Callable[..., float] = min
) -> Iterator[tuple[Operation, int]]:
    """(operation, how often it runs) of a region, with the branches of which `total` has the costs."""
    for each in region:
        match each:
            case Operation():
                yield each, 1
            case Loop():
                yield from ((inner, times * (each.times or 1)) for inner, times in chosen(each.body, cost, choose))
            case Choice():
                yield from chosen(choose(each.branches, key=lambda branch: total(branch, cost, choose)), cost, choose)


@dataclass
class Collectives:
    """`counts` by kind, and bytes of their results: of those during which nothing else runs, and of the others."""

    counts: dict[str, int] = field(default_factory=dict)
    waited_bytes: int = 0
    hidden_bytes: int = 0


class ProgramText:
    """A compiled program's text, split into computations of instructions in the order in which they run.

    `paged` are the sizes in bytes of arrays that hold the KV cache, on one device; `vocabulary`: how many logits of a
    row it has.
    """

    def __init__(self, text: str, paged: Collection[int] = (), vocabulary: int = 0):
        self.paged, self.vocabulary = paged, vocabulary
        self.parts = parts_of(text)
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if heading := COMPUTATION.match(line):
                current = self.computations.setdefault(heading[2], [])
                self.entry = heading[2] if heading[1] else self.entry
            elif (found := INSTRUCTION.match(line)) and (instruction := parse(found[1], found[2])):
                current.append(instruction)

    def memory_bytes(self) -> int:
        """Bytes that one run reads from and writes to main memory, of conditionals the most.

        Arrays of kernels whose bytes are among `paged` are left out: how much of the KV cache is read depends on the
        requests.
        """
        return int(total(self.region, lambda operation: operation.bytes, max))

    @cached_property
    def region(self) -> Region:
        """What one run of the program does."""
        return self._region(self.entry)

    @cached_property
    def weights(self) -> dict[str, set[str]]:
        """The names of weights, which are parameters of the program, and of copies of them, by computation."""
        found: dict[str, set[str]] = {}
        given = {each.name for each in self.computations.get(self.entry, []) if WEIGHT.search(each.attributes)}
        self._spread(self.entry, given, found)
        return found

    def _spread(self, computation: str, names: set[str], found: dict[str, set[str]]) -> None:
        names = found.setdefault(computation, set()) | names
        for each in self.computations.get(computation, []):
            if each.opcode in SAME and each.operands and each.operands[0] in names:
                names.add(each.name)
            elif each.opcode in ("call", "async-start"):
                for called in CALLED.findall(each.attributes):
                    inner = [other for other in self.computations.get(called, []) if other.opcode == "parameter"]
                    places = {other.name: int(other.operands[0]) for other in inner}
                    given = {name for name, i in places.items() if i < len(each.operands) and each.operands[i] in names}
                    self._spread(called, given, found)
        found[computation] = names

    @property
    def num_host_transfers(self) -> int:
        """Instructions that exchange data with the host, in whichever branch."""
        bodies = (each for instructions in self.computations.values() for each in instructions)
        return sum(
            each.opcode in HOST
            or (each.opcode in ("send", "recv") and "is_host_transfer=true" in each.attributes)
            or (each.opcode in ("copy-start", "copy", "custom-call") and "S(5)" in each.result)
            for each in bodies
        )

    @property
    def kernels(self) -> set[str]:
        """The names of our kernels, in whichever branch."""
        bodies = (each for instructions in self.computations.values() for each in instructions)
        return {
            found[1] for each in bodies if each.opcode == "custom-call" and (found := KERNEL.search(each.attributes))
        }

    def _region(self, computation: str) -> Region:
        instructions = self.computations.get(computation, [])
        arrays, weights = {each.name: each for each in instructions}, self.weights.get(computation, set())
        region: list[Operation | Choice | Loop] = []
        for i, each in enumerate(instructions):
            called = CALLED.findall(each.attributes)
            if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
                continue
            if each.opcode.endswith("-start") and self._collective(each) is not None:
                between = [other for other in until_done(each, instructions[i + 1 :]) if works(other)]
                beside = [self._operation(other, arrays, weights) for other in between if not is_nested(other)]
                region.append(replace(self._operation(each, arrays, weights), beside=beside))
            elif each.opcode in ("call", "async-start"):
                region += [inner for name in called for inner in self._region(name)]
            elif each.opcode == "while":
                times = re.search(r'known_trip_count":\{"n":"(\d+)"', each.attributes)
                inner = [part for name in called for part in self._region(name)]
                region.append(Loop(inner, int(times[1]) if times else None))
            elif each.opcode == "conditional":
                branches = BRANCHES.search(each.attributes)
                names = re.findall(r"[\w.\-]+", branches[1]) if branches else called
                region.append(Choice(each.name, [self._region(name) for name in names]))
            else:
                region.append(self._operation(each, arrays, weights))
        return region

    def _operation(self, each: Instruction, arrays: dict[str, Instruction], weights: set[str]) -> Operation:
        cycles = re.search(r'estimated_cycles":"(\d{1,12})"', each.attributes)
        kernel = KERNEL.search(each.attributes)
        part, flops = self.parts.get(each.name, XLA_ITSELF), self._flops(each, arrays)
        read, written = self._moved(each, arrays)
        is_logits = lambda name: name in arrays and has_extent(arrays[name].result, self.vocabulary)
        named = [*zip(each.operands, read)]
        return Operation(
            each.name,
            each.opcode,
            "products" if part == XLA_ITSELF and flops else part,
            sum(read) + written,
            flops,
            kernel[1] if kernel and each.opcode == "custom-call" else "",
            int(cycles[1]) if cycles else None,
            *self._sent(each),
            weights=sum(size for name, size in named if name in weights),
            logits=sum(size for name, size in named if name not in weights and is_logits(name))
            + written * (has_extent(each.result, self.vocabulary) and each.name not in weights),
        )

    def _collective(self, each: Instruction) -> Instruction | None:
        """The collective that an instruction is, or that it calls as a fusion or beside others."""
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            return each
        if each.opcode not in ("fusion", "async-start"):
            return None
        inside = (other for name in CALLED.findall(each.attributes) for other in self.computations.get(name, []))
        return next((found for other in inside if (found := self._collective(other)) is not None), None)

    def _sent(self, each: Instruction) -> tuple[float, int]:
        """(Bytes that a device sends around a ring, in how many steps) in a collective; (0, 0) for all else."""
        if (found := self._collective(each)) is None:
            return 0.0, 0
        kind, size = found.opcode.removesuffix("-start"), collective_bytes(found)
        if kind == "collective-permute":
            return size, 1
        num_devices = group_size(found)
        share = (num_devices - 1) / num_devices
        if kind == "all-reduce":
            return 2 * share * size, 2 * (num_devices - 1)
        return share * size * (num_devices if kind == "reduce-scatter" else 1), num_devices - 1

    def _flops(self, each: Instruction, arrays: dict[str, Instruction]) -> float:
        """Of products, alone or in a fusion; of kernels that are not XLA's none are known."""
        if each.opcode == "fusion":
            body = self.computations.get(next(iter(CALLED.findall(each.attributes)), ""), [])
            inside = {other.name: other for other in body}
            return sum(self._flops(other, inside) for other in body)
        summed = CONTRACTED.search(each.attributes) if each.opcode in ("dot", "custom-call") else None
        if summed is None or not each.operands or each.operands[0] not in arrays:
            return 0.0
        extents, length = extents_of(arrays[each.operands[0]].result), extents_of(each.result)
        axes = [int(axis) for axis in re.findall(r"\d+", summed[1])]
        return 2.0 * math.prod(length) * math.prod(extents[axis] for axis in axes)

    def _moved(self, each: Instruction, arrays: dict[str, Instruction]) -> tuple[list[int], int]:
        """(bytes that are read of each operand, bytes that are written)."""
        sizes = [main_bytes(arrays[name].result) if name in arrays else 0 for name in each.operands]
        result = main_bytes(each.result)
        if each.opcode in LOOKUPS:
            return [min(sizes[0], result)], result
        if each.opcode in UPDATES:
            part = UPDATES[each.opcode]
            return [size * (i == part) for i, size in enumerate(sizes)], sizes[part]
        if is_for_next_run(each, arrays):
            return [], 0
        if each.opcode == "copy-start":  # its result names destination and source
            destination, source = first_parts(each.result, 2)
            return [main_bytes(source)], main_bytes(destination)
        if each.opcode == "slice-start":  # source and destination
            source, destination = first_parts(each.result, 2)
            return [min(main_bytes(source), array_bytes(destination))], main_bytes(destination)
        if each.opcode == "custom-call":
            count = 1 if CUBLAS in each.attributes else None  # room to work in follows
            parts = [main_bytes(part) for part in first_parts(each.result, count)]
            read, written = ([size * (size not in self.paged) for size in of] for of in (sizes, parts))
            return read, sum(written)
        if each.opcode == "fusion" and (called := CALLED.findall(each.attributes)):
            return self._fused(called[0], sizes, result)
        return sizes, result

    def _fused(self, computation: str, sizes: list[int], result: int) -> tuple[list[int], int]:
        """A fusion reads of a parameter what its lookups take, and writes of an array that it updates the update."""
        body = self.computations.get(computation, [])
        arrays = {each.name: each for each in body}
        for each in body:
            if each.opcode == "parameter" and (index := int(each.operands[0])) < len(sizes) and sizes[index]:
                users = [user for user in body if each.name in user.operands]
                if users and all(user.opcode in LOOKUPS and user.operands[0] == each.name for user in users):
                    sizes[index] = min(sizes[index], sum(array_bytes(user.result) for user in users))
                elif users and all(is_updated(user, each) for user in users):
                    update = sum(array_bytes(arrays[user.operands[UPDATES[user.opcode]]].result) for user in users)
                    result = max(result - sizes[index], 0) + update
                    sizes[index] = 0
        return sizes, result

    def collectives(self) -> Collectives:
        """How often each kind occurs, and which of them run while something else does."""
        found = Collectives()
        in_fusions = self._computations_of("fusion")
        started = self._computations_of("async-start")
        for name, instructions in self.computations.items():
            for i, each in enumerate(instructions):
                kind = each.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                found.counts[kind] = found.counts.get(kind, 0) + 1
                overlaps = (
                    (name in in_fusions and any(other.opcode in PRODUCTS for other in instructions))
                    or name in started
                    or (each.opcode != kind and any(works(other) for other in until_done(each, instructions[i + 1 :])))
                )
                size = collective_bytes(each)
                found.hidden_bytes += size * overlaps
                found.waited_bytes += size * (not overlaps)
        return found

    def _computations_of(self, opcode: str) -> set[str]:
        """The computations that instructions of a kind call."""
        return {
            name
            for instructions in self.computations.values()
            for each in instructions
            if each.opcode == opcode
            for name in CALLED.findall(each.attributes)
        }


def parse(name: str, text: str) -> Instruction | None:
    """`SHAPE opcode(operands), attributes`."""
    end = closing(text, 0) + 1 if text.startswith("(") else re.match(r"\S*", text).end()
    call = re.match(r"\s*([\w\-]+)\(", text[end:])
    if call is None:
        return None
    begin = end + call.end() - 1
    stop = closing(text, begin)
    operands = text[begin + 1 : stop]
    names = re.findall(r"%([\w.\-]+)", operands) or re.findall(r"[\w.\-]+", operands)
    return Instruction(name, call[1], text[:end], names, text[stop + 1 :])


def closing(text: str, begin: int) -> int:
    """Where the bracket that opens at `begin` is closed."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def arrays_of(shape: str) -> Iterator[tuple[int, bool]]:
    """(bytes, whether it is in main memory) of every array of a shape."""
    for dtype, extents, layout in ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        count = math.prod(int(extent) for extent in extents.split(",") if extent)
        yield -(-count * bits // 8), not re.search(r"S\([1-9]\d*\)", layout)


def extents_of(shape: str) -> list[int]:
    """Of the first array of a shape."""
    found = ARRAY.search(shape)
    return [int(extent) for extent in found[2].split(",") if extent] if found else []


def has_extent(shape: str, extent: int) -> bool:
    """Whether an array of floating point numbers of a shape is so long along an axis."""
    return any(
        str(extent) in extents.split(",") for dtype, extents, _ in ARRAY.findall(shape) if dtype[0] in "bf" and extent
    )


def array_bytes(shape: str) -> int:
    return sum(size for size, _ in arrays_of(shape))


def main_bytes(shape: str) -> int:
    return sum(size for size, in_main in arrays_of(shape) if in_main)


def first_parts(shape: str, count: int | None = None) -> list[str]:
    """The first arrays of a tuple's shape, or all of them."""
    return [match[0] for match in list(ARRAY.finditer(shape))[:count]]


def collective_bytes(each: Instruction) -> int:
    """Of the result of a collective, also where an instruction starts it."""
    return array_bytes(first_parts(each.result, 2)[-1] if each.opcode.endswith("-start") else each.result)


def group_size(each: Instruction) -> int:
    """How many devices take part in a collective; 1 where it does not say."""
    if (found := GROUPS.search(each.attributes)) is None:
        return 1
    if found[1] is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    return int(found[4]) if found[4] else len(found[3].split(","))


def is_updated(user: Instruction, array: Instruction) -> bool:
    return user.opcode in UPDATES and user.operands[0] == array.name


def is_for_next_run(each: Instruction, arrays: dict[str, Instruction]) -> bool:
    """Whether a copy is made for the next run of the program: this run's own, which is counted, came first."""
    prefetches = (other for other in arrays.values() if "cross_program_prefetch_index" in other.attributes)
    same = any(other is not each and other.operands == each.operands for other in prefetches)
    return each.opcode == "copy-start" and same


def until_done(start: Instruction, following: list[Instruction]) -> Iterator[Instruction]:
    """What runs between a start and the instruction that waits for it."""
    for each in following:
        if each.opcode.endswith("-done") and start.name in each.operands:
            return
        yield each


def is_nested(each: Instruction) -> bool:
    """Whether an instruction is made of others that run: their time is not its own."""
    return each.opcode in ("while", "call", "conditional")


def works(each: Instruction) -> bool:
    """Whether an instruction takes time on the device by itself."""
    return each.opcode in ("fusion", "custom-call", "dot", "convolution", "while", "call", "conditional", "copy")

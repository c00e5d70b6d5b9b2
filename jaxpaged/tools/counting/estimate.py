"""How long a compiled program takes a device, estimated from its operations.

On a GPU operations run one after the other. Each takes as long as its bytes or its products at rates that devices
reach, whichever is longer, and a launch more. On a TPU its compiler says how many cycles each takes; of our kernels it
does not, and these take as long as their bytes (`planning/step_time.py` adds attention by its schedule). Copies that it
starts ahead run beside all else, so a program takes at least as long as all its bytes. A collective takes as long as a
ring of devices sends its bytes and as its hops follow each other; less what runs until it is waited for. Of
conditionals the branch counts that takes least: what no request of a step asks for is not done. Nothing here is
measured but the rates.
"""

from collections import Counter
from dataclasses import dataclass

from jaxpaged.tools.counting.program_text import (
    Choice,
    Collectives,
    Loop,
    Operation,
    ProgramText,
    Region,
    chosen,
    total,
)

READERS = {
    "few_rows_matmul",
    "grouped_matmul",
    "lora_matmul",
    "mla_paged_attention",
    "paged_attend",
    "paged_attend_spans",
    "quantized_matmul",
}
"""Kernels of ours that read weights or contexts, and wait for the first of them as products do."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bytes and operations a second. On a GPU launch: seconds from one kernel of a graph to the
    next; fill: seconds more until a kernel of `READERS` or a product reads at that speed. clock: cycles a second, of a
    TPU. context_share: of the bytes a second, what attention of decodes reads, and narrow_share of a cache of 8 bits;
    prompt_share: of the operations, what that of prompts makes. Cycles of a TPU's attention of decodes: item_cycles for
    an item, head_cycles more for each of its kv heads, and block_cycles for a block that is copied. links: bytes a
    second that a device sends around a ring of devices, 0 where it has none; hop: seconds from one of them to the
    next."""

    bandwidth: float
    flops: float
    launch: float = 0.0
    fill: float = 0.0
    context_share: float = 1.0
    narrow_share: float = 1.0
    prompt_share: float = 1.0
    clock: float = 0.0
    item_cycles: float = 0.0
    head_cycles: float = 0.0
    block_cycles: float = 0.0
    links: float = 0.0
    hop: float = 0.0

    def seconds(self, operation: Operation) -> float:
        """Of an operation, in which no other one makes progress."""
        return max(self._own_seconds(operation), self.waited_seconds(operation))

    def waited_seconds(self, operation: Operation) -> float:
        """Of a collective, what nothing that runs beside it hides; of all else 0."""
        if not operation.sent or not self.links:
            return 0.0
        whole = operation.sent / self.links + operation.hops * self.hop
        return max(whole - sum(map(self._own_seconds, operation.beside)), 0.0)

    def _own_seconds(self, operation: Operation) -> float:
        if self.clock:
            if operation.opcode.endswith("-start"):
                return 0.0
            if operation.cycles is not None:
                return operation.cycles / self.clock
        begin = self.launch + (self.fill if operation.flops or operation.kernel in READERS else 0.0)
        return max(operation.bytes / self.bandwidth, operation.flops / self.flops) + begin

    def program_seconds(self, region: Region) -> float:
        """Of one run of a program, without the keys and values that it reads."""
        busy = total(region, self.seconds)
        return max(busy, moved(region, self) / self.bandwidth) if self.clock else busy


def moved(region: Region, rates: Rates) -> float:
    """Bytes to and from main memory, of the branches that take least time."""
    return sum(times * operation.bytes for operation, times in chosen(region, rates.seconds))


def counts_of(text: ProgramText, rates: Rates) -> dict[str, float]:
    """What grows when a program gets worse, by name: bytes by part and by purpose, the estimate, and what each device
    has of its own.

    "launches" are those of a GPU; "loops the host reads" are loops, and conditionals that have one, which no graph
    takes in. A TPU has "cycles" and "host transfers".
    """
    found: Counter[str] = Counter()
    for operation, times in chosen(text.region, rates.seconds):
        found["bytes"] += times * operation.bytes
        found[f"bytes of {operation.part}"] += times * operation.bytes
        for purpose, size in purposes(operation).items():
            found[f"{purpose}, bytes"] += times * size
        if rates.clock:
            found["cycles"] += times * (operation.cycles or 0)
            found[f"cycles of {operation.part}"] += times * (operation.cycles or 0)
        else:
            found["launches"] += times
            found["small launches"] += times * (is_small(operation, rates))
    if not rates.clock:
        found["launches"] += sum(isinstance(each, Choice) for each in text.region)  # a node of the graph
        found["loops the host reads"] = host_reads(text.region)
    else:
        found["host transfers"] = text.num_host_transfers
    found["microseconds"] = round(1e6 * rates.program_seconds(text.region), 1)
    found["microseconds of collectives"] = round(1e6 * total(text.region, rates.waited_seconds), 1)
    found |= collective_counts(text.collectives())
    return {name: value for name, value in found.items() if value}


def collective_counts(collectives: Collectives) -> Counter[str]:
    """How many there are of each kind, and the bytes of those that are waited for and of the others."""
    found = Counter({f"collectives: {kind}": number for kind, number in collectives.counts.items()})
    found.update({"waited bytes": collectives.waited_bytes, "hidden bytes": collectives.hidden_bytes})
    return found


def purposes(operation: Operation) -> dict[str, int]:
    """Bytes by what they are, whichever part moves them; keys and values that are cached are in none."""
    rest = operation.bytes - operation.weights - operation.logits
    return {"weights": operation.weights, "logits": operation.logits, "activations": rest}


def is_small(operation: Operation, rates: Rates) -> bool:
    """Whether launching it takes longer than what it does."""
    return rates.seconds(operation) < 2 * rates.launch


def host_reads(region: Region) -> int:
    """Loops, and conditionals that have one: their conditions are read by the host, which waits for the device."""
    return sum(has_loop([each]) for each in region)


def has_loop(region: Region) -> bool:
    return any(
        isinstance(each, Loop) or (isinstance(each, Choice) and any(map(has_loop, each.branches))) for each in region
    )

"""What tiers would have given to the requests of a trace: Mooncake's open format, a JSON object a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2353]}

A hash id stands for 512 tokens of a prompt and all before them. The simulation is of blocks of that size, one request
after another: what the device has is a hit; what a tier has behind it is loaded, where that takes less time than
computing; the rest is computed. Both keep what they have room for, and lose what was used least recently: of one
request the device its last blocks first, as the engine does, and the tier the first that were written. Plain Python.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxpaged.errors import UsageError

BLOCK_TOKENS = 512


class TracedRequest(msgspec.Struct):
    """One line. Other fields are passed over."""

    input_length: int
    hash_ids: list[int]


class Simulated(msgspec.Struct):
    """A tier of `tier_bytes` under the trace. Tokens are those of prompts; `saved_seconds` is what loading took
    less than computing would have."""

    tier_bytes: int
    prompt_tokens: int
    device_tokens: int
    loaded_tokens: int
    saved_seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were not computed."""
        return (self.device_tokens + self.loaded_tokens) / max(self.prompt_tokens, 1)


class Costs(NamedTuple):
    """`compute(start, end)`: seconds for these tokens of a prompt; a load takes `bytes_per_token / bandwidth` each."""

    bytes_per_token: float
    bandwidth: float
    compute: Callable[[int, int], float]

    def saved(self, start: int, end: int) -> float:
        """Seconds that loading these tokens takes less than computing them."""
        return self.compute(start, end) - (end - start) * self.bytes_per_token / self.bandwidth


class Blocks:
    """The ids that a place has room for; the one used least recently goes first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._ids: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._ids

    def use(self, blocks: Sequence[int]) -> None:
        """In this order."""
        for block in blocks:
            self._ids[block] = None
            self._ids.move_to_end(block)
        while len(self._ids) > self.capacity:
            self._ids.popitem(last=False)


def read_trace[R: TracedRequest](path: Path, kind: type[R]) -> list[R]:
    """The requests of a file, with the fields of `kind`. Raises UsageError for what is no such trace."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}. Check the path.") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = msgspec.convert(json.loads(line), kind)
        except (ValueError, RecursionError) as error:
            fields = ", ".join(kind.__struct_fields__)
            raise UsageError(
                f"{path}, line {number} is no request of Mooncake's format, with {fields}: {error}."
            ) from None
        if not 0 < request.input_length <= len(request.hash_ids) * BLOCK_TOKENS:
            raise UsageError(
                f"{path}, line {number} has {request.input_length} tokens and {len(request.hash_ids)} hash_ids; each "
                f"stands for {BLOCK_TOKENS} tokens."
            )
        requests.append(request)
    if not requests:
        raise UsageError(f"the trace {path} has no request.")
    return requests


def simulate(requests: Sequence[TracedRequest], device_tokens: int, tier_bytes: int, costs: Costs) -> Simulated:
    """Run the requests through a device with room for so many tokens, and a tier behind it."""
    device = Blocks(device_tokens // BLOCK_TOKENS)
    tier = Blocks(int(tier_bytes / (costs.bytes_per_token * BLOCK_TOKENS)))
    result = Simulated(tier_bytes, 0, 0, 0, 0.0)
    for request in requests:
        ids, length = request.hash_ids, request.input_length
        on_device = run_of(ids, 0, device)
        in_tier = run_of(ids, on_device, tier)
        start, end = min(on_device * BLOCK_TOKENS, length - 1), min(in_tier * BLOCK_TOKENS, length - 1)
        result.prompt_tokens += length
        result.device_tokens += start
        saved = costs.saved(start, end) if end > start else 0.0
        if saved > 0:
            result.loaded_tokens += end - start
            result.saved_seconds += saved
        device.use(ids[::-1])
        tier.use(ids)
    return result


def run_of(ids: Sequence[int], first: int, blocks: Blocks) -> int:
    """Where the run of blocks from `first` ends that a place has."""
    while first < len(ids) and ids[first] in blocks:
        first += 1
    return first

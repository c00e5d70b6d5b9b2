"""How long a step takes, estimated from compiled programs, and how fast devices were seen to be.

A step adds up: its programs, one after the other, as `counting/estimate.py` estimates them, with collectives that
nothing hides, and what attention reads of the contexts. The host works meanwhile, so a step takes the longer of both.
A TPU's compiler does not say how long our kernels take: their schedules do, which were counted.
"""

from collections.abc import Sequence

from jaxpaged.tools.counting.estimate import Rates
from jaxpaged.tools.planning.plan import DeviceFacts, PlannedProgram
from jaxpaged.tools.planning.roofline import DISPATCH_SECONDS, decode_parts, pairs_of
from jaxpaged.worker.costs import Work
from jaxpaged.worker.programs.declare import ProgramKind

MEASURED = {"NVIDIA H100 SXM": (2.983e12, 7.03e14), "NVIDIA H200": (4.217e12, 6.96e14)}
"""Bytes and bf16 operations a second as `pallas_kernels.timing` measured them."""
REACHED = (0.88, 0.70)
"""What these are of the data sheet's, which other GPUs are taken to reach as well."""
CONTEXT_SHARE, NARROW_SHARE, PROMPT_SHARE = 0.91, 0.50, 0.55
"""Of those rates, what attention was measured to reach on an H200, a layer among eight: 64 decodes x 2,048, the same
from caches of 8 bits (int8 0.51, float8 0.48), and a prompt of 8,192 (`scripts/gpu_minutes.py`). Other GPUs are taken
to reach as much. An H100 had older kernels, with which it reached 0.79 for decodes, and an H200 0.70."""
LAUNCH_SECONDS, FILL_SECONDS = 1.3e-6, 2.9e-6
"""From one kernel of a CUDA graph to the next, and until a product reads its weights at full speed, in a profile of an
8B Llama's decode step on an H200: norms and the like took 1.4 to 1.7 us, and 225 products 4.52 ms of 15.0 GB."""
TILE_BUNDLES, TILE_FLOPS = {"TPU v5e": 1145, "TPU v5p": 1145, "TPU v6e": 808, "TPU 7x": 814}, 4 * 512 * 512 * 128
"""Of attention of prompts on a TPU, cycles for a tile of 512 queries by 512 keys, at least: as it is scheduled (v5p: as
v5e)."""
ITEM_SLOTS = 256
DECODE_BUNDLES = {
    "TPU v5e": (141, 56, 8.3),
    "TPU v5p": (141, 56, 8.3),
    "TPU v6e": (143, 48, 8.0),
    "TPU 7x": (140, 47, 17.4),
}
"""Of attention of decodes, as it is scheduled: cycles at least of an item of `ITEM_SLOTS`, for each kv head of it, and
for each block that is copied. They give the counts of `pallas_kernels/README.md`, of 1 and 8 heads and of blocks of 16
and 128, within 3 %."""
CLOCKS = {"TPU v5e": 1.5e9, "TPU v5p": 1.75e9, "TPU v6e": 1.75e9, "TPU 7x": 2.2e9}
"""Cycles a second, from the data sheets' products a second and the sizes of the units that make them."""
HOP_SECONDS = {"TPU": 1.0e-6, "NVIDIA": 0.7e-6}
"""From one device of a ring to the next, assumed. NCCL sums a few bytes on eight GPUs in about ten microseconds."""
RING_SHARE = {"TPU v5e": 1 / 2, "TPU v6e": 1 / 2, "TPU v5p": 1 / 3, "TPU 7x": 1 / 3}
"""Of all links of a device those to both neighbours in a ring, of four or of six; of a GPU's, in both directions, one
direction."""


def rates_of(device: DeviceFacts) -> Rates:
    ring = {
        "links": device.links * RING_SHARE.get(device.name, 1 / 2),
        "hop": HOP_SECONDS.get(device.name.split()[0], 0.0),
    }
    if device.name in CLOCKS:
        clock = CLOCKS[device.name]
        share = min(1.0, TILE_FLOPS * clock / device.matmul_bf16 / TILE_BUNDLES[device.name])
        item, head, block = DECODE_BUNDLES[device.name]
        cycles = {"clock": clock, "item_cycles": item, "head_cycles": head, "block_cycles": block}
        return Rates(device.bandwidth, device.matmul_bf16, prompt_share=share, **cycles, **ring)
    shares = (device.bandwidth * REACHED[0], device.matmul_bf16 * REACHED[1])
    return Rates(
        *MEASURED.get(device.name, shares),
        launch=LAUNCH_SECONDS,
        fill=FILL_SECONDS,
        context_share=CONTEXT_SHARE,
        narrow_share=NARROW_SHARE,
        prompt_share=PROMPT_SHARE,
        **ring,
    )


def context_bytes(work: Work, num_requests: int, context: int) -> float:
    """Keys and values that a decode step of so many requests reads on a device."""
    of_rank = -(-num_requests // work.num_ranks)
    layers = ((min(window or context, context) * n, token_bytes) for window, n, token_bytes in work.attention_layers)
    return of_rank * sum(seen * token_bytes for seen, token_bytes in layers)


def context_seconds(work: Work, rates: Rates, num_requests: int, context: int) -> float:
    """Of a decode step's attention: of what it reads, or as long as its kernel's schedule is, whichever is longer."""
    share = rates.context_share if work.kv_itemsize > 1 else rates.narrow_share
    reading = context_bytes(work, num_requests, context) / (rates.bandwidth * share)
    if not (rates.clock and work.kv_heads):
        return reading
    cycles = 0.0
    for window, layers, _ in work.attention_layers:
        seen, item = min(window or context, context), rates.item_cycles + rates.head_cycles * work.kv_heads
        cycles += layers * (-(-seen // ITEM_SLOTS) * item + -(-seen // work.block_size) * rates.block_cycles)
    return max(reading, -(-num_requests // work.num_ranks) * cycles / rates.clock)


def floor_seconds(work: Work, rates: Rates, num_requests: int, context: int) -> float:
    """Of a decode step: its weights and contexts are read once, or its products take longer."""
    seen = sum(min(window or context, context) * n for window, n, _ in work.attention_layers)
    flops = num_requests * (2 * work.params + 4 * seen * work.heads)
    read = work.bytes_read(num_requests) + context_bytes(work, num_requests, context)
    return max(read / rates.bandwidth, flops / rates.flops)


def step_seconds(program_seconds: Sequence[float], work: Work, rates: Rates, num_requests: int, context: int) -> float:
    """Of a decode step of these programs on one device."""
    return sum(program_seconds) + context_seconds(work, rates, num_requests, context)


def decode_seconds(
    programs: Sequence[PlannedProgram], work: Work, device: DeviceFacts, num_requests: int, context: int
) -> float | None:
    """Of a step with one token of each request, from the programs of an engine without stages; None if those of such a
    step were not compiled."""
    of_rank, rates = -(-num_requests // work.num_ranks), rates_of(device)
    forward, decode, draw = (
        smallest(programs, kind, of_rank) for kind in (ProgramKind.FORWARD, ProgramKind.DECODE, ProgramKind.SAMPLE)
    )
    ways = [[decode.seconds]] if decode else []
    if forward and draw:
        head = work.head_bytes / rates.bandwidth  # what follows its product takes as long as there are rows
        rest = max(draw.seconds - head, 0.0) * of_rank / draw.size
        ways.append([forward.seconds, head + rest])
    if not ways:
        return None
    host = decode_parts(work, device, num_requests, context, 0)["host"]
    return max(step_seconds(min(ways, key=sum), work, rates, num_requests, context), host)


def prefill_seconds(
    programs: Sequence[PlannedProgram], work: Work, device: DeviceFacts, num_tokens: int, num_steps: int
) -> float | None:
    """Of a prompt in so many steps, of an engine without stages; None if no program of such a step was compiled."""
    forward, rates = smallest(programs, ProgramKind.FORWARD, -(-num_tokens // num_steps)), rates_of(device)
    if forward is None:
        return None
    attention = 4 * pairs_of(work, num_tokens) * work.heads / (rates.flops * rates.prompt_share)
    return max(num_steps * forward.seconds + attention, num_steps * DISPATCH_SECONDS)


def smallest(programs: Sequence[PlannedProgram], kind: ProgramKind, size: int) -> PlannedProgram | None:
    """The compiled program of a kind that is just large enough."""
    fitting = [each for each in programs if each.kind == kind and each.size >= size and not each.error]
    return min(fitting, key=lambda program: program.size, default=None)

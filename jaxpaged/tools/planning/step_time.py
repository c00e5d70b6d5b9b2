"""How long a step takes, estimated from compiled programs, and how fast devices were seen to be.

A step adds up: its programs, one after the other, as `counting/estimate.py` estimates them, and what attention reads of
the contexts. The host works meanwhile, so a step takes the longer of both.
"""

from collections.abc import Sequence

from jaxpaged.tools.counting.estimate import Rates
from jaxpaged.tools.planning.plan import DeviceFacts
from jaxpaged.worker.costs import Work

MEASURED = {"NVIDIA H100 SXM": (2.983e12, 7.03e14), "NVIDIA H200": (4.211e12, 7.03e14)}
"""Bytes and bf16 operations a second as `pallas_kernels.timing` measured them (the operations on an H100)."""
REACHED = (0.88, 0.71)
"""What these are of the data sheet's, which other GPUs are taken to reach as well."""
CONTEXT_SHARE = {"NVIDIA H100 SXM": 0.79, "NVIDIA H200": 0.70}
"""Of those bytes, what attention of decodes was measured to read a second (`scripts/bench_kernel.py`)."""
LAUNCH_SECONDS, FILL_SECONDS = 1.3e-6, 2.9e-6
"""From one kernel of a CUDA graph to the next, and until a product reads its weights at full speed, in a profile of an
8B Llama's decode step on an H200: norms and the like took 1.4 to 1.7 us, and 225 products 4.52 ms of 15.0 GB."""
CLOCKS = {"TPU v5e": 1.5e9, "TPU v5p": 1.75e9, "TPU v6e": 1.75e9, "TPU 7x": 2.2e9}
"""Cycles a second, from the data sheets' products a second and the sizes of the units that make them."""


def rates_of(device: DeviceFacts) -> Rates:
    if device.name in CLOCKS:
        return Rates(device.bandwidth, device.matmul_bf16, clock=CLOCKS[device.name])
    shares = (device.bandwidth * REACHED[0], device.matmul_bf16 * REACHED[1])
    return Rates(
        *MEASURED.get(device.name, shares),
        launch=LAUNCH_SECONDS,
        fill=FILL_SECONDS,
        context_share=CONTEXT_SHARE.get(device.name, 0.75),
    )


def context_bytes(work: Work, num_requests: int, context: int) -> float:
    """Keys and values that a decode step of so many requests reads on a device."""
    of_rank = -(-num_requests // work.num_ranks)
    layers = ((min(window or context, context) * n, token_bytes) for window, n, token_bytes in work.attention_layers)
    return of_rank * sum(seen * token_bytes for seen, token_bytes in layers)


def floor_seconds(work: Work, rates: Rates, num_requests: int, context: int) -> float:
    """Of a decode step: its weights and contexts are read once, or its products take longer."""
    seen = sum(min(window or context, context) * n for window, n, _ in work.attention_layers)
    flops = num_requests * (2 * work.params + 4 * seen * work.heads)
    read = work.bytes_read(num_requests) + context_bytes(work, num_requests, context)
    return max(read / rates.bandwidth, flops / rates.flops)


def step_seconds(program_seconds: Sequence[float], work: Work, rates: Rates, num_requests: int, context: int) -> float:
    """Of a decode step of these programs on one device."""
    return sum(program_seconds) + context_bytes(work, num_requests, context) / (rates.bandwidth * rates.context_share)

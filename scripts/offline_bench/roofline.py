"""What the measured limits of the machine mean for a model: which share of them an engine uses.

Decode reads every weight once per token and is compared with the memory's bandwidth; prefill multiplies every weight
once per token and is compared with the best matrix product in bfloat16. KV cache reads, attention scores and the
logits of the last token are left out, so that the shares are slightly too low. This module measures nothing.
"""

from typing import Any

from offline_bench.checkpoints import ModelShape


def best(figures: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The best figure of every (kind, dtype), over shapes and rounds."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for figure in figures:
        key = figure["kind"], figure["dtype"]
        if key not in found or figure["per_second"] > found[key]["per_second"]:
            found[key] = figure
    return found


def bandwidth(figures: list[dict[str, Any]]) -> float | None:
    """Bytes per second from memory: the best of all types, since the memory does not know them."""
    return max((figure["per_second"] for figure in figures if figure["kind"] == "bandwidth"), default=None)


def matmul_peak(figures: list[dict[str, Any]], dtype: str = "bfloat16") -> float | None:
    """FLOPs per second of the best matrix product in this type."""
    found = best(figures).get(("matmul", dtype))
    return found and found["per_second"]


def decode_share(shape: ModelShape, tokens_per_second: float, figures: list[dict[str, Any]]) -> float | None:
    """Share of the bandwidth that one sequence's decode uses, in bytes of the checkpoint's type."""
    limit = bandwidth(figures)
    return limit and tokens_per_second * shape.weight_bytes_per_step / limit


def prefill_share(shape: ModelShape, tokens_per_second: float, figures: list[dict[str, Any]]) -> float | None:
    """Share of the bfloat16 matmul peak that prefill uses."""
    limit = matmul_peak(figures)
    return limit and tokens_per_second * shape.flops_per_prefill_token / limit

#!/usr/bin/env python
"""Compile the TPU kernels for TPUs that this machine does not have, and print what they take.

    python scripts/compile_for_tpu.py [--op OP ...] [--target v5e|v6e|tpu7x ...] [--problems NAME ...] [--no-compile]

Needs the extra `aot-tpu`, except with --no-compile. For each case of an op: the VMEM of every kernel as the compiler
reports it, and the shortest time that the data sheet allows for what must move and multiply. Attention's problems,
which --problems chooses from, also say what share of that the kernels could reach, were they to run at the data sheet's
rates, since they move and multiply more: padding, tiles, contexts read once per tile of queries. These times and shares
are computed, not measured.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # programs for absent devices cannot be read back
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.programs import OPS, program_of
from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES
from pallas_kernels.ragged_paged_attention.tpu.cost import Cost, Rows, kernel_cost, least_cost, spans_of
from pallas_kernels.ragged_paged_attention.tpu.tiles import Problem
from pallas_kernels.tpu_targets import TARGETS, Target, compile_for, vmem_of_kernels, why_not
from pallas_kernels.workloads import choose_backend

ATTENTION = "ragged_paged_attention"
BLOCK_SIZE = 128
BF16 = jnp.dtype(jnp.bfloat16)
HEADS = {"8x4 heads of 128": (8, 4, 128), "8x8 heads of 64": (8, 8, 64), "16x1 heads of 128": (16, 1, 128)}


class Step(NamedTuple):
    """`shared` tokens at the beginning of all rows lie in the same blocks, and are read once."""

    rows: Rows
    window: int | None = None
    shared: int = 0


PROBLEMS = {
    "64 decodes of 1k": Step(((1023, 1),) * 64),
    "63 decodes of 1k, one of 128k": Step(((1023, 1),) * 63 + ((131071, 1),)),
    "64 decodes of 8k, window 1k": Step(((8191, 1),) * 64, window=1024),
    "prompt of 2k": Step(((0, 2048),)),
    "chunk of 1k behind 16k": Step(((16384, 1024),)),
    "32 decodes of 4k, chunk of 512": Step(((4095, 1),) * 32 + ((1024, 512),)),
    "256 decodes of 2k + 128": Step(((2175, 1),) * 256),
    "256 decodes of 2k shared + 128": Step(((2175, 1),) * 256, shared=2048),
    "64 chunks of 16 behind 4k": Step(((4096, 16),) * 64),
    "64 chunks of 16 behind 4k shared": Step(((4096, 16),) * 64, shared=4096),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = [ATTENTION, *OPS]
    parser.add_argument("--op", nargs="*", choices=ops, default=ops, metavar="OP", help="all by default")
    parser.add_argument("--target", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--no-compile", action="store_true", help="print what is computed only")
    options = parser.parse_args()
    if not options.no_compile and why_not():
        sys.exit(f"{why_not()}, or give --no-compile.")
    print("computed, not measured; VMEM in KiB")
    for op in options.op:
        print(f"\n{op}")
        lines = attention_lines(options) if op == ATTENTION else op_lines(op, options)
        for text in lines:
            print(text, flush=True)


def op_lines(op: str, options: argparse.Namespace) -> Iterator[str]:
    """Every serving case on every target."""
    for case in OPS[op].cases.SERVING_CASES:
        backend = choose_backend(op, case, "auto", "tpu")
        program = program_of(op, case, backend)
        for target in map(TARGETS.get, options.target):
            least, rates = Cost(case.num_bytes, case.flops), rates_of(target, getattr(case, "activations", None))
            text = f"{case.name:38} {backend:10} {target.name:6} {roofline(least, rates)}"
            if not options.no_compile:
                compiled = compile_for(target, program.function, *program.args, donate=program.donate)
                text += "  VMEM " + " ".join(f"{size // 1024:5}" for size in vmem_of_kernels(compiled).values())
            yield text


def rates_of(target: Target, activations: str | None = None) -> tuple[float, float]:
    """Bytes and operations per second; of products of `activations`' type where the target has them."""
    info = target.info
    narrow = {None: 0, "int8": info.int8_ops_per_second, "float8_e4m3fn": info.fp8_ops_per_second}[activations]
    return info.mem_bw_bytes_per_second, narrow or info.bf16_ops_per_second


def roofline(least: Cost, rates: tuple[float, float]) -> str:
    return (
        f"{least.num_bytes / 2**20:7.1f} MiB {least.flops / 1e9:7.1f} GFLOP"
        f"  >= {1e6 * least.seconds(*rates):7.1f} us ({bound(least, rates)})"
    )


def bound(cost: Cost, rates: tuple[float, float]) -> str:
    return "memory" if cost.num_bytes / rates[0] > cost.flops / rates[1] else "matmul"


def attention_lines(options: argparse.Namespace) -> Iterator[str]:
    yield "one layer, bfloat16, blocks of 128 tokens. VMEM: write, spans where rows share, decode, prefill"
    for name in options.problems:
        for heads in HEADS:
            for target in options.target:
                yield attention_line(name, heads, TARGETS[target], compiled=not options.no_compile)


def attention_line(name: str, heads: str, target: Target, *, compiled: bool) -> str:
    step, problem = PROBLEMS[name], Problem(*HEADS[heads], BLOCK_SIZE, BF16, BF16)
    rates = rates_of(target)
    least = least_cost(step.rows, problem, step.window, step.shared)
    shared_6R = spans_of(step.rows, step.shared, BLOCK_SIZE) if step.shared else None
    own = sum(kernel_cost(step.rows, problem, step.window, shared_6R).values(), Cost(0, 0))
    sizes = vmem_of(step, problem, target) if compiled else []
    vmem = "  VMEM " + " ".join(f"{size // 1024:5}" for size in sizes) if compiled else ""
    share = least.seconds(*rates) / own.seconds(*rates)
    return (
        f"{name:32} {heads:18} {target.name:6} {roofline(least, rates)}"
        f"  kernels {own.num_bytes / 2**20:7.1f} MiB <= {share:4.0%} ({bound(own, rates)}){vmem}"
    )


def vmem_of(step: Step, problem: Problem, target: Target) -> list[int]:
    """Of the kernels that write, attend to what rows share, decode and prefill."""
    rows, window = step.rows, step.window
    K, H, R, T = problem.num_kv_heads, problem.head_dim, len(rows), sum(new for _, new in rows)
    max_blocks = max(-(-sum(row) // BLOCK_SIZE) for row in rows)

    def layer(kv, q_TNH, k_TKH, v_TKH, shared_6R, *where):
        metadata = rpa.make_metadata(
            R,
            *where,
            num_tokens=T,
            block_size=BLOCK_SIZE,
            window=window,
            backend="tpu",
            shared_6R=shared_6R if step.shared else None,
        )
        return rpa.ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, kv, metadata, scale=H**-0.5, window=window, backend="tpu"
        )

    kv = jax.eval_shape(lambda: rpa.kv_zeros(4096, BLOCK_SIZE, K, H, BF16, "tpu"))
    tokens = [jax.ShapeDtypeStruct((T, heads, H), BF16) for heads in (K * problem.group_size, K, K)]
    where = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((NUM_LINES, R), (R + 1,), (R,), (R, max_blocks))]
    sizes = vmem_of_kernels(compile_for(target, layer, kv, *tokens, *where, donate=(0,)))
    return [
        sizes[f"paged_attention_{kernel}"]
        for kernel in ("write", "spans", "decode", "prefill")
        if kernel != "spans" or step.shared
    ]


if __name__ == "__main__":
    main()

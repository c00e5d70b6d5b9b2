#!/usr/bin/env python
"""Time the matrix products of a decoder on this machine's CPU, as ratios within one run.

    python scripts/bench_products.py [--rows 2,8,32,512] [--shape 3072x1024] [--repeat 8]

Which form of a product XLA:CPU runs fastest decides how weights are kept (jaxpaged/layers). Every form is timed in
turns with the others over weights that come from memory, in milliseconds of CPU time of all threads together, and the
smallest of several is kept: on a machine that others use too, that is steadier than the wall clock. `x` is the time
of "bfloat16", the form of unquantized models, over the form's own. With the extra `cpu`, "our kernel" is what decoding
takes for few rows, and prompts too with weights of 4 and 8 bits; where XLA is better with so many rows, it is XLA. GB/s
and GFLOP/s are those of all cores when each does its share of that CPU time.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.layers.linear import XLA, choose_matmul_backend, int4_product, matrix_product, rows_product
from jaxpaged.params.quantized import PackedArray, QuantizedArray, pack

CORES = os.cpu_count() or 1
STREAMED_BYTES = 96 * 2**20  # more than the caches hold
FEW_ROWS = 64  # from here on, products are bound by arithmetic: two weights are enough


def one_plane_product(x_TI: jax.Array, weight: QuantizedArray) -> jax.Array:
    """Activations rounded to 8 bits: what accuracy costs in the two planes of layers/linear.py."""
    x_TI = x_TI.astype(jnp.float32)
    step_T1 = jnp.max(jnp.abs(x_TI), axis=1, keepdims=True) / 127
    rounded_TI = jnp.round(x_TI / step_T1).astype(jnp.int8)
    sums_TO = jnp.einsum("TI,OI->TO", rounded_TI, weight.values, preferred_element_type=jnp.int32)
    return (sums_TO.astype(jnp.float32) * step_T1 * weight.scales).astype(jnp.bfloat16)


def converted_weight(x_TI: jax.Array, weight: QuantizedArray, dtype: str) -> jax.Array:
    """8-bit weights that are converted inside of the product."""
    sums_TO = matrix_product(x_TI.astype(dtype), weight.values.astype(dtype), jnp.float32)
    return (sums_TO * weight.scales).astype(jnp.bfloat16)


FORMS: dict[str, tuple[str, Callable[..., jax.Array]]] = {
    "bfloat16": ("bfloat16", lambda x, w: matrix_product(x, w, jnp.bfloat16)),
    "bfloat16, float32 out": ("bfloat16", lambda x, w: matrix_product(x, w, jnp.float32)),
    "bfloat16, weight [in, out]": ("transposed", lambda x, w: jnp.einsum("TI,IO->TO", x, w)),
    "float32": ("float32", lambda x, w: matrix_product(x.astype(jnp.float32), w, jnp.float32)),
    "int8, two planes": ("int8", lambda x, w: rows_product(x, w, jnp.bfloat16)),
    "int8, one plane": ("int8", one_plane_product),
    "int8 -> bfloat16": ("int8", lambda x, w: converted_weight(x, w, "bfloat16")),
    "int8 -> float32": ("int8", lambda x, w: converted_weight(x, w, "float32")),
    "int4 -> bfloat16": ("int4", lambda x, w: int4_product(x, w, jnp.bfloat16)),
}
KERNEL = choose_matmul_backend("cpu", 1, deterministic=False)
KERNEL_FORMS: dict[str, tuple[str, Callable[..., jax.Array]]] = {
    "bfloat16, our kernel": ("bfloat16", lambda x, w: matrix_product(x, w, jnp.bfloat16, KERNEL)),
    "int8, our kernel": ("int8", lambda x, w: rows_product(x, w, jnp.bfloat16, KERNEL)),
    "int4, our kernel": ("int4", lambda x, w: int4_product(x, w, jnp.bfloat16, KERNEL)),
}


def make_weights(kind: str, num_out: int, num_in: int) -> list[jax.Array | QuantizedArray | PackedArray]:
    """As many random weights as do not fit the caches."""
    draw = np.random.default_rng(0)
    itemsize = {"int4": 0.5, "int8": 1, "float32": 4}.get(kind, 2)
    count = max(2, int(STREAMED_BYTES / (num_out * num_in * itemsize)))
    shape = (num_in, num_out) if kind == "transposed" else (num_out, num_in)
    if kind == "int8":
        scales = jnp.full(num_out, 0.01, jnp.float32)
        return [
            QuantizedArray(jnp.asarray(draw.integers(-127, 128, shape), jnp.int8), scales, "bfloat16")
            for _ in range(count)
        ]
    if kind == "int4":
        packed, scales = map(jnp.asarray, pack(draw.standard_normal(shape, np.float32)))
        return [PackedArray(packed.copy(), scales.copy(), "bfloat16") for _ in range(count)]
    dtype = "float32" if kind == "float32" else "bfloat16"
    return [jnp.asarray(draw.standard_normal(shape, np.float32), dtype) for _ in range(count)]


def race(runs: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Smallest CPU seconds of each run, in turns."""
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(repeat + 1):  # the first one warms up
        for name, run in runs.items():
            start = time.process_time()
            jax.block_until_ready(run())
            if turn:
                best[name] = min(best[name], time.process_time() - start)
    return best


def read_speed(repeat: int) -> float:
    """Bytes per second of a sum over arrays that do not fit the caches, all cores together."""
    arrays = [jnp.ones(16 * 2**20, jnp.float32) for _ in range(4)]
    program = jax.jit(lambda arrays: [jnp.max(array) for array in arrays]).lower(arrays).compile()
    seconds = race({"read": lambda: program(arrays)}, repeat)["read"]
    return sum(array.nbytes for array in arrays) / seconds * CORES


def compare(rows: int, num_out: int, num_in: int, weights: dict[str, list], repeat: int) -> Iterable[str]:
    """A line for each form of x [rows, in] times weight [out, in]."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, num_in), np.float32), jnp.bfloat16)
    used = {kind: some[: 2 if rows > FEW_ROWS else None] for kind, some in weights.items()}
    forms = FORMS if KERNEL == XLA else FORMS | KERNEL_FORMS
    programs = {name: jax.jit(form).lower(x, used[kind][0]).compile() for name, (kind, form) in forms.items()}
    runs = {
        name: lambda program=programs[name], some=used[kind]: [program(x, w) for w in some]
        for name, (kind, _) in forms.items()
    }
    seconds = {name: best / len(used[forms[name][0]]) for name, best in race(runs, repeat).items()}
    for name, each in seconds.items():
        ratio, speed = seconds["bfloat16"] / each, CORES / each / 1e9
        num_bytes = used[forms[name][0]][0].nbytes
        yield (
            f"  {name:28} {each * 1e3:9.3f} ms  {ratio:5.2f} x  {num_bytes * speed:6.1f} GB/s  "
            f"{2 * rows * num_out * num_in * speed:6.0f} GFLOP/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="2,8,32,512", help="rows of activations")
    parser.add_argument("--shape", default="3072x1024", help="outputs x inputs of the weight")
    parser.add_argument("--repeat", type=int, default=8)
    options = parser.parse_args()
    num_out, num_in = (int(word) for word in options.shape.split("x"))
    print(f"{jax.devices()[0].device_kind}, {CORES} cores, jax {jax.__version__}; weights [{num_out}, {num_in}]")
    print(f"reading memory: {read_speed(options.repeat) / 1e9:.1f} GB/s")
    weights = {kind: make_weights(kind, num_out, num_in) for kind in {kind for kind, _ in FORMS.values()}}
    for rows in (int(word) for word in options.rows.split(",")):
        print(f"{rows} rows")
        for line in compare(rows, num_out, num_in, weights, options.repeat):
            print(line, flush=True)


if __name__ == "__main__":
    main()

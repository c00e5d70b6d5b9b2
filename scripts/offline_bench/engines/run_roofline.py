"""What the machine can do, as far as XLA shows it: bytes per second from memory and matrix products per second.

Bandwidth is what products of a few rows with many weights reach, and a plain sum and a copy of a large array; peak is
the best of products of many rows. Each is tried over several shapes and types, and each figure names its shape.
Weights are contracted on their last axis, as checkpoints store them. Nothing of jaxpaged is used.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

from session import Session

WEIGHTS_KN = ((768, 2048), (1024, 3072), (3072, 1024))
MANY_ROWS = (512, 1024)
FEW_ROWS = (2, 8)
ACCELERATOR_WEIGHTS_KN = ((4096, 4096), (4096, 14336), (8192, 8192))
ACCELERATOR_MANY_ROWS = (2048, 8192)
TYPES = ("bfloat16", "float32", "int8")
CPU_BYTES, ACCELERATOR_BYTES = 256 << 20, 2 << 30
TARGET_SECONDS = 0.2
"""How long each figure is measured. Every repetition is timed, and the best one counts."""


def best_seconds(run: Callable[[], object]) -> float:
    import jax

    jax.block_until_ready(run())
    end, best = time.perf_counter() + TARGET_SECONDS, math.inf
    while time.perf_counter() < end or best == math.inf:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - begin)
    return best


def product(x_MK, w_NK):
    """[M, K] x [N, K] -> [M, N], in the type of the inputs; int8 gives int32."""
    import jax
    import jax.numpy as jnp

    out = jnp.int32 if x_MK.dtype == jnp.int8 else x_MK.dtype
    return jax.lax.dot_general(x_MK, w_NK, (((1,), (1,)), ((), ())), preferred_element_type=out)


def filled(shape: tuple[int, ...], dtype: str):
    import jax.numpy as jnp

    return (jnp.arange(math.prod(shape), dtype=jnp.int32) % 3).astype(dtype).reshape(shape)


def measure_matmul(dtype: str, rows: int, k: int, n: int) -> dict:
    import jax

    x_MK, w_NK = filled((rows, k), dtype), filled((n, k), dtype)
    seconds = best_seconds(partial(jax.jit(product), x_MK, w_NK))
    return {"kind": "matmul", "dtype": dtype, "shape": f"{rows}x{k}x{n}", "per_second": 2 * rows * k * n / seconds}


def measure_products(dtype: str, rows: int, k: int, n: int, num_bytes: int) -> dict:
    """Products with weights that together are larger than any cache."""
    import jax

    x_MK, size = filled((rows, k), dtype), filled((1,), dtype).dtype.itemsize * k * n
    weights = [filled((n, k), dtype) for _ in range(max(2, num_bytes // size))]
    run = jax.jit(lambda x_MK, weights: [product(x_MK, w_NK) for w_NK in weights])
    seconds = best_seconds(partial(run, x_MK, weights))
    shape = f"{rows}x{k}x{n}, {len(weights)} weights"
    return {"kind": "bandwidth", "dtype": dtype, "shape": shape, "per_second": len(weights) * size / seconds}


def measure_streams(num_bytes: int) -> Iterator[dict]:
    """A sum reads an array; a copy reads and writes it."""
    import jax
    import jax.numpy as jnp

    x_n = filled((num_bytes // 4,), "float32")
    for name, function, moved in (("sum", jnp.sum, 1), ("copy", lambda x_n: x_n + 1, 2)):
        per_second = moved * x_n.nbytes / best_seconds(partial(jax.jit(function), x_n))
        yield {
            "kind": "bandwidth",
            "dtype": "float32",
            "shape": f"{name} of {num_bytes >> 20} MiB",
            "per_second": per_second,
        }


def measure_all(on_cpu: bool) -> Iterator[dict]:
    num_bytes = CPU_BYTES if on_cpu else ACCELERATOR_BYTES
    weights = WEIGHTS_KN if on_cpu else ACCELERATOR_WEIGHTS_KN
    yield from measure_streams(num_bytes)
    for dtype in TYPES:
        for k, n in weights:
            for rows in FEW_ROWS:
                yield measure_products(dtype, rows, k, n, num_bytes)
            for rows in MANY_ROWS if on_cpu else ACCELERATOR_MANY_ROWS:
                yield measure_matmul(dtype, rows, k, n)


def main() -> None:
    session = Session()
    import jax

    device = jax.devices()[0]
    for figure in measure_all(device.platform == "cpu"):
        session.emit("roofline", **figure)
    session.emit("end", versions={"jax": jax.__version__, "device": device.device_kind})


if __name__ == "__main__":
    main()

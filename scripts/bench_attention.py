#!/usr/bin/env python
"""Time ragged paged attention on this machine, as ratios within one run.

    python scripts/bench_attention.py [--dtype bfloat16] [--repeat 7] [--quick]

Every figure is the smallest CPU time of several runs, taken in turns, in milliseconds of all threads together:
on a machine that others use too, that is steadier than the wall clock. The yardstick of a decode is plain dense
attention over a contiguous cache of the same contexts, which no paged cache can beat. With the extra `cpu` the first
lines are wall times of decodes by XLA (`reference`) and by kernels of our own (`cpu`), in turns, and how much of the
bandwidth the latter reach with which all threads read an array in the same run. Then the same of prompts, and how much
of the speed of a product of 512 rows, in flops of the slots that queries see.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.worker.step.zero_pages import has_zero_pages, zero_pages
from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.serving import spans_in_common

BACKEND = "reference"
BLOCK_SIZE = 16  # of the races between backends: an engine's default
HEADS = {"K8 G2 H128": (8, 2, 128), "K12 G1 H64 (multi-head)": (12, 1, 64), "K1 G4 H256 (multi-query)": (1, 4, 256)}
LONG_TAIL = [(8191, 1)] + [(31 + 15 * i, 1) for i in range(31)]
DECODES = {"32 rows of 528": [(527, 1)] * 32, "1 row of 8,192": [(8191, 1)], "32 rows, long tail": LONG_TAIL}
PREFILLS = {"512 tokens": [(0, 512)], "256 after 4,096": [(4096, 256)], "4 prompts of 128": [(0, 128)] * 4}
EQUAL = [(sum(cached for cached, _ in LONG_TAIL) // 32, 1)] * 32


def paged(
    rows, heads, block_size, dtype, num_blocks=None, in_common=0, reads_once=True, backend=BACKEND
) -> Callable[[], None]:
    """A compiled step over `rows`, (cached, new) tokens each, with a donated cache of shuffled blocks. The first
    `in_common` tokens of all rows lie in the same blocks; `reads_once`: attention is told so."""
    (K, G, H), S = heads, block_size
    needed = [-(-sum(row) // S) for row in rows]
    table_RM = np.zeros((len(rows), max(needed)), np.int32)
    ids = iter(np.random.default_rng(0).permutation(sum(needed)) + 1)
    for row, n in enumerate(needed):
        table_RM[row, :n] = [next(ids) for _ in range(n)]
    table_RM[:, : in_common // S] = table_RM[0, : in_common // S]
    start_R1 = np.cumsum([0] + [new for _, new in rows])
    T = int(start_R1[-1])
    q_TNH, k_TKH = (jax.random.normal(jax.random.key(0), (T, heads, H), dtype) for heads in (K * G, K))
    kv = zeros_in_large_pages(lambda: rpa.kv_zeros(num_blocks or sum(needed) + 1, S, K, H, dtype, backend))
    shared_6R = spans_in_common(rows, in_common, rpa.shared_work(backend, T, S) if reads_once else None)
    where = [jnp.asarray(x, jnp.int32) for x in (start_R1, [sum(row) for row in rows], table_RM, shared_6R)]

    def step(q_TNH, k_TKH, kv, start_R1, seq_lens_R, table_RM, shared_6R):
        metadata = rpa.make_metadata(
            len(rows),
            start_R1,
            seq_lens_R,
            table_RM,
            num_tokens=T,
            block_size=S,
            window=None,
            backend=backend,
            decodes_only=all(new == 1 for _, new in rows),
            shared_6R=shared_6R,
        )
        return rpa.ragged_paged_attention(q_TNH, k_TKH, k_TKH, kv, metadata, scale=H**-0.5, backend=backend)

    program = jax.jit(step, donate_argnums=2).lower(q_TNH, k_TKH, kv, *where).compile()
    state = [kv]

    def run() -> None:
        out_TNH, state[0] = program(q_TNH, k_TKH, state[0], *where)
        jax.block_until_ready((out_TNH, state[0]))

    return run


def zeros_in_large_pages(make: Callable[[], rpa.KVTensor]) -> rpa.KVTensor:
    """An empty cache as `make` would make it, in memory as an engine has its own."""
    if not has_zero_pages("cpu"):
        return make()
    shapes, tree = jax.tree.flatten(jax.eval_shape(make))
    return jax.tree.unflatten(tree, jax.jit(lambda: zero_pages(shapes))())


def dense(num_rows, length, heads, dtype) -> Callable[[], None]:
    """Decode attention over a contiguous, head-major cache."""
    K, G, H = heads
    q_RKGH = jax.random.normal(jax.random.key(0), (num_rows, K, G, H), dtype)
    k_RKPH = jax.random.normal(jax.random.key(1), (num_rows, K, length, H), dtype)

    def attend(q_RKGH, k_RKPH, v_RKPH):
        score = jnp.einsum("RKGH,RKPH->RKGP", q_RKGH, k_RKPH, preferred_element_type=jnp.float32) * H**-0.5
        weight = jax.nn.softmax(score, axis=-1).astype(dtype)
        return jnp.einsum("RKGP,RKPH->RKGH", weight, v_RKPH, preferred_element_type=jnp.float32).astype(dtype)

    program = jax.jit(attend).lower(q_RKGH, k_RKPH, k_RKPH).compile()
    v_RKPH = k_RKPH + 1
    return lambda: jax.block_until_ready(program(q_RKGH, k_RKPH, v_RKPH))


def race(title: str, runs: dict[str, Callable[[], None]], repeat: int) -> None:
    """Print the best CPU time of each run, and its ratio to the first one's."""
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(repeat + 1):  # the first one warms up
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                best[name] = min(best[name], time.process_time() - start)
    print(title)
    base = next(iter(best.values()))
    for name, seconds in best.items():
        print(f"  {name:44} {seconds * 1e3:9.2f} ms  {seconds / base:6.2f} x", flush=True)


def read_speed(repeat: int) -> float:
    """Bytes a second at which all threads read an array that no cache holds."""
    x = jnp.ones((64, 2**20))
    total = jax.jit(lambda x: x.sum(axis=1)).lower(x).compile()
    return x.nbytes / min(wall_seconds(lambda: jax.block_until_ready(total(x))) for _ in range(repeat + 1))


def wall_seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def product_speed(dtype, repeat: int) -> float:
    """Flops a second of XLA's product of 512 rows."""
    x, weight = jnp.ones((512, 1024), dtype), jnp.ones((3072, 1024), dtype)
    form = {"preferred_element_type": dtype}  # an engine's: XLA computes x @ weight.T at half the speed on some CPUs
    product = jax.jit(lambda x, weight: jnp.einsum("ti,oi->to", x, weight, **form)).lower(x, weight).compile()
    best = min(wall_seconds(lambda: jax.block_until_ready(product(x, weight))) for _ in range(repeat + 1))
    return 2 * x.shape[0] * weight.size / best


def race_backends(title: str, rows: list[tuple[int, int]], heads: tuple[int, int, int], dtype, repeat: int) -> None:
    """Print how long attention takes with XLA and with our kernels, and the share of what bounds it: the memory's speed
    for decodes, the products' for prompts."""
    K, G, H = heads
    xla, ours = (paged(rows, heads, BLOCK_SIZE, dtype, backend=name) for name in (BACKEND, "cpu"))
    pairs = np.array([(wall_seconds(xla), wall_seconds(ours)) for _ in range(repeat + 1)][1:])
    best = pairs.min(axis=0)
    if all(new == 1 for _, new in rows):
        work, speed, unit = 2 * sum(map(sum, rows)) * K * H * dtype.itemsize, read_speed(repeat), "GB/s"
    else:
        seen = sum(new * cached + new * (new + 1) // 2 for cached, new in rows)
        work, speed, unit = 4 * K * G * H * seen, product_speed(dtype, repeat), "GF/s"
    print(
        f"  {title:44} {best[0] * 1e3:8.2f} ms {best[1] * 1e3:8.2f} ms, {np.median(pairs[:, 0] / pairs[:, 1]):5.2f} x,"
        f" {work / best[1] / 1e9:5.1f} of {speed / 1e9:.1f} {unit}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one head shape only")
    options = parser.parse_args()
    dtype = jnp.dtype(options.dtype)
    names = list(HEADS)[: 1 if options.quick else None]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.dtype}")
    if rpa.backends("cpu")["cpu"] is None:
        for name in names:
            print(f"{name}: reference, cpu, the median of the ratios of neighbours, bytes or flops a second")
            for title, rows in (DECODES | PREFILLS).items():
                race_backends(title, rows, HEADS[name], dtype, options.repeat)
    for name in names:
        heads = HEADS[name]
        runs = {f"dense, 32 rows of {EQUAL[0][0] + 1}": dense(32, EQUAL[0][0] + 1, heads, dtype)}
        for block_size in (16, 32, 64):
            runs[f"paged, the same, blocks of {block_size}"] = paged(EQUAL, heads, block_size, dtype)
        runs["paged, as many tokens in a long tail, 32"] = paged(LONG_TAIL, heads, 32, dtype)
        race(f"decode, {name}", runs, options.repeat)
    heads = HEADS[names[0]]
    prefills = {f"512 new tokens after {n}": paged([(n, 512)], heads, 32, dtype) for n in (0, 2048, 8192)}
    prefills["32 prompts of 16"] = paged([(0, 16)] * 32, heads, 32, dtype)
    race(f"prefill, {names[0]}", prefills, options.repeat)
    for name in names:
        for title, rows in (("decodes", [(527, 1)] * 32), ("prompts of 16 more", [(512, 16)] * 31)):
            runs = {
                "each by itself": paged(rows, HEADS[name], 16, dtype, in_common=512, reads_once=False),
                "what they share once": paged(rows, HEADS[name], 16, dtype, in_common=512),
            }
            race(f"{len(rows)} {title} with 512 in common, {name}", runs, options.repeat)
    rows = [(0, 1)] * 32
    writes = {f"32 rows of one token, {n} blocks": paged(rows, heads, 32, dtype, n) for n in (64, 512, 4096)}
    race("KV write and little else: must not grow with the number of blocks", writes, options.repeat)


if __name__ == "__main__":
    main()

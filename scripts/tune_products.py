#!/usr/bin/env python
"""Time a decoder's products of few rows on this machine's GPU, and write what our kernel needs.

    python scripts/tune_products.py [--model llama-8b] [--bits 16 8 4] [--seconds 65] [--output FILE] [--interpret]

Each product of a layer, as the model stores its weights and with what is fused into it, and that with the head: by
cuBLAS as it chooses kernels itself, which is what the engine compiles, by cuBLAS when XLA may try its kernels, and by
the kernel of `few_rows_matmul` with many tiles. Products with weights of 8 bits (int8, a scale for each output) and of
4 (groups of 32) are compiled as by the engine, by kernels that XLA tries. Weights lie in more memory than a cache
holds. Microseconds of one product, where programs are graphs whose kernels run one after the other. The tiles that are
faster than the engine's cuBLAS go to FILE, by default the kernel's `tuned.json`; entries of other devices and shapes
stay. Programs are compiled side by side, on all cores, and timed one after the other; what does not compile is told.
After --seconds nothing new is begun. --interpret: the same motions anywhere, whose timings mean nothing.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from offline_bench.checkpoints import MODELS, ModelShape

from jaxpaged.layers.linear import converted_product
from jaxpaged.worker.programs.compiler_options import APART, UNTRIED
from pallas_kernels.few_rows_matmul import gpu
from pallas_kernels.few_rows_matmul.gpu import Tiles
from pallas_kernels.few_rows_matmul.scaled import ScaledWeight
from pallas_kernels.int4_matmul import GROUP, int4_matmul
from pallas_kernels.timing import Calls, Chain, compiled, measured_bandwidth, touched

ROWS, BETWEEN = (8, 64), {8: (16,), 64: (32,)}
"""Rows that all tiles are tried with, and rows that the best of those are tried with: together `TUNED_ROWS`."""
BYTES = 400 << 20  # of all copies of a weight
BYTES_OF_CALLS = 6 << 30  # that are read in one timing: about 2 ms
SHARED_MEMORY = 224 << 10
PROGRAMS = range(60, 2200)  # of a launch
MIN_GAIN, MOST_ERROR = 0.02, 0.02
KEPT = 6
"""Tiles that are tried with other numbers of rows."""
INTERPRETED = [Tiles(32, 32)]
CUBLAS = {**UNTRIED, **APART}
SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}

NARROW = [(32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3)]
FIRST = [(64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3)]
FIRST += [(64, 256, 4, 5), (128, 64, 4, 3), (128, 64, 4, 5), (128, 128, 8, 3), (128, 128, 4, 4)]
WIDE = [(64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 5), (128, 128, 8, 3)]
WIDE += [(256, 64, 8, 3), (256, 64, 8, 4)]
"""(rows of weights in an instruction's tile, inputs, warps, stages): for few rows, for few rows that are the narrow
side, and for more rows."""
FIRST_8 = [(64, 128, 2, 4), (64, 256, 2, 3), (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (32, 256, 2, 4)]
FIRST_8 += [(32, 512, 2, 3), (128, 128, 8, 4)]
ROWS_8 = [(128, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (32, 256, 4, 3)]
FIRST_4 = [(64, 256, 2, 3), (64, 512, 2, 3), (64, 256, 4, 4), (64, 512, 4, 3), (32, 256, 2, 4), (32, 512, 2, 3)]
FIRST_4 += [(128, 256, 8, 4)]
ROWS_4 = [(128, 128, 4, 3), (128, 256, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3)]
"""The same for weights of 8 and of 4 bits: few rows as the narrow side, and more rows as the tall one."""


@dataclasses.dataclass(frozen=True)
class Product:
    """One product. `is_gated`: of a gate and of what it multiplies, joined, with that after it. `is_added`: to what has
    the results' shape. bits: of a weight, 16, 8 or 4."""

    name: str
    num_inputs: int
    num_outputs: int
    is_gated: bool = False
    is_added: bool = False
    bits: int = 16

    @property
    def num_bytes(self) -> int:
        numbers = self.num_inputs * self.num_outputs
        return {16: 2 * numbers, 8: numbers + 4 * self.num_outputs, 4: numbers // 2 + 2 * numbers // GROUP}[self.bits]

    @property
    def copies(self) -> int:
        return max(2, min(16, BYTES // self.num_bytes))


def products_of(shape: ModelShape, bits: int) -> list[Product]:
    """Heads have 8 bits where other weights have 4."""
    hidden, columns = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = [
        Product("q, k, v joined", hidden, queries + 2 * keys),
        Product("o, added", queries, hidden, is_added=True),
        Product("gate, up joined, gated", hidden, 2 * columns, is_gated=True),
        Product("down, added", columns, hidden, is_added=True),
        Product("head", hidden, shape.vocab_size),
    ]
    return [dataclasses.replace(product, bits=bits) for product in products[: 4 if bits == 4 else 5]]


def draw_weight(product: Product, key: jax.Array) -> Any:
    """A weight that gives outputs of unit size."""
    F, D, bits = product.num_outputs, product.num_inputs, product.bits
    if bits == 16:
        return D**-0.5 * jax.random.normal(key, (F, D), jnp.bfloat16)
    values = jax.random.bits(key, (F, D * bits // 8), jnp.uint8)
    if bits == 8:
        return ScaledWeight(jax.lax.bitcast_convert_type(values, jnp.int8), jnp.full((F, 1), D**-0.5 / 74))
    return ScaledWeight(values, jnp.full((F, D // GROUP), D**-0.5 / 4.6, jnp.bfloat16))


def by_xla(product: Product, x: jax.Array, weight: Any, added: jax.Array) -> jax.Array:
    """As the engine does without our kernel."""
    if product.bits == 16:
        out = jnp.einsum("td,fd->tf", x, weight, preferred_element_type=x.dtype)
    elif product.bits == 8:
        out = (converted_product(x, weight.values) * weight.scales[:, 0]).astype(x.dtype)
    else:
        out = int4_matmul(x, weight.values, weight.scales, backend="reference").astype(x.dtype)
    if not product.is_gated:
        return added + out if product.is_added else out
    out = out.reshape(len(x), -1, 2).astype(jnp.float32)
    return (jax.nn.silu(out[:, :, 0]) * out[:, :, 1]).astype(x.dtype)


def by_kernel(
    product: Product, x: jax.Array, weight: Any, added: jax.Array, tiles: Tiles, interpret: bool
) -> jax.Array:
    if product.is_gated:
        weight = jax.tree.map(lambda part: part.reshape(-1, 2, part.shape[1]), weight)
    if product.is_added:
        return gpu.added_product(x, weight, added, tiles, interpret)
    return gpu.product(x, weight, x.dtype, tiles, interpret)


def candidates(product: Product, rows: int) -> Iterator[Tiles]:
    """Tiles whose stages a core can hold, and which make neither too few nor too many programs."""
    is_few, bits = rows <= gpu.FEWEST_ROWS, product.bits
    if bits < 16:
        first, other = (FIRST_8, ROWS_8) if bits == 8 else (FIRST_4, ROWS_4)
        kinds = [(first, (1, 2), True)] if is_few else [(other, (1,), False)]
    elif is_few:
        kinds = [(NARROW, (1,), False), (FIRST, (1, 2, 4, 8), True)]
    else:
        kinds = [(WIDE, (1,), False), (WIDE, (1, 2, 4), True)]
    weights = 2 if product.is_gated else 1
    shares = (1,) if bits == 16 or product.is_gated or product.num_outputs > product.num_inputs * 4 else (1, 2, 4)
    for listed, all_folds, weight_first in kinds:
        for (height, inputs, warps, stages), folds, parts in itertools.product(listed, all_folds, shares):
            outputs = height // weights // folds
            programs = product.num_outputs // weights // max(1, outputs) * parts
            held = stages * inputs * (height * bits // 8 + 2 * max(rows * folds, gpu.FEWEST_ROWS))
            is_whole = parts == 1 or (folds == 1 and product.num_inputs % (parts * inputs) == 0)
            if held <= SHARED_MEMORY and programs in PROGRAMS and outputs >= 8 and is_whole:
                yield Tiles(outputs, inputs, folds, warps, stages, weight_first, parts)


Way = Callable[[jax.Array, Any, jax.Array], jax.Array]
Options = Mapping[str, Any]


@jax.jit
def largest_error(out: jax.Array, expected: jax.Array) -> jax.Array:
    """In shares of the largest number."""
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.max(jnp.abs(out - expected)) / jnp.max(jnp.abs(expected))


@functools.cache
def serial() -> Options:
    """What keeps the compiler from running kernels of a graph side by side, if it knows that."""
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options=SERIAL).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        print(f"kernels may run side by side: {error}")
        return {}
    return SERIAL


class Timer:
    """Microseconds of ways to compute a product with some rows. `left()`: seconds that there are."""

    def __init__(self, product: Product, left: Callable[[], float], interpret: bool):
        self.product, self.left, self.interpret = product, left, interpret
        draw = jax.jit(functools.partial(draw_weight, product))
        self.weights = [draw(each) for each in jax.random.split(jax.random.key(0), product.copies)]

    def of(self, ways: list[tuple[Way, Options]], rows: int) -> list[float | str]:
        """Of each way, with its options of the compiler: microseconds, or what went wrong. All must give what the first
        does."""
        weights = self.weights
        chains = [self.chain(way, rows, weights) for way, _ in ways]
        count = 1 if self.interpret else max(1, BYTES_OF_CALLS // (self.product.num_bytes * len(weights)))

        def prepare(chain: Callable[[], Chain], options: Options) -> Calls | str:
            if self.left() < 0:
                return "no time"
            return self.tried(lambda: compiled(chain(), count, None if self.interpret else {**serial(), **options}))

        run = lambda chain, calls: calls.seconds(chain.state, chain.operands)
        with ThreadPoolExecutor(1 if self.interpret else os.cpu_count()) as threads:
            prepared = list(threads.map(prepare, chains, (options for _, options in ways)))
        expected, found = None, list[float | str]()
        for chain, calls in zip(chains, prepared):
            timed = (
                calls if isinstance(calls, str) else self.tried(lambda chain=chain, calls=calls: run(chain(), calls))
            )
            if isinstance(timed, str):
                found.append(timed)
                continue
            seconds, (_, outs) = timed
            expected = outs[-1] if expected is None else expected
            error = float(largest_error(outs[-1], expected))
            found.append(1e6 * seconds / len(weights) if error < MOST_ERROR else f"wrong by {error:.3g} of the largest")
        return found

    def chain(self, way: Way, rows: int, weights: list[Any]) -> Callable[[], Chain]:
        """What makes a chain whose every call multiplies with all copies of the weight."""
        way = jax.jit(way)  # traced once for all copies

        def make() -> Chain:
            draw = functools.partial(jax.random.normal, jax.random.key(1), dtype=jnp.bfloat16)
            x = draw((rows, self.product.num_inputs))
            added = draw((rows, self.product.num_outputs if self.product.is_added else 1))
            out = jax.eval_shape(way, x, weights[0], added)
            return Chain(call, (x, [jnp.zeros(out.shape, out.dtype) for _ in weights]), (added, *weights))

        def call(state, added, *weights):
            x = touched(state[0], state[1][0])
            return x, [way(x, weight, added) for weight in weights]

        return make

    @staticmethod
    def tried[T](action: Callable[[], T]) -> T | str:
        try:
            return action()
        except Exception as error:  # too many registers, too much shared memory, no memory, not supported
            return f"{type(error).__name__}: {error}"[:120].replace("\n", " ").replace("|", "/")


def tune(timer: Timer, bandwidth: float, entries: dict[str, Any], output: Path) -> None:
    """A row of the table for each number of rows; entries get what was faster than cuBLAS."""
    product, interpret = timer.product, timer.interpret
    plain = functools.partial(by_xla, product)
    by_xla_alone = [(plain, CUBLAS), (plain, {**APART, "xla_gpu_enable_triton_gemm": False})]
    others = by_xla_alone if product.bits == 16 else [(plain, APART)]
    ours = lambda tiles: (functools.partial(by_kernel, product, tiles=tiles, interpret=interpret), APART)
    kept, floor = dict[int, list[Tiles]](), 1e6 * product.num_bytes / bandwidth
    for first in ROWS:
        choices = INTERPRETED if interpret else list(candidates(product, first))
        for rows in (first, *([] if interpret else BETWEEN[first])):
            if timer.left() < 0:
                return
            found = timer.of([*others, *map(ours, choices)], rows)
            by_engine, times = found[0], found[len(others) :]
            ranked = sorted(((us, tiles) for us, tiles in zip(times, choices) if isinstance(us, float)), key=first_of)
            failed = [us for us in times if isinstance(us, str)]
            best = ranked[0][0] if ranked else math.nan
            notes = [f"{describe(tiles)}: {us:.2f}" for us, tiles in [*ranked[:10], *ranked[10:][-1:]]]
            notes += [f"{len(failed)} failed: {failed[0]}"] if failed else []
            tried = found[1] if product.bits == 16 else ""
            name = f"{product.name}, {product.bits} bits"
            print_row(rows, name, floor, by_engine, tried, best, floor / best, "; ".join(notes))
            entries.pop(key := key_of(product, rows), None)
            if isinstance(by_engine, float) and best < by_engine * (1 - MIN_GAIN):
                entries[key] = entry(product, ranked[0][1], best, by_engine)
            output.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            kept[rows] = choices = [tiles for _, tiles in ranked[:KEPT]]
            choices = list(dict.fromkeys([*choices, *(kept.get(16, []) if product.bits < 16 else [])]))


def entry(product: Product, tiles: Tiles, microseconds: float, by_xla: float) -> dict[str, Any]:
    date, other = datetime.date.today().isoformat(), "cublas" if product.bits == 16 else "xla"
    times = {"microseconds": round(microseconds, 2), other: round(by_xla, 2)}
    return {"tiles": dataclasses.asdict(tiles), **times, "date": date, "jax": jax.__version__}


def first_of(pair: tuple[float, Tiles]) -> float:
    return pair[0]


def key_of(product: Product, rows: int) -> str:
    name = gpu.describe(rows, product.num_outputs, product.num_inputs, product.is_gated, kind_of(product.bits))
    return f"{jax.devices()[0].device_kind}, {name}"


def kind_of(bits: int) -> str:
    return "" if bits == 16 else f"{bits} bits"


def describe(tiles: Tiles) -> str:
    first = ", weight first" if tiles.weight_first else ""
    shared = f", {tiles.parts} parts" if tiles.parts > 1 else ""
    return f"{tiles.outputs} x {tiles.folds} x {tiles.inputs}, {tiles.warps} w {tiles.stages} s{first}{shared}"


def print_row(*cells: Any) -> None:
    print(f"| {' | '.join(map(shown, cells))} |", flush=True)


def shown(cell: Any) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    parser.add_argument("--bits", type=int, nargs="+", default=[16], choices=(16, 8, 4), help="of weights")
    parser.add_argument("--seconds", type=float, default=65)
    parser.add_argument("--output", type=Path, default=gpu.TUNED, metavar="FILE")
    parser.add_argument("--interpret", action="store_true", help="a few tiles, in Pallas's interpreter")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.interpret:
        sys.exit(
            f"nothing to tune on {jax.default_backend()}: it needs an NVIDIA GPU. Use --interpret to try this script."
        )
    end = time.monotonic() + options.seconds
    left = lambda: end - time.monotonic()
    entries = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    if not options.interpret:
        serial()
    bandwidth = measured_bandwidth((1 << 20) if options.interpret else (1 << 30))
    print(f"{jax.devices()[0].device_kind}, {bandwidth / 1e9:.0f} GB/s; microseconds of one product\n", flush=True)
    header = ("rows", "product", "bytes", "XLA", "cuBLAS tried", "ours", "share", "tiles, from the fastest on")
    print_row(*header)
    print_row(*["---"] * len(header))
    for product in itertools.chain.from_iterable(products_of(MODELS[options.model], bits) for bits in options.bits):
        if left() > 0:
            tune(Timer(product, left, options.interpret), bandwidth, entries, options.output)
    print(f"\n{options.seconds - left():.0f} s")


if __name__ == "__main__":
    main()

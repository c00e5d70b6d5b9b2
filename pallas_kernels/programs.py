"""Every op's serving cases as programs without numbers: what compiling for absent devices and benchmarks share.

Attention over keys and values per head has its own, `testing.layer_of`. Knows no device.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import grouped_matmul as gm
from pallas_kernels import lora_matmul as lm
from pallas_kernels import mla_paged_attention as mla
from pallas_kernels import quantized_matmul as qm
from pallas_kernels import top_k, top_k_top_p
from pallas_kernels.few_rows_matmul.scaled import ScaledWeight
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.lora_matmul import cases as adapter_cases
from pallas_kernels.mla_paged_attention import cases as latent_cases
from pallas_kernels.quantized_matmul import cases as quantized_cases
from pallas_kernels.shapes import ceil_div
from pallas_kernels.top_k import cases as largest_cases
from pallas_kernels.top_k_top_p import cases as mask_cases


@dataclasses.dataclass(frozen=True)
class Program:
    """`function(*args)`; args are trees of shapes, `donate` the numbers of those that are updated in place."""

    function: Callable
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def programs(op: str, backend: str) -> Iterator[tuple[str, Program]]:
    """(case's name, program) of the serving cases of an op that `backend` takes. Raises KeyError for unknown ops."""
    for case in OPS[op].cases.SERVING_CASES:
        program = program_of(op, case, backend)
        if program is not None:
            yield case.name, program


def tuned_products() -> Iterator[tuple[str, Program]]:
    """(name, program) of the products that a GPU's kernel for few rows is tuned for, on whichever device, and of some
    others that it takes."""
    from pallas_kernels.few_rows_matmul import gpu  # Pallas takes a quarter of a second to import

    for key, tiles in gpu.tuned().items():
        rows, outputs, inputs, gated, bits = re.search(
            r"(\d+) rows, (\d+) x (\d+)(, gated)?(?:, (\d) bits)?$", key
        ).groups()
        T, F, D = int(rows), int(outputs), int(inputs)
        weight = _weight((F // 2, 2, D) if gated else (F, D), bits)
        function = partial(gpu.product, dtype="bfloat16", tiles=tiles)
        yield key, Program(function, (_struct((T, D), "bfloat16"), weight))
    yield from _products_in_groups()


def _products_in_groups() -> Iterator[tuple[str, Program]]:
    """The same of weights as checkpoints have them in groups, for which there are default tiles."""
    for T, kind, group, has_zeros, outputs in (
        (8, "uint8", 128, False, (4096,)),
        (8, "uint8", 128, False, (14336, 2)),
        (16, "uint8", 32, True, (14336, 2)),
        (32, "uint8", 64, True, (6144,)),
        (64, "uint8", 128, False, (6144,)),
        (64, "uint8", 128, True, (14336, 2)),
        (8, "int8", 128, True, (4096,)),
        (32, "float8_e4m3fn", 128, False, (6144,)),
        (64, "float8_e4m3fn", 128, False, (14336, 2)),
    ):
        D, is_packed = 4096, kind == "uint8"
        of_groups = _struct((D // group, *outputs), "float32")
        values = _struct((*outputs, D // (1 + is_packed)), kind)
        weight = ScaledWeight(values, of_groups, of_groups if has_zeros else None, groups_first=True)
        function = partial(_product_by_own_tiles, is_gated=len(outputs) > 1)
        zeros = ", zeros" if has_zeros else ""
        name = f"{T} rows, {' x '.join(map(str, outputs))} x {D}, {kind} in groups of {group}{zeros}"
        yield name, Program(function, (_struct((T, D), "bfloat16"), weight))


def _product_by_own_tiles(x_TD: jax.Array, weight: ScaledWeight, is_gated: bool) -> jax.Array:
    from pallas_kernels.few_rows_matmul import gpu

    return gpu.product(x_TD, weight, "bfloat16", gpu.tiles_of(x_TD, weight, is_gated))


def _weight(shape: tuple[int, ...], bits: str | None) -> Any:
    """A weight as `tuned.json` has it; those of 4 bits in groups of 32, without zeros."""
    if bits is None:
        return _struct(shape, "bfloat16")
    *outputs, D = shape
    if bits == "4":
        return ScaledWeight(_struct((*outputs, D // 2), "uint8"), _struct((*outputs, D // 32), "bfloat16"))
    return ScaledWeight(_struct(shape, "int8"), _struct((*outputs, 1), "float32"))


def program_of(op: str, case: Any, backend: str) -> Program | None:
    """One of the op's cases as a program, or None where the backend cannot take it. Raises KeyError for unknown ops."""
    return OPS[op].make(case, backend)


def _masks(case: Any, backend: str) -> Program | None:
    logits_SV = _struct((case.num_rows, case.vocabulary), "float32")
    limits = (_struct((case.num_rows,), dtype) for dtype in ("int32", "float32", "float32"))
    if top_k_top_p.backends(backend, logits_SV)[backend] is not None:
        return None
    return Program(lambda *operands: top_k_top_p.least_logits(*operands, backend=backend), (logits_SV, *limits))


def _largest(case: Any, backend: str) -> Program | None:
    x_SV = _struct((case.num_rows, case.num_columns), "float32")
    known = top_k.backends(backend, x_SV, case.count)
    if backend not in known or known[backend] is not None:
        return None  # TPUs and GPUs have no kernel
    return Program(lambda x_SV: top_k.top_k(x_SV, case.count, backend=backend)[0], (x_SV,))


def _quantized(case: Any, backend: str) -> Program | None:
    D, F, C = case.num_inputs, case.num_outputs, case.num_groups
    zero_CF = _struct((C, F), "float32") if case.zeros else None
    weight = qm.QuantizedWeight(_struct((F, D), case.weights), _struct((C, F), case.scales), zero_CF)
    x_TD = _struct((case.num_tokens, D), case.dtype)
    if qm.backends(backend, x_TD, weight)[backend] is not None or (case.activations and backend != "reference"):
        return None
    settings = {"activations": case.activations, "backend": backend}
    return Program(lambda *operands: qm.quantized_matmul(*operands, **settings), (x_TD, weight))


def _grouped(case: Any, backend: str) -> Program | None:
    E, D, F = len(case.sizes), case.num_inputs, case.num_outputs
    scale_ECF = None if case.weights == case.dtype else _struct((E, case.num_groups, F), case.scales)
    zero_ECF = _struct((E, case.num_groups, F), "float32") if case.zeros else None
    weights = gm.ExpertWeights(_struct((E, F, D), case.weights), scale_ECF, zero_ECF)
    x_TD = _struct((case.num_tokens, D), case.dtype)
    if gm.backends(backend, x_TD, weights)[backend] is not None:
        return None
    return Program(
        lambda *operands: gm.grouped_matmul(*operands, backend=backend), (x_TD, weights, _struct((E,), "int32"))
    )


def _adapters(case: Any, backend: str) -> Program | None:
    T, S, r, I, O = len(case.slots), case.num_slots, case.num_ranks, case.num_inputs, case.num_outputs
    x_TI, a_SrI, b_SrO, base_TO = (_struct(dims, case.dtype) for dims in ((T, I), (S, r, I), (S, r, O), (T, O)))
    known = lm.backends(backend, x_TI, a_SrI)
    if backend not in known or known[backend] is not None:
        return None  # TPUs have no kernel
    product = lambda *operands: lm.lora_matmul(*operands, dtype=case.dtype, backend=backend)
    return Program(product, (x_TI, a_SrI, b_SrO, _struct((T,), "int32"), base_TO))


def _latent(case: Any, backend: str) -> Program | None:
    T, R, N, C, P, S = case.num_tokens, len(case.rows), case.num_heads, case.latent_dim, case.rope_dim, case.block_size
    max_blocks = ceil_div(max(map(sum, case.rows)), S)
    q = [_struct((T, N, size), case.dtype) for size in (C, P)]
    new = [_struct((T, size), case.dtype) for size in (C, P)]
    cache = jax.eval_shape(lambda: mla.cache_zeros(case.num_blocks, S, C, P, case.cache_dtype, backend, case.kv_scales))
    where = [_struct(dims, "int32") for dims in ((R + 1,), (R,), (R, max_blocks))]
    if mla.backends(backend, *q, cache)[backend] is not None:
        return None

    def layer(cache, q_TNC, q_rope_TNP, latent_TC, rope_TP, *where):
        metadata = mla.make_metadata(*where, num_tokens=T, block_size=S)
        operands = (q_TNC, q_rope_TNP, latent_TC, rope_TP, cache, metadata)
        return mla.mla_paged_attention(*operands, scale=(C + P) ** -0.5, backend=backend)

    return Program(layer, (cache, *q, *new, *where), (0,))


def _struct(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Op:
    """`make(case, backend)` is `program_of`; `cases` is the op's module of that name."""

    make: Callable[[Any, str], Program | None]
    cases: ModuleType


OPS = {
    "top_k_top_p": Op(_masks, mask_cases),
    "top_k": Op(_largest, largest_cases),
    "quantized_matmul": Op(_quantized, quantized_cases),
    "grouped_matmul": Op(_grouped, grouped_cases),
    "lora_matmul": Op(_adapters, adapter_cases),
    "mla_paged_attention": Op(_latent, latent_cases),
}

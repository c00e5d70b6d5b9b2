"""Triton's own interpreter as a call in a jax program, for tests of triton_kernels.py anywhere; it needs no PyTorch.

Triton decides between compiler and interpreter when it is imported, by the environment variable TRITON_INTERPRET. This
module knows nothing of what the kernels compute.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from triton.runtime.interpreter import GridExecutor

from pallas_kernels.ragged_paged_attention.gpu import triton_kernels

TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A numpy array as the interpreter wants a tensor: an address and the name of a type."""

    array: np.ndarray

    @property
    def dtype(self) -> str:
        return TYPES[self.array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class HostGrid(GridExecutor):
    """The interpreter's loop over programs, without its copies between PyTorch devices."""

    def _init_args_hst(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        return None


def interpreted(
    name: str, grid: tuple[int, int], changed: dict[str, Any], outputs: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    """`changed` and `outputs` after the kernel `name`; see `triton_calls.launch`. What it does not write is NaN."""
    arrays = {key: value for key, value in arguments.items() if _is_arrays(value)}
    static = {key: value for key, value in arguments.items() if key not in arrays}

    def run(arrays: Any, changed: Any) -> dict[str, Any]:
        kernel = getattr(triton_kernels, name)
        made = jax.tree.map(np.array, changed) | {key: np.full(x.shape, np.nan, x.dtype) for key, x in outputs.items()}
        pointers = jax.tree.map(lambda x: Pointer(np.ascontiguousarray(x)), arrays) | jax.tree.map(Pointer, made)
        HostGrid(kernel.rewrite(), kernel.arg_names, grid)(**static, **pointers)
        return made

    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), changed | outputs)
    return jax.pure_callback(run, structs, arrays, changed)


def _is_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)

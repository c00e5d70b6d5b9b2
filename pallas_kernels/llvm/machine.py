"""What this machine's CPU has that kernels are written for, and why there may be no kernels here."""

import dataclasses
import functools
import importlib.util
import os
import re
from pathlib import Path

import jax

KNOWN_FFI = ((0, 4), (0, 5))
"""Versions of XLA's interface for foreign functions whose structures lie as `xla_ffi.py` reads them."""

KNOWN_LLVM = (22,)
"""Releases of LLVM whose names and types of instructions the kernels use."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """`name` and `features` as LLVM spells them; `lanes`: float32 numbers in a vector register."""

    name: str
    features: str
    lanes: int
    num_registers: int

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")


def has_pairs(machine: Machine) -> bool:
    """Whether it multiplies pairs of bfloat16 numbers, in its widest registers."""
    return machine.lanes == 16 and machine.has("avx512bf16")


def has_dot(machine: Machine) -> bool:
    """Whether it multiplies bytes by fours, in its widest registers (VNNI)."""
    return machine.has("avx512vnni") if machine.lanes == 16 else machine.has("avxvnni")


@functools.cache
def this_machine() -> Machine:
    """The CPU of this process. Needs llvmlite."""
    import llvmlite.binding as llvm

    found = llvm.get_host_cpu_features()
    wide = bool(found.get("avx512f") and found.get("avx512bw") and found.get("avx512vl"))
    features = found.flatten() + (",-prefer-256-bit" if wide else "")
    return Machine(llvm.get_host_cpu_name(), features, 16 if wide else 8, 32 if wide else 16)


@functools.cache
def ffi_version() -> tuple[int, int] | None:
    """(major, minor) of the foreign function interface of the installed jaxlib, as its own header has it."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)$", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if all(found) else None


@functools.cache
def why_not() -> str | None:
    """Why no kernel can run here, or None."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not there (the extra 'cpu')"
    if os.name != "posix":
        return "kernels call functions of POSIX, which this system lacks"
    if ffi_version() not in KNOWN_FFI:
        return f"jaxlib's foreign function interface has version {ffi_version()}; known are {KNOWN_FFI}"
    import llvmlite.binding as llvm

    if llvm.llvm_version_info[0] not in KNOWN_LLVM:
        return f"llvmlite has LLVM {llvm.llvm_version_info[0]}; known are {KNOWN_LLVM}"
    found = llvm.get_host_cpu_features()
    lacking = [name for name in ("avx2", "fma") if not found.get(name)]
    return f"this CPU lacks {' and '.join(lacking)}" if lacking else None

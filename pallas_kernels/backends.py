"""Choosing one of an op's backends by name, and saying why the others cannot run. Knows no op.

A backend called NAME of an op is the module `pallas_kernels.OP.NAME`, imported when it is first needed: importing
Pallas for TPUs and GPUs takes a quarter of a second, which those without either need not wait. "tpu", "gpu" and "cpu"
run there only, the last where machine code can be made (`llvm/machine.py`); all others run everywhere.
`cannot_take(*operands)` in the module says why it refuses operands, or is None; operands are arrays or anything with
their `shape` and `dtype`, and what they are is the op's business.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

from pallas_kernels.llvm.machine import why_not

_HARDWARE = {"tpu": "a TPU", "gpu": "an NVIDIA GPU", "cpu": "a CPU"}


def refusals(op: str, names: Sequence[str], platform: str, *operands) -> dict[str, str | None]:
    """Why each backend cannot run on `platform` ("cpu", "gpu", "tpu"), or cannot take `operands` if there are any."""
    return {name: _refusal(op, name, platform, operands) for name in names}


def choose(op: str, names: Sequence[str], name: str, platform: str, *operands) -> str:
    """The backend called `name`, or for "auto" the last one that can: `names` go from general to special.

    Raises ValueError for an unknown name, and for a backend that cannot.
    """
    reasons = refusals(op, names, platform, *operands)
    if name == "auto":
        return [known for known, reason in reasons.items() if reason is None][-1]
    _check_known(op, names, name)
    if reasons[name] is not None:
        raise ValueError(f"{op} backend {name!r} cannot run on {platform!r}: {reasons[name]}. Use 'auto'.")
    return name


def require(op: str, names: Sequence[str], name: str, *operands) -> ModuleType:
    """The module of the backend called `name`, which must take `operands`, if any. Raises ValueError otherwise."""
    _check_known(op, names, name)
    module = _module(op, name)
    reason = _lacking(name) or (module.cannot_take(*operands) if operands else None)
    if reason is not None:
        raise ValueError(f"{op} backend {name!r} cannot take these operands: {reason}. Use 'reference'.")
    return module


def _refusal(op: str, name: str, platform: str, operands: Sequence) -> str | None:
    if name in _HARDWARE and platform != name:
        return f"it needs {_HARDWARE[name]}"
    return _lacking(name) or (_module(op, name).cannot_take(*operands) if operands else None)


def _lacking(name: str) -> str | None:
    """What a backend needs of this process and machine, and is not there."""
    return why_not() if name == "cpu" else None


def _module(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.{op}.{name}")


def _check_known(op: str, names: Sequence[str], name: str) -> None:
    if name not in names:
        raise ValueError(f"unknown {op} backend {name!r}; known are 'auto', {', '.join(map(repr, names))}.")

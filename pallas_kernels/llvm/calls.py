"""Calls of our kernels in compiled programs: which there are, and how to make them known before a program is loaded.

Tracing a program makes its kernels known. Where a program comes from a file, nobody traces: whoever stores it asks
`calls_in` for the names, and whoever loads it gives them to `prepare` first.
"""

import importlib
import re
from collections.abc import Iterable

from pallas_kernels.llvm.code import PREFIX
from pallas_kernels.llvm.machine import this_machine, why_not

_CALL = re.compile(rf'custom_call_target="({PREFIX}\.[^"]+)"')
_NAME = re.compile(rf"{PREFIX}\.(\w+)((?:\.\w+)*)\.[0-9a-f]{{12}}")
_OPS = (
    "few_rows_matmul",
    "grouped_matmul",
    "int4_matmul",
    "lora_matmul",
    "ragged_paged_attention",
    "rms_norm",
    "sort_by_group",
    "top_k",
)


def calls_in(hlo_text: str) -> set[str]:
    """The names of our kernels that a compiled program calls, from its text."""
    return set(_CALL.findall(hlo_text))


def prepare(names: Iterable[str]) -> None:
    """Make kernels known to XLA by the names that `calls_in` found.

    Raises ValueError for a name that is of no kernel of this version on this machine.
    """
    for name in names:
        parts = _NAME.fullmatch(name)
        if parts is None or parts[1] not in _OPS or why_not() is not None:
            raise ValueError(f"there is no kernel {name} here: {why_not() or 'no op has it'}")
        kernel = importlib.import_module(f"pallas_kernels.{parts[1]}.cpu").kernel
        try:
            found = kernel(*parts[2].split(".")[1:], machine=this_machine())
        except TypeError as error:
            raise ValueError(f"there is no kernel {name} here: {error}") from None
        if found != name:
            raise ValueError(f"there is no kernel {name} here: it is {found} on this machine, in this version")

"""Counts the road of a token: which functions of the package one call passes, in how many files, and how often from one
file to another.

Only the thread that calls is counted, and only code of `jaxpaged/`; the kernels' package is another one. A function is
a code object: generator expressions and lambdas are functions of their own, comprehensions are not.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jaxpaged

PACKAGE = str(Path(jaxpaged.__file__).parent) + "/"


def name_of(code: CodeType) -> str:
    """Such as "engine/core.py EngineCore.step"."""
    return f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"


@dataclass
class Road:
    """The functions in the order in which they were called, each call of them."""

    calls: list[CodeType] = field(default_factory=list)

    @property
    def functions(self) -> list[str]:
        """Each once, in the order in which they were first called."""
        return list(dict.fromkeys(map(name_of, self.calls)))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(name.split(" ")[0] for name in self.functions))

    @property
    def num_changes(self) -> int:
        """How often a call is in another file than the call before it."""
        files = [code.co_filename for code in self.calls]
        return sum(before != after for before, after in itertools.pairwise(files))

    def __str__(self) -> str:
        """The numbers, and then a line for each stretch in one file."""
        size = f"{len(self.functions)} functions, {len(self.files)} files, {self.num_changes} changes of file:"
        stretches = itertools.groupby(map(name_of, self.calls), key=lambda name: name.split(" ")[0])
        lines = [f"{file}: {', '.join(name.split(' ')[1] for name in names)}" for file, names in stretches]
        return "\n  ".join([size, *lines])


@contextmanager
def counted() -> Iterator[Road]:
    """What is called in the block."""
    road, before = Road(), sys.getprofile()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            road.calls.append(frame.f_code)

    sys.setprofile(note)
    try:
        yield road
    finally:
        sys.setprofile(before)


def frames_at_call(code_name: str, act: Callable[[], Any]) -> list[str]:
    """The functions of the package on the stack, the outermost first, where `act` calls that of this name; where it
    does so in several places, in the deepest of them."""
    deepest: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and name_of(frame.f_code) == code_name:
            deepest[:] = max(deepest, stack_of(frame), key=len)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    assert deepest, f"{code_name} was never called"
    return deepest


def stack_of(frame: FrameType | None) -> list[str]:
    """The functions of the package on a stack, the outermost first."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(name_of(frame.f_code))
        frame = frame.f_back
    return names[::-1]

"""What the processes of one engine say to each other. `group.py` drives, and `follower.py` follows."""

from typing import Any

import msgspec
import numpy as np

from jaxpaged.distributed.group import Membership
from jaxpaged.messages import LoRARequest, ProgramKey, SchedulerOutput

# ---- what the driver says ------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, array_like=True):
    """All have arrived. `options` are those of `EngineConfig`, as they were given to the driver."""

    options: dict[str, Any]
    member: Membership


class Settled(msgspec.Struct, tag=True, array_like=True):
    """So many KV blocks the first pool has: the least of what fits anywhere."""

    num_blocks: int


class Step(msgspec.Struct, tag=True, array_like=True):
    """Dispatch a step."""

    scheduled: SchedulerOutput


class Sample(msgspec.Struct, tag=True, array_like=True):
    """Dispatch the rest of the newest step, which is masked."""

    masks_NW: np.ndarray


class Want(msgspec.Struct, tag=True, array_like=True):
    """A program will be asked for, or is waited for already."""

    key: ProgramKey
    hurry: bool


class Ask(msgspec.Struct, tag=True, array_like=True):
    """Call a method of the worker. `returns`: tell what it returned, which is plain data. `beside`: while steps go on,
    and not after those that are in flight."""

    call_id: int
    method: str
    arguments: list[Any]
    returns: bool = False
    beside: bool = False


class ReadLoRA(msgspec.Struct, tag=True, array_like=True):
    """Read an adapter into host memory, beside steps. The result is the digest of its files."""

    call_id: int
    request: LoRARequest


class DropLoRA(msgspec.Struct, tag=True, array_like=True):
    """Take an adapter out of host memory, if it is there."""

    lora_int_id: int


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The engine ends, and what ended it if that was not in peace."""

    reason: str = ""


Command = Welcome | Settled | Step | Sample | Want | Ask | ReadLoRA | DropLoRA | Stop

# ---- what followers say --------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, array_like=True):
    """A process has arrived. `given`: what must be the same everywhere, such as versions, by name."""

    rank: int
    where: str  # "process 123 of host b"
    given: dict[str, str]


class Sized(msgspec.Struct, tag=True, array_like=True):
    """So many KV blocks fit here."""

    rank: int
    num_blocks: int


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """A process can compute."""

    rank: int


class Alive(msgspec.Struct, tag=True, array_like=True):
    """Said again and again, with the programs that became ready."""

    rank: int
    ready: list[ProgramKey] = []


class Reply(msgspec.Struct, tag=True, array_like=True):
    """A method has returned, or raised: the name of an error's class and its message."""

    rank: int
    call_id: int
    error: tuple[str, str] | None = None
    result: Any = None


class Broken(msgspec.Struct, tag=True, array_like=True):
    """A process cannot go on: the name of an error's class, and its message."""

    rank: int
    error: str
    message: str


Report = Hello | Sized | Loaded | Alive | Reply | Broken

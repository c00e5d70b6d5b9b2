"""One version of a LoRA adapter as the core knows it: where its weights are, and which requests have it."""

from collections.abc import Callable
from typing import Any

from jaxpaged.core.by_age import ByAge
from jaxpaged.core.request import Request
from jaxpaged.messages import LoRAInfo

Age = Callable[[Request], Any]
"""Sort key of requests: the oldest, or the most important, is the first."""


class Adapter:
    """What one reading of an adapter's files gave. Files that are read anew with other content are another version.

    `number` is what the workers call it. `slot` is its place on the devices, 0 without one; `is_loaded`: the slot has
    its weights, or will have them when the steps that are dispatched are done. `is_resident`: host memory has them.

    A request of the adapter is parked here, in no queue, or it is queued, or it runs, or something else of it is being
    prepared. Only an adapter with a slot has queued and running ones.
    """

    __slots__ = (
        "closed_for",
        "closes_before",
        "info",
        "is_being_read",
        "is_loaded",
        "is_pinned",
        "is_removed",
        "is_resident",
        "is_superseded",
        "num_passed_before",
        "num_requests",
        "num_running",
        "number",
        "parked",
        "queued",
        "slot",
        "victim",
    )

    def __init__(self, info: LoRAInfo, number: int, age: Age):
        self.info, self.number = info, number
        self.is_resident = self.is_being_read = self.is_loaded = self.is_pinned = False
        self.is_superseded = self.is_removed = False  # new requests have another version, or there are none
        self.slot = 0
        self.num_requests = self.num_running = 0
        self.queued: dict[Request, None] = {}
        self.parked = ByAge(age)
        self.num_passed_before = 0  # admissions of requests with adapters, when the first was parked
        self.victim: Adapter | None = None  # whose slot is closed, so that this one gets it
        self.closed_for: Adapter | None = None  # for which its own slot is closed,
        self.closes_before: Any = None  # to requests that are no older than this

    @property
    def is_open(self) -> bool:
        """Whether requests of it are queued, or run."""
        return bool(self.num_running or self.queued)

    @property
    def is_current(self) -> bool:
        """Whether new requests get this version."""
        return not (self.is_superseded or self.is_removed)

    def __repr__(self) -> str:
        return f"Adapter({self.info.lora_name!r}, number {self.number}, slot {self.slot}, {self.num_requests} requests)"

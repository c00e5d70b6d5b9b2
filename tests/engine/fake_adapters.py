"""Reading of adapters without an engine core: what a core says of one, from a folder or from nothing."""

import asyncio
import hashlib
from dataclasses import dataclass, field

from jaxpaged.engine.core_calls import AddLora, ListLoras, PinLora, RemoveLora
from jaxpaged.errors import CheckpointError
from jaxpaged.messages import LoRAInfo, LoRARequest


@dataclass
class FakeBook:
    """What a core knows of adapters. Their content is in `contents`, by path; one that is not there has none."""

    contents: dict[str, str] = field(default_factory=dict)
    infos: dict[int, LoRAInfo] = field(default_factory=dict)
    read: list[LoRARequest] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)  # paths that cannot be read

    def call(self, call):
        """The core's answer; None for a call that is about something else."""
        match call:
            case AddLora(lora_request=request):
                self.read.append(request)
                if request.lora_path in self.bad:
                    raise CheckpointError(f"{request.lora_path} has no adapter. Check it.")
                content = self.contents.get(request.lora_path, request.lora_path)
                digest = hashlib.sha256(content.encode()).hexdigest()
                info = LoRAInfo(request.lora_name, request.lora_int_id, request.lora_path, digest, rank=8)
                self.infos[request.lora_int_id] = info
                return info
            case RemoveLora(lora_id=number):
                self.removed.append(number)
                return self.infos.pop(number, None) is not None
            case PinLora(lora_id=number):
                self.pinned.append(number)
                return number in self.infos
            case ListLoras():
                return list(self.infos.values())
        return None


class SlowBook(FakeBook):
    """Answers once `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.go_on = asyncio.Event()

    async def call(self, call):
        if isinstance(call, AddLora):
            self.read.append(call.lora_request)
            await self.go_on.wait()
            self.read.pop()
        return super().call(call)

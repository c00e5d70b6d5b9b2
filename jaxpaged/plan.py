"""What `jaxpaged plan` finds out about an engine on devices that are not here: plain values, made to be printed.

This module holds data and no behaviour beyond sums; who measures what is said at each field.
"""

import msgspec


class DeviceFacts(msgspec.Struct, frozen=True):
    """One device as programs see it, from its maker's data sheet. Bytes, bytes per second, operations per second.

    `links` is what one device sends to the others per second, all its links together; 0: not known.
    """

    name: str
    memory: int
    bandwidth: float
    matmul_bf16: float
    links: float


class PlannedProgram(msgspec.Struct):
    """One compiled program, as the compiler describes it for one device. `error` says why it could not be compiled."""

    kind: str
    size: int
    compile_seconds: float
    temporary_bytes: int = 0
    code_bytes: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: dict[str, int] = {}
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}[{self.size}]" if self.size else self.kind


class Speed(msgspec.Struct):
    """An upper bound from a roofline. `limit` names what bounds it: "memory", "matmul" or "links"."""

    num_requests: int
    context: int  # tokens of each request
    tokens_per_second: float  # of all requests together
    limit: str


class Plan(msgspec.Struct):
    """An engine on a target. Byte counts are per device."""

    model: str
    target: str
    device: DeviceFacts
    num_devices: int  # of the target
    num_hosts: int  # over which they are spread
    tensor_parallel_size: int  # that one engine uses
    options: dict[str, str | int | float]
    usable_bytes: int
    weight_bytes: int
    temporary_bytes: int  # the largest of the compiled programs, or an upper estimate if none was compiled
    reserved_bytes: int  # that the engine sets aside for temporaries before it counts KV blocks
    code_bytes: int
    block_bytes: int
    num_blocks: int
    blocks_per_request: int  # of max_model_len
    concurrency: dict[int, int]  # context length -> requests of that length at a time
    programs: list[PlannedProgram]
    decode: list[Speed]
    prefill: list[Speed]
    assumptions: list[str]
    obstacles: list[str]  # why it would not run, were there memory enough
    advice: list[str]

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def fits(self) -> bool:
        """Whether the engine runs there: a request of `max_model_len` has room, and every program could be compiled."""
        refused = any(program.error for program in self.programs)
        return self.num_blocks > self.blocks_per_request and not refused and not self.obstacles

"""What `jaxpaged plan` finds out about an engine on devices that are not here: plain values, made to be printed.

This module holds data and no behaviour beyond sums; who measures what is said at each field.
"""

from collections.abc import Sequence

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
    """One compiled program, as the compiler describes it for one device. `error` says why it could not be compiled.

    `stage`: whose it is, from 1, where layers are dealt to stages, which send each of their devices' results on.
    """

    kind: str
    size: int
    compile_seconds: float
    temporary_bytes: int = 0
    code_bytes: int = 0
    output_bytes: int = 0  # of results that do not lie where an argument was
    flops: float = 0.0
    memory_bytes: int = 0  # to and from main memory in one run, without KV blocks
    seconds: float = 0.0  # of one run, without reading KV blocks, estimated from its operations
    collectives: dict[str, int] = {}
    waited_bytes: int = 0  # of results of collectives during which nothing else runs
    hidden_bytes: int = 0  # of the others
    error: str | None = None
    stage: int = 0
    sent_bytes: int = 0  # that each device of another stage gets

    @property
    def name(self) -> str:
        name = f"{self.kind}[{self.size}]" if self.size else self.kind
        return f"{name} of stage {self.stage}" if self.stage else name


class Speed(msgspec.Struct):
    """An upper bound from a roofline, and what compiled programs are estimated to reach. `limit` is the longest part of
    the bound: "memory", "matmul", "links", "host" or "kernels"."""

    num_requests: int
    context: int  # tokens of each request
    tokens_per_second: float  # of all requests together
    limit: str
    estimated: float = 0.0  # tokens a second of all requests together; 0 where nothing was compiled


class StagePlan(msgspec.Struct):
    """What a device of a stage has, or of an engine without stages: `Plan` says what each number is."""

    num_layers: int
    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    temporary_bytes: int
    reserved_bytes: int
    code_bytes: int
    block_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.kv_bytes + self.temporary_bytes + self.code_bytes


class EncoderPlan(msgspec.Struct):
    """What pictures take of an engine that sees. Bytes are per device, and parts of those of the plan."""

    weight_bytes: int  # of the tower
    cache_bytes: int  # of the encoder cache, where `cache_embeds` are kept
    cache_embeds: int
    picture_embeds: int  # of the largest picture
    picture_flops: float  # to encode it, on all devices together, as if every patch saw all others of its item


class Plan(msgspec.Struct):
    """An engine on a target. Byte counts are per device: of that stage whose devices need most, if there are stages."""

    model: str
    target: str
    device: DeviceFacts
    num_devices: int  # of the target
    num_hosts: int  # over which they are spread
    tensor_parallel_size: int  # that one engine uses, for each of its stages or attention ranks
    options: dict[str, str | int | float]
    usable_bytes: int
    weight_bytes: int
    state_bytes: int  # what lives from step to step besides KV blocks: block tables, what sampling needs, hidden states
    temporary_bytes: int  # the most that the compiled programs take at a time, or an estimate if none was compiled
    reserved_bytes: int  # that the engine sets aside for temporaries before it counts KV blocks
    code_bytes: int
    block_bytes: int  # in the first pool of blocks, as is `num_blocks`
    num_blocks: int
    blocks_per_request: int  # of max_model_len
    concurrency: dict[int, int]  # context length -> requests of that length at a time
    programs: list[PlannedProgram]
    decode: list[Speed]
    prefill: list[Speed]
    assumptions: list[str]
    obstacles: list[str]  # why it would not run, were there memory enough
    advice: list[str]
    page_token_bytes: float = 0.0  # of one token's keys and values in all layers, outside of the devices
    further_kv_bytes: int = 0  # of other pools, which have as many blocks as go with those of the first
    stages: list[StagePlan] = []  # in their order, if layers are dealt to several
    encoder: EncoderPlan | None = None
    num_ranks: int = 1  # attention ranks of one engine; blocks are those of each, and requests those of all

    @property
    def devices_per_engine(self) -> int:
        return self.num_ranks * self.tensor_parallel_size * max(len(self.stages), 1)

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.further_kv_bytes

    @property
    def needed_bytes(self) -> int:
        used = self.weight_bytes + self.state_bytes + self.kv_bytes
        return used + self.temporary_bytes + self.code_bytes

    @property
    def missing_bytes(self) -> int:
        """What the device would have to have more, beyond what utilization leaves alone."""
        return max(self.needed_bytes - self.device.memory, 0)

    @property
    def fits(self) -> bool:
        """Whether the engine runs there: a request of `max_model_len` has room beside everything else, and every
        program could be compiled."""
        refused = any(program.error for program in self.programs)
        room = self.num_blocks > self.blocks_per_request and not self.missing_bytes
        return room and not refused and not self.obstacles


def worst_bytes(programs: Sequence[PlannedProgram]) -> int:
    """What programs may take besides their arguments: the temporaries of the greediest, since they run one after
    another, and what a step hands over, twice, since the next step is dispatched meanwhile."""
    temporaries = max((program.temporary_bytes for program in programs), default=0)
    return temporaries + 2 * max((program.output_bytes for program in programs if program.kind != "zeros"), default=0)

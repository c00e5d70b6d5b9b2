"""A plan: the memory and speed of an engine on a target, from shapes and from programs compiled for it.

Nothing is read but the model's description. The programs are the very ones that an engine on the target would
compile, so their temporaries, code and collectives are facts; speed is a bound (`roofline.py`).
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import across_hosts
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.kv_cache_spec import KVCacheConfig, KVCacheGroup, StateSpec
from jaxpaged.layers.experts import expert_weights
from jaxpaged.messages import Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.params.sharding import bytes_on_device, elements_on_device
from jaxpaged.plan import Plan, PlannedProgram, Speed, worst_bytes
from jaxpaged.worker.context_split import exchanged_bytes
from jaxpaged.worker.kv_transfer.programs import token_bytes
from jaxpaged.worker.memory import looked_up, reserve_of
from jaxpaged.worker.planning.program_text import ProgramText
from jaxpaged.worker.planning.roofline import (
    DISPATCH_SECONDS,
    KERNEL_SECONDS,
    KERNELS_PER_LAYER,
    REQUEST_SECONDS,
    Work,
    decode_speed,
    prefill_speed,
)
from jaxpaged.worker.planning.targets import Target, shapes_mesh
from jaxpaged.worker.programs.blueprint import MAX_STEPS, Blueprint, Builders
from jaxpaged.worker.programs.bundles import save_bundle
from jaxpaged.worker.programs.table import ProgramKey
from jaxpaged.worker.step.functions import RESULT_TYPES
from jaxpaged.worker.step.pooling import programs_for

CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
DECODE_REQUESTS = (1, 8, 64, 256)
SPEED_CONTEXTS = (1024, 8192, 32768, 131072)


class Planner:
    """Plans one engine: `config` is resolved for the platform of `target`."""

    def __init__(self, config: EngineConfig, model: Model, decoder: DecoderConfig, target: Target):
        self.config, self.model, self.decoder, self.target = config, model, decoder, target
        self.blueprint = Blueprint(config, model, decoder, target.mesh(*config.parallel.devices))
        self.pools = config.model.runner == "pooling"
        self.reserve = reserve_of(self.blueprint)
        self.compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    def plan(self, *, all_programs: bool = False, progress: Progress | None = None) -> Plan:
        """Compile, if the target can, and put everything together. A program that does not compile is in the plan."""
        blueprint, num_blocks = self.blueprint, self.num_blocks
        programs: list[PlannedProgram] = []
        if self.target.compiles and num_blocks > self.blocks_per_request and not self.obstacles():
            builders = programs_for(blueprint, self.kv_cache).builders()
            keys = list(builders) if all_programs else self.representative(builders)
            programs = self._compile(keys, builders, progress or (lambda stage, done, total: None))
        plan = Plan(
            model=self.config.model.model,
            target=self.target.name,
            device=self.target.device,
            num_devices=self.target.num_devices,
            num_hosts=self.target.num_hosts,
            tensor_parallel_size=blueprint.num_shards,
            options=self.options(),
            usable_bytes=self.usable_bytes,
            weight_bytes=self.reserve.weights,
            state_bytes=self.reserve.state,
            temporary_bytes=worst_bytes(programs) if programs else self.reserve.temporaries,
            reserved_bytes=self.reserve.temporaries,
            code_bytes=sum(program.code_bytes for program in programs),
            block_bytes=self.block_bytes,
            page_token_bytes=token_bytes(self.kv_cache),
            further_kv_bytes=self.kv_cache.num_bytes(blueprint.num_shards) - num_blocks * self.block_bytes,
            num_blocks=num_blocks,
            blocks_per_request=self.blocks_per_request,
            concurrency={context: self.concurrency(context) for context in self.contexts(CONTEXTS)},
            programs=programs,
            decode=[] if self.pools else self.decode(programs),
            prefill=self.prefill(programs),
            assumptions=self.assumptions(programs),
            obstacles=self.obstacles(),
            advice=[],
        )
        plan.advice = self.advice(plan)
        return plan

    def save(self, folder: Path, progress: Progress) -> None:
        """Write the programs of a plan made with `all_programs` as a bundle. Raises UsageError."""
        if not self.compiled:
            raise UsageError(f"nothing was compiled for {self.target.name}, so there is nothing to save. Drop --save.")
        save_bundle(folder, self.compiled, self.blueprint.fingerprint(), self.num_blocks, RESULT_TYPES, progress)

    # ---- memory --------------------------------------------------------------------------------

    @property
    def usable_bytes(self) -> int:
        return int(self.target.device.memory * self.config.cache.gpu_memory_utilization)

    @property
    def block_bytes(self) -> int:
        return self.blueprint.division.block_bytes

    @property
    def kv_tensor_bytes(self) -> set[int]:
        """Bytes of the arrays that hold the KV cache, each as long as all blocks of a layer."""
        shapes = programs_for(self.blueprint, self.kv_cache).shapes
        return {bytes_on_device(leaf) for leaf in jax.tree.leaves(shapes.kv)}

    @property
    def kv_cache(self) -> KVCacheConfig:
        return self.blueprint.division.kv_cache(self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """As many as the engine itself would take on the target, of the first pool."""
        cache = self.config.cache
        if cache.num_gpu_blocks_override:
            return cache.num_gpu_blocks_override
        free = self.usable_bytes - self.reserve.total
        return self.blueprint.division.num_blocks_in(max(cache.kv_cache_memory_bytes or free, 0))

    @property
    def blocks_per_request(self) -> int:
        return self.blueprint.division.blocks_per_request

    def concurrency(self, context: int) -> int:
        """Requests of `context` tokens that fit the KV cache, no beginning shared."""
        return int(self.kv_cache.concurrency(context, self.config.scheduler.max_num_batched_tokens))

    def contexts(self, lengths: Sequence[int]) -> list[int]:
        """Those lengths that the engine serves, and its longest."""
        limit = self.config.model.max_model_len
        return [*(n for n in lengths if n < limit), limit]

    def options(self) -> dict[str, Any]:
        """The options that matter most, as they were settled."""
        config = self.config
        attention = {"attention_backend": self.blueprint.attention.backend} if self.target.compiles else {}
        pooling = {"runner": "pooling", "convert": config.model.convert} if self.pools else {}
        sizes = ("data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel")
        return (
            pooling
            | {name: value for name in sizes if (value := getattr(config.parallel, name)) not in (1, False)}
            | {
                "dtype": config.model.dtype,
                "kv_cache_dtype": config.cache.kv_cache_dtype,
                "max_model_len": config.model.max_model_len,
                "max_num_seqs": config.scheduler.max_num_seqs,
                "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
                "block_size": config.cache.block_size,
                "gpu_memory_utilization": config.cache.gpu_memory_utilization,
            }
            | attention
        )

    # ---- programs ------------------------------------------------------------------------------

    @staticmethod
    def representative(builders: Builders) -> list[ProgramKey]:
        """All forward programs, and of every other kind the largest, which has the most temporaries."""
        largest: dict[str, int] = {}
        for key in builders:
            largest[key.kind] = max(key.size, largest.get(key.kind, 0))
        return [key for key in builders if key.kind == "forward" or key.size == largest[key.kind]]

    def _compile(self, keys: list[ProgramKey], builders: Builders, progress: Progress) -> list[PlannedProgram]:
        progress("programs", 0, len(keys))
        done = itertools.count(1)

        def compile_one(key: ProgramKey) -> PlannedProgram:
            program = self.compile_program(key, builders[key])
            progress("programs", next(done), len(keys))
            return program

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            return list(threads.map(compile_one, keys))

    def compile_program(self, key: ProgramKey, build: Callable[[], jax.stages.Lowered]) -> PlannedProgram:
        """What the compiler says of one program, or why it cannot compile it."""
        begin = time.perf_counter()
        try:
            with jax.sharding.use_abstract_mesh(self.blueprint.mesh.abstract_mesh):
                compiled = self.compiled[key] = build().compile()
        except Exception as error:  # what a compiler refuses is a finding, whatever its type
            return PlannedProgram(*key, time.perf_counter() - begin, error=first_line(error))
        seconds, memory, cost = time.perf_counter() - begin, compiled.memory_analysis(), compiled.cost_analysis() or {}
        text = ProgramText(compiled.as_text(), self.kv_tensor_bytes)
        collectives = text.collectives()
        return PlannedProgram(
            *key,
            seconds,
            temporary_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            flops=cost.get("flops", 0.0),
            memory_bytes=text.memory_bytes(),
            collectives=collectives.counts,
            waited_bytes=collectives.waited_bytes,
            hidden_bytes=collectives.hidden_bytes,
        )

    # ---- speed ---------------------------------------------------------------------------------

    def work(self, programs: Sequence[PlannedProgram] = ()) -> Work:
        """What a token costs on one device. Unless programs say otherwise, collectives are waited for."""
        blueprint, decoder = self.blueprint, self.blueprint.decoder
        params, shards, table_rows = blueprint.param_shapes, blueprint.num_shards, looked_up(blueprint)
        head = blueprint.model.head(params)
        read = [leaf for leaf in jax.tree.leaves(params) if not any(leaf is other for other in table_rows)]
        experts, share = expert_weights(params), decoder.share_of_experts
        waited = sum(program.waited_bytes for program in programs if program.kind == "forward")
        hidden = sum(program.hidden_bytes for program in programs if program.kind == "forward")
        return Work(
            num_shards=shards,
            weight_bytes=blueprint.weight_bytes - sum(bytes_on_device(leaf) for leaf in table_rows),
            params=sum(map(elements_on_device, read)) - round(sum(map(elements_on_device, experts)) * (1 - share)),
            expert_bytes=sum(map(bytes_on_device, experts)),
            expert_share=share,
            head_params=sum(elements_on_device(leaf) for leaf in jax.tree.leaves(head)),
            attention_layers=tuple(attention_layers(blueprint.kv_groups, shards)),
            heads=round(decoder.num_heads * decoder.attended_dim / shards),
            merged_bytes=exchanged_bytes(blueprint.decoders, blueprint.kv_groups, blueprint.attention, blueprint.dtype),
            reduced_bytes=2 * sum(e.num_layers * e.hidden_size for e in blueprint.decoders) * blueprint.dtype.itemsize,
            waited_share=waited / (waited + hidden) if waited + hidden else 1.0,
            steps_per_program=self.steps_per_program,
        )

    @property
    def steps_per_program(self) -> int:
        return self.config.scheduler.num_scheduler_steps or MAX_STEPS

    def decode(self, programs: Sequence[PlannedProgram] = ()) -> list[Speed]:
        """Decode bounds for numbers of requests and contexts that fit the KV cache."""
        device, most, work = self.target.device, self.config.scheduler.max_num_seqs, self.work(programs)
        head_leaves = jax.tree.leaves(self.blueprint.model.head(self.blueprint.param_shapes))
        head = sum(map(bytes_on_device, head_leaves))
        counts = sorted({min(n, most) for n in DECODE_REQUESTS})
        return [
            decode_speed(work, device, n, context, forward_bytes(programs, n) + head)
            for context in self.contexts(SPEED_CONTEXTS) for n in counts if n <= self.concurrency(context)
        ]  # fmt: skip

    def prefill(self, programs: Sequence[PlannedProgram] = ()) -> list[Speed]:
        """Bounds for one prompt, in as few steps as the engine can compute it."""
        work, step_tokens = self.work(programs), self.config.scheduler.max_num_batched_tokens
        return [prefill_speed(work, self.target.device, n, -(-n // step_tokens)) for n in self.contexts(SPEED_CONTEXTS)]

    # ---- words ---------------------------------------------------------------------------------

    def assumptions(self, programs: Sequence[PlannedProgram]) -> list[str]:
        device, shards = self.target.device, self.blueprint.num_shards
        lines = [
            f"speed is a bound: {device.bandwidth / 1e9:,.0f} GB/s of memory and {device.matmul_bf16 / 1e12:,.0f} "
            "TFLOP/s of bf16 per device (data sheet); good kernels reach 60 to 90 % of it",
            f"the host takes {1e6 * DISPATCH_SECONDS:.0f} us for a program, of up to {self.steps_per_program} decode "
            f"steps, and {1e6 * REQUEST_SECONDS:.1f} us for each request in a step (scripts/bench_host.py), while "
            f"devices compute; {KERNELS_PER_LAYER} kernels of a layer wait for each other, {1e6 * KERNEL_SECONDS:.0f} "
            "us each",
            f"{device.name} has {device.memory / 2**30:.1f} GiB for programs, of which gpu_memory_utilization takes "
            f"{self.config.cache.gpu_memory_utilization:.0%}",
        ]
        if self.target.platform == "gpu":
            lines.append("the engine lets jax have that share of a GPU, unless XLA_CLIENT_MEM_FRACTION there is less")
        if shards > 1:
            lines.append(
                f"devices exchange {device.links / 1e9:,.0f} GB/s each, and latency is left out; "
                f"{self.work(programs).waited_share:.0%} of what they exchange is waited for"
                + ("" if programs else ", as nothing was compiled that would say otherwise")
            )
        if self.config.parallel.enable_expert_parallel:
            lines.append("tokens go to the experts of all devices alike; the most loaded device makes a step longer")
        if not programs:
            lines.append("nothing was compiled: temporaries are an upper estimate from shapes")
        return lines

    def obstacles(self) -> list[str]:
        """Why the engine would not run on the target, were there memory enough."""
        target, split = self.target, self.blueprint.num_shards
        on_one_host = target.platform == "gpu" and split <= max(target.host_sizes)
        if target.num_hosts == 1 or on_one_host or split == target.num_devices:
            return []
        spread = across_hosts(target.num_hosts, f"the {target.num_devices} devices of {target.name}")
        return [f"{spread} Plan for the {max(target.host_sizes)} devices of {target.host_name}, or for fewer"]

    def advice(self, plan: Plan) -> list[str]:
        """What to change when it does not fit or run, or when devices are left over."""
        lines = [f"{each.name} does not compile: {each.error}" for each in plan.programs if each.error] + plan.obstacles
        if plan.num_blocks <= plan.blocks_per_request:
            lines += self._how_to_fit(plan)
        elif plan.missing_bytes:
            lines.append(self._how_to_shrink(plan))
        if plan.num_hosts > 1 and plan.tensor_parallel_size == plan.num_devices:
            lines.append(f"one engine across {plan.num_hosts} hosts: start it on each, --nnodes {plan.num_hosts}")
        replicas = plan.num_hosts * (plan.num_devices // plan.num_hosts // plan.tensor_parallel_size)
        if replicas > self.config.parallel.data_parallel_size and not lines:
            option = "" if plan.num_hosts > 1 else f": --data-parallel-size {replicas}"
            where = f"{plan.target}, each on {plan.tensor_parallel_size} of its {plan.num_devices} devices"
            lines.append(f"{replicas} engines fit side by side on {where}{option}")
        return lines

    def _how_to_fit(self, plan: Plan) -> list[str]:
        gib = 2**30
        needed = self.blueprint.division.least_bytes
        lines = [
            f"a request of {self.config.model.max_model_len} tokens needs {needed / gib:.2f} GiB of KV blocks, and "
            f"{max(plan.kv_bytes, 0) / gib:.2f} GiB are left beside {plan.weight_bytes / gib:.2f} GiB of weights "
            f"and {(plan.state_bytes + plan.reserved_bytes) / gib:.2f} GiB of requests' state and temporaries"
        ]
        if (longest := self._longest_fit()) >= self.config.cache.block_size:
            lines.append(f"--max-model-len {longest} would fit")
        if split := self._smallest_split():
            lines.append(f"split over {split} devices (--tensor-parallel-size {split}) it fits as it is")
        return lines

    def _how_to_shrink(self, plan: Plan) -> str:
        gib, cache = 2**30, self.config.cache
        words = (
            f"{plan.missing_bytes / gib:.2f} GiB are missing: {plan.needed_bytes / gib:.2f} GiB are needed, "
            f"{plan.temporary_bytes / gib:.2f} of them for the temporaries of the largest program"
        )
        if cache.num_gpu_blocks_override or cache.kv_cache_memory_bytes:
            return f"{words}. Lower the number of KV blocks (--num-gpu-blocks-override, --kv-cache-memory-bytes)"
        share = (self.usable_bytes - plan.missing_bytes) / plan.device.memory
        return f"{words}. --gpu-memory-utilization {max(share, 0.01):.2f} or fewer --max-num-batched-tokens would help"

    def _longest_fit(self) -> int:
        """The longest context, in whole blocks, of which one request fits; 0 when none does."""
        size = self.config.cache.block_size
        low, high = 0, self.config.model.max_model_len // size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.concurrency(middle * size) else (low, middle - 1)
        return low * size

    def _smallest_split(self) -> int | None:
        """The smallest larger number of devices over which the engine fits, whether the target has them or not."""
        host_sizes = self.target.host_sizes
        host = replace(self.target, devices=(), sizes=host_sizes, num_devices=max(host_sizes), num_hosts=1)
        for shards in host_sizes:
            config = replace(self.config, parallel=replace(self.config.parallel, tensor_parallel_size=shards))
            if shards > self.blueprint.num_shards and can_split(config, self.model, self.decoder):
                planner = Planner(config, self.model, self.decoder, host)
                if planner.num_blocks > planner.blocks_per_request:
                    return shards
        return None


def largest_split(
    config: EngineConfig, model: Model, decoder: DecoderConfig, target: Target, share: int | None = None
) -> int:
    """Over how many devices of a host of `target` the model can be split; at most its `share`, if it has one."""
    sizes = [size for size in set(target.sizes) & set(target.host_sizes) if share is None or size <= share]
    for shards in sorted(sizes, reverse=True):
        split = replace(config, parallel=replace(config.parallel, tensor_parallel_size=shards))
        if can_split(split, model, decoder):
            return shards
    return 1


def can_split(config: EngineConfig, model: Model, decoder: DecoderConfig) -> bool:
    """Whether heads and feed-forward divide as `config` says."""
    try:
        Blueprint(config, model, decoder, shapes_mesh(*config.parallel.devices))
    except ConfigError:
        return False
    return True


def forward_bytes(programs: Sequence[PlannedProgram], num_tokens: int) -> int:
    """What the smallest compiled forward program for so many tokens moves; 0 if there is none."""
    sizes = {program.size: program.memory_bytes for program in programs if program.kind == "forward"}
    return next((sizes[size] for size in sorted(sizes) if size >= num_tokens), 0)


def attention_layers(groups: Sequence[KVCacheGroup], num_shards: int) -> Iterator[tuple[int | None, int, int]]:
    """(window, layers, bytes that a device keeps of a token in one of them) of every group. A recurrent state is no
    attention: it is not as long as the context, and small beside the weights."""
    for group in groups:
        spec = group.spec
        if not isinstance(spec, StateSpec):
            token_bytes = spec.block_bytes // spec.block_size // (num_shards if spec.is_split else 1)
            yield getattr(spec, "most_seen", None), len(group.layer_idxs), token_bytes


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

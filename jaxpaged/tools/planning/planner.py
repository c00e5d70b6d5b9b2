"""A plan: the memory and speed of an engine on a target, from shapes and from programs compiled for it.

Nothing is read but the model's description. The programs are the very ones that an engine on the target would
compile, so their temporaries, code and collectives are facts; speed is a bound (`roofline.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import across_hosts
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.messages import Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.models.seeing import tower_of
from jaxpaged.params.sharding import bytes_on_device
from jaxpaged.tools.planning.compiling import Compiler
from jaxpaged.tools.planning.plan import EncoderPlan, Plan, PlannedProgram, Speed, StagePlan, worst_bytes
from jaxpaged.tools.planning.roofline import (
    DISPATCH_SECONDS,
    KERNEL_SECONDS,
    KERNELS_PER_LAYER,
    REQUEST_SECONDS,
    decode_speed,
    prefill_speed,
)
from jaxpaged.tools.planning.step_time import decode_seconds, prefill_seconds, rates_of
from jaxpaged.tools.planning.targets import Target, shapes_mesh
from jaxpaged.worker.cache.head_scales import HeadScales
from jaxpaged.worker.costs import Work, encode_flops, work_of
from jaxpaged.worker.engine_spec import EngineSpec, engine_specs, whole_kv_cache
from jaxpaged.worker.kv_transfer.programs import token_bytes
from jaxpaged.worker.memory import reserve_of
from jaxpaged.worker.programs.bundles import save_bundle
from jaxpaged.worker.programs.declare import ProgramKind
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from jaxpaged.worker.step.functions import RESULT_TYPES

CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
DECODE_REQUESTS = (1, 8, 64, 256)
SPEED_CONTEXTS = (1024, 8192, 32768, 131072)


class Planner:
    """Plans one engine: `config` is resolved for the platform of `target`."""

    def __init__(self, config: EngineConfig, model: Model, decoder: DecoderConfig, target: Target):
        self.config, self.model, self.decoder, self.target = config, model, decoder, target
        (size, spreads_experts), num_stages = config.parallel.devices, config.parallel.pipeline_parallel_size
        self.num_ranks = config.parallel.num_ranks
        meshes = target.stage_meshes(size, num_stages, spreads_experts, self.num_ranks)
        self.stages = engine_specs(config, model, decoder, meshes)
        self.engine_spec = self.stages[-1]
        self.pools = self.engine_spec.pools
        self.reserves = [reserve_of(stage) for stage in self.stages]

    def plan(self, *, all_programs: bool = False, progress: Progress | None = None) -> Plan:
        """Compile, if the target can, and put everything together. A program that does not compile is in the plan."""
        programs: list[PlannedProgram] = []
        if self.target.compiles and self.num_blocks > self.blocks_per_request and not self.obstacles():
            keys = list(self.compiler.builders) if all_programs else self.compiler.representative
            programs = self.compiler.compile(keys, progress or (lambda stage, done, total: None))
        stages = self.stage_plans(programs)
        fullest = max(stages, key=lambda stage: stage.needed_bytes)
        plan = Plan(
            model=self.config.model.model,
            target=self.target.name,
            device=self.target.device,
            num_devices=self.target.num_devices,
            num_hosts=self.target.num_hosts,
            tensor_parallel_size=self.engine_spec.num_shards,
            options=self.options(),
            usable_bytes=self.usable_bytes,
            weight_bytes=fullest.weight_bytes,
            state_bytes=fullest.state_bytes,
            temporary_bytes=fullest.temporary_bytes,
            reserved_bytes=fullest.reserved_bytes,
            code_bytes=fullest.code_bytes,
            block_bytes=fullest.block_bytes,
            page_token_bytes=token_bytes(self.kv_cache, self.engine_spec.page_form),
            further_kv_bytes=fullest.kv_bytes - self.num_blocks * fullest.block_bytes,
            num_blocks=self.num_blocks,
            blocks_per_request=self.blocks_per_request,
            concurrency={context: self.concurrency(context) for context in self.contexts(CONTEXTS)},
            programs=programs,
            decode=[] if self.pools else self.decode(programs),
            prefill=self.prefill(programs),
            assumptions=self.assumptions(programs),
            obstacles=self.obstacles(),
            advice=[],
            stages=stages if len(stages) > 1 else [],
            encoder=self.encoder_plan(),
            num_ranks=self.num_ranks,
        )
        plan.advice = self.advice(plan)
        return plan

    def save(self, folder: Path, progress: Progress) -> None:
        """Write the programs of a plan made with `all_programs` as a bundle. Raises UsageError."""
        compiled = self.compiler.compiled
        if not compiled:
            raise UsageError(f"nothing was compiled for {self.target.name}, so there is nothing to save. Drop --save.")
        save_bundle(folder, compiled, self.engine_spec.fingerprint(), self.num_blocks, RESULT_TYPES, progress)

    @cached_property
    def compiler(self) -> Compiler:
        """Of the programs of all stages."""
        num_blocks = self.num_blocks
        of_stages = [EnginePrograms(stage, stage.division.kv_cache(num_blocks)) for stage in self.stages]
        return Compiler(of_stages, rates_of(self.target.device))

    # ---- memory --------------------------------------------------------------------------------

    @property
    def usable_bytes(self) -> int:
        return int(self.target.device.memory * self.config.cache.gpu_memory_utilization)

    @property
    def kv_cache(self) -> KVCacheConfig:
        return whole_kv_cache(self.engine_spec, self.num_blocks, HeadScales())

    @property
    def num_blocks(self) -> int:
        """As many as the engine itself would take on the target, of the first pool: what the stage with the least room
        has room for."""
        cache = self.config.cache
        if cache.num_gpu_blocks_override:
            return cache.num_gpu_blocks_override
        return min(self._num_blocks_of(i) for i in range(len(self.stages)))

    def _num_blocks_of(self, stage: int) -> int:
        """As many as a device of a stage has room for."""
        free = self.config.cache.kv_cache_memory_bytes or self.usable_bytes - self.reserves[stage].total
        return self.stages[stage].division.num_blocks_in(max(free, 0))

    def stage_plans(self, programs: Sequence[PlannedProgram] = ()) -> list[StagePlan]:
        """What a device of each stage has; of an engine without stages there is one."""
        return [self._stage_plan(i, programs_of(programs, i, len(self.stages))) for i in range(len(self.stages))]

    def _stage_plan(self, i: int, programs: Sequence[PlannedProgram]) -> StagePlan:
        stage, reserve = self.stages[i], self.reserves[i]
        return StagePlan(
            num_layers=stage.decoder.num_layers,
            weight_bytes=reserve.weights,
            state_bytes=reserve.state,
            kv_bytes=stage.division.num_bytes(self.num_blocks),
            temporary_bytes=worst_bytes(programs) if programs else reserve.temporaries,
            reserved_bytes=reserve.temporaries,
            code_bytes=sum(program.code_bytes for program in programs),
            block_bytes=stage.division.block_bytes,
        )

    def encoder_plan(self) -> EncoderPlan | None:
        """Of an engine that sees."""
        if (encoder := self.engine_spec.encoder) is None:
            return None
        slots, numbers = encoder.cache_shape
        return EncoderPlan(
            weight_bytes=sum(map(bytes_on_device, jax.tree.leaves(tower_of(self.engine_spec.param_shapes)))),
            cache_bytes=slots * numbers * self.engine_spec.dtype.itemsize,
            cache_embeds=slots,
            picture_embeds=math.prod(encoder.largest),
            picture_flops=encode_flops(self.engine_spec, encoder.largest) if encoder.sizes else 0.0,
        )

    @property
    def blocks_per_request(self) -> int:
        return self.engine_spec.division.blocks_per_request

    def concurrency(self, context: int) -> int:
        """Requests of `context` tokens that fit the KV cache, no beginning shared."""
        of_rank = self.kv_cache.concurrency(context, self.config.scheduler.max_num_batched_tokens)
        return self.num_ranks * int(of_rank)

    def contexts(self, lengths: Sequence[int]) -> list[int]:
        """Those lengths that the engine serves, and its longest."""
        limit = self.config.model.max_model_len
        return [*(n for n in lengths if n < limit), limit]

    def options(self) -> dict[str, Any]:
        """The options that matter most, as they were settled."""
        config = self.config
        attention = {"attention_backend": self.engine_spec.attention.backend} if self.target.compiles else {}
        pooling = {"runner": "pooling", "convert": config.model.convert} if config.model.runner == "pooling" else {}
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

    # ---- speed ---------------------------------------------------------------------------------

    def works(self, programs: Sequence[PlannedProgram] = ()) -> list[Work]:
        """What a token costs on a device of each stage."""
        count = len(self.stages)
        return [work_of(stage, waited_share(programs_of(programs, i, count))) for i, stage in enumerate(self.stages)]

    def decode(self, programs: Sequence[PlannedProgram] = ()) -> list[Speed]:
        """Decode bounds for numbers of requests and contexts that fit the KV cache."""
        device, works, count = self.target.device, self.works(programs), len(self.stages)
        most = self.num_ranks * self.config.scheduler.max_num_seqs
        moved = lambda n: [
            forward_bytes(programs_of(programs, i, count), -(-n // (count * self.num_ranks))) + work.head_bytes
            for i, work in enumerate(works)
        ]
        counts = sorted({min(n, most) for n in DECODE_REQUESTS})
        speeds = [
            decode_speed(works, device, n, context, moved(n))
            for context in self.contexts(SPEED_CONTEXTS)
            for n in counts
            if n <= self.concurrency(context)
        ]
        for speed in speeds if count == 1 else []:
            seconds = decode_seconds(programs, works[0], device, speed.num_requests, speed.context)
            speed.estimated = speed.num_requests / seconds if seconds else 0.0
        return speeds

    def prefill(self, programs: Sequence[PlannedProgram] = ()) -> list[Speed]:
        """Bounds for one prompt, in as few steps as the engine can compute it."""
        works, step_tokens = self.works(programs), self.config.scheduler.max_num_batched_tokens
        speeds, device = [], self.target.device
        for n in self.contexts(SPEED_CONTEXTS):
            num_steps = -(-n // step_tokens)
            speeds.append(prefill_speed(works, device, n, num_steps))
            if len(works) == 1 and (seconds := prefill_seconds(programs, works[0], device, n, num_steps)):
                speeds[-1].estimated = n / seconds
        return speeds

    # ---- words ---------------------------------------------------------------------------------

    def assumptions(self, programs: Sequence[PlannedProgram]) -> list[str]:
        device, shards, most_steps = self.target.device, self.engine_spec.num_shards, self.engine_spec.max_steps
        lines = [
            f"at most: {device.bandwidth / 1e9:,.0f} GB/s of memory and {device.matmul_bf16 / 1e12:,.0f} TFLOP/s of "
            "bf16 per device (data sheet), and nothing else takes time",
            *self.how_estimated(programs),
            f"the host takes {1e6 * DISPATCH_SECONDS:.0f} us for a program, of up to {most_steps} decode "
            f"steps, and {1e6 * REQUEST_SECONDS:.1f} us for each request in a step (scripts/bench_host.py), while "
            f"devices compute; {KERNELS_PER_LAYER} kernels of a layer wait for each other, {1e6 * KERNEL_SECONDS:.0f} "
            "us each",
            f"{device.name} has {device.memory / 2**30:.1f} GiB for programs, of which gpu_memory_utilization takes "
            f"{self.config.cache.gpu_memory_utilization:.0%}",
        ]
        if self.target.platform == "gpu":
            lines.append("the engine lets jax have that share of a GPU, unless XLA_CLIENT_MEM_FRACTION there is less")
        if shards * self.num_ranks > 1:
            lines.append(
                f"devices exchange {device.links / 1e9:,.0f} GB/s each, and latency is left out; "
                f"{max(work.waited_share for work in self.works(programs)):.0%} of what they exchange is waited for"
                + ("" if programs else ", as nothing was compiled that would say otherwise")
            )
        if len(self.stages) > 1:
            lines.append(
                f"requests take turns on {len(self.stages)} stages, which are all busy where there are as many; hidden "
                f"states are sent on, {self.works()[0].sent_bytes:,} bytes of each token to each device of a stage"
            )
        if self.config.parallel.enable_expert_parallel:
            lines.append("tokens go to the experts of all devices alike; the most loaded device makes a step longer")
        if not programs:
            lines.append("nothing was compiled: temporaries are an upper estimate from shapes")
        return lines

    def how_estimated(self, programs: Sequence[PlannedProgram]) -> list[str]:
        """What is assumed where programs were compiled."""
        if not programs or len(self.stages) > 1:
            return []
        rates = rates_of(self.target.device)
        ring = (
            f"estimated: collectives that nothing hides send {rates.links / 1e9:,.0f} GB/s around a ring, "
            f"{1e6 * rates.hop:.1f} us from device to device"
        )
        rings = [ring] * (self.engine_spec.num_shards * self.num_ranks > 1)
        if rates.clock:
            what = (
                f"operations of compiled programs take the cycles that their compiler expects, {rates.clock / 1e9} GHz"
            )
            return [f"estimated: {what}, attention those of its schedule or its bytes; nothing was measured", *rings]
        what = f"{rates.bandwidth / 1e9:,.0f} GB/s and {rates.flops / 1e12:,.0f} TFLOP/s"
        return [
            f"estimated: operations of compiled programs follow each other, at {what}, {1e6 * rates.launch:.1f} us for "
            f"each and {1e6 * rates.fill:.1f} more for a product; attention reads at {rates.context_share:.2f} of that",
            *rings,
        ]

    def obstacles(self) -> list[str]:
        """Why the engine would not run on the target, were there memory enough."""
        target, split = self.target, self.num_ranks * self.engine_spec.num_shards * len(self.stages)
        on_one_host = target.platform == "gpu" and split <= max(target.host_sizes)
        if target.num_hosts == 1 or on_one_host:
            return []
        if len(self.stages) > 1 or self.num_ranks > 1:
            what = "all stages of a pipeline" if len(self.stages) > 1 else "for all attention ranks"
            return [
                f"the {target.num_devices} devices of {target.name} are spread over {target.num_hosts} hosts, and one "
                f"process computes {what}. Plan for the {max(target.host_sizes)} devices of "
                f"{target.host_name}, or for fewer"
            ]
        if split == target.num_devices:
            return []
        spread = across_hosts(target.num_hosts, f"the {target.num_devices} devices of {target.name}")
        return [f"{spread} Plan for the {max(target.host_sizes)} devices of {target.host_name}, or for fewer"]

    def advice(self, plan: Plan) -> list[str]:
        """What to change when it does not fit or run, or when devices are left over."""
        lines = [f"{each.name} does not compile: {each.error}" for each in plan.programs if each.error] + plan.obstacles
        if plan.num_blocks <= plan.blocks_per_request:
            lines += self._how_to_fit()
        elif plan.missing_bytes:
            lines.append(self._how_to_shrink(plan))
        if plan.num_hosts > 1 and plan.tensor_parallel_size == plan.num_devices and not plan.stages:
            lines.append(f"one engine across {plan.num_hosts} hosts: start it on each, --nnodes {plan.num_hosts}")
        replicas = plan.num_hosts * (plan.num_devices // plan.num_hosts // plan.devices_per_engine)
        if replicas > self.config.parallel.num_cores and not lines:
            alone = plan.num_hosts == 1 and plan.num_ranks == 1
            option = "" if not alone else f": --data-parallel-size {replicas}"
            where = f"{plan.target}, each on {plan.devices_per_engine} of its {plan.num_devices} devices"
            lines.append(f"{replicas} engines fit side by side on {where}{option}")
        return lines

    def _how_to_fit(self) -> list[str]:
        gib = 2**30
        tight = min(range(len(self.stages)), key=self._num_blocks_of)
        needed, stage = self.stages[tight].division.least_bytes, self.stage_plans()[tight]
        lines = [
            f"a request of {self.config.model.max_model_len} tokens needs {needed / gib:.2f} GiB of KV blocks, and "
            f"{max(stage.kv_bytes, 0) / gib:.2f} GiB are left beside {stage.weight_bytes / gib:.2f} GiB of weights "
            f"and {(stage.state_bytes + stage.reserved_bytes) / gib:.2f} GiB of requests' state and temporaries"
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
            enough = self.num_ranks * shards * len(self.stages) <= host.num_devices
            if enough and shards > self.engine_spec.num_shards and can_split(config, self.model, self.decoder, host):
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
        if can_split(split, model, decoder, target):
            return shards
    return 1


def can_split(config: EngineConfig, model: Model, decoder: DecoderConfig, target: Target) -> bool:
    """Whether heads and feed-forward divide as `config` says."""
    device = AbstractDevice(target.device.name, None, target.platform)
    try:
        EngineSpec(config, model, decoder, shapes_mesh(*config.parallel.devices, device, config.parallel.num_ranks))
    except ConfigError:
        return False
    return True


def waited_share(programs: Sequence[PlannedProgram]) -> float:
    """Of what the collectives of forward programs send, how much is waited for; all of it if none is known."""
    waited = sum(program.waited_bytes for program in programs if program.kind == ProgramKind.FORWARD)
    hidden = sum(program.hidden_bytes for program in programs if program.kind == ProgramKind.FORWARD)
    return waited / (waited + hidden) if waited + hidden else 1.0


def programs_of(programs: Sequence[PlannedProgram], stage: int, num_stages: int) -> list[PlannedProgram]:
    """Those of a stage, which are numbered from 1 where there are several."""
    return [program for program in programs if num_stages == 1 or program.stage == stage + 1]


def forward_bytes(programs: Sequence[PlannedProgram], num_tokens: int) -> int:
    """What the smallest compiled forward program for so many tokens moves; 0 if there is none."""
    sizes = {program.size: program.memory_bytes for program in programs if program.kind == ProgramKind.FORWARD}
    return next((sizes[size] for size in sorted(sizes) if size >= num_tokens), 0)

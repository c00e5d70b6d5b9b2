"""Puts the device side together: mesh, KV cache size, programs, weights, device state.

The order makes start-up short. Everything that programs need is known from shapes, so they compile in threads while
the weights load; the engine is ready when the weights are, and a step waits for its own programs only.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxpaged.config import EngineConfig
from jaxpaged.config.cache_types import CACHE_TYPES
from jaxpaged.config.sections import ParallelConfig
from jaxpaged.distributed.mesh import check_slice, stage_meshes
from jaxpaged.errors import ConflictError, UsageError
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_store.options import KVOffload
from jaxpaged.messages import LoRAInfo, LoRARequest, ProgramKey, Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.params.checkpoint import kv_scales_of
from jaxpaged.params.kv_scales import LayerScales, read_scales_file
from jaxpaged.worker.adapter_slots import AdapterSlots, reader_of
from jaxpaged.worker.cache.head_scales import HeadScales, with_scales
from jaxpaged.worker.costs import work_of
from jaxpaged.worker.device import Device, DeviceState
from jaxpaged.worker.drafters import LookupDrafter, ModelDrafter
from jaxpaged.worker.embeds_traffic import SharingEncoder, TakingEncoder, embeds_space, open_embeds
from jaxpaged.worker.encoder import Encoder
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.engine_spec import EngineSpec, engine_specs, whole_kv_cache
from jaxpaged.worker.expert_balancer import ExpertBalancer
from jaxpaged.worker.kv_blocks import compiled_kv_cache, memory_for, size_kv_cache
from jaxpaged.worker.kv_transfer.opening import check_offload, open_transfer
from jaxpaged.worker.kv_transfer.transfer import KVTransferWorker
from jaxpaged.worker.memory import planned_memory, reserve_of
from jaxpaged.worker.model_runner import Drafter, ModelRunner, OutputStage
from jaxpaged.worker.profiler import Profiler
from jaxpaged.worker.programs.bundles import Bundle, save_bundle
from jaxpaged.worker.programs.compiled import (
    THREAD_NAME,
    CacheHits,
    CompileCounter,
    CompiledPrograms,
    CompileTurns,
    enable_compilation_cache,
)
from jaxpaged.worker.programs.declare import SAMPLE_KINDS, ProgramKind
from jaxpaged.worker.programs.engine_programs import NUM_FIRST, EnginePrograms
from jaxpaged.worker.programs.program_index import open_index
from jaxpaged.worker.programs.stages import builders_of
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.shared_blocks import NEVER_SHARED, SharedBlocks
from jaxpaged.worker.step.functions import RESULT_TYPES
from jaxpaged.worker.step.pooling import Pooler
from jaxpaged.worker.step.sampler import Sampler
from jaxpaged.worker.step.zero_pages import has_zero_pages
from jaxpaged.worker.visual_rows import VisualRows
from jaxpaged.worker.weight_update import WeightUpdate, adopted
from jaxpaged.worker.weights import free, return_freed_pages, weights_of

if TYPE_CHECKING:
    from jaxpaged.models.dense_forward import DenseModel

logger = logging.getLogger(__name__)


class Worker:
    """The devices of one engine. `config` is resolved; `decoder` describes the model in `folder`.

    Raises CapacityError when the KV cache cannot hold one request of `max_model_len`, or memory is not to be had,
    ConfigError when the devices are too few, CheckpointError when the weights do not fit the description, ProgramError
    when a program that the first request needs cannot be made.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        decoder: DecoderConfig,
        folder: Path | None,
        progress: Progress | None = None,
        settle_blocks: Callable[[int], int] = lambda num_blocks: num_blocks,
    ):
        """`settle_blocks`: what several processes agree on as the number of KV blocks, if so many fit here."""
        self.config = config
        self.progress = progress or (lambda stage, done, total: None)
        enable_compilation_cache(config.compile.compilation_cache_dir)
        self.stages = engine_specs(config, model, decoder, meshes_of(config.parallel))
        self.engine_spec = self.stages[-1]
        check_slice(config.parallel.num_cores, self.engine_spec.mesh)
        self.bundle = self._open_bundle()
        num_blocks = settle_blocks(min(self._size_kv_cache(stage).num_blocks[0] for stage in self.stages))
        self.head_scales = self._find_scales(folder)
        self.kv_cache_config = whole_kv_cache(self.engine_spec, num_blocks, self.head_scales)
        offload = config.cache.offload and check_offload(config.cache.offload, self.engine_spec, self.kv_cache_config)
        programs = [EnginePrograms(stage, stage.division.kv_cache(num_blocks)) for stage in self.stages]
        self.step_programs = programs[-1]
        self.cache_hits = CacheHits(THREAD_NAME)
        has_zero_pages(self.engine_spec.platform)  # programs that are loaded call what it makes known
        self.programs = self._compile(programs)
        self.programs.start()
        self.weights = weights_of(self.stages, folder, self.progress)
        self.profiler = Profiler(config.profiler.profile_dir)
        begin = time.monotonic()
        try:
            with memory_for("weights", "Split the model over more devices (tensor_parallel_size), or quantize it."):
                params = self.weights.bring_back()
            with memory_for("KV cache", "Lower gpu_memory_utilization, or whatever option sets its size."):
                self.device = Device(self.programs, params, self._head(params), self.new_state())
                self.device.table_CV = self._pixel_table()
            self.embeds_folder = open_embeds(self.engine_spec)
            self.balancer = self._make_balancer()
            self.adapters = self._make_adapters(folder)  # they follow experts
            self.runner = self._make_runner()
            self.weight_update: WeightUpdate | None = None
            seconds = time.monotonic() - begin
            self.programs.trace_first()
            if config.compile.wait_for_programs:
                self.programs.wait_all()
        except BaseException:
            self.programs.stop()
            raise
        self.kv_transfer = self._open_transfer(offload)
        self.programs.activity.end_all()  # the first request may come now
        self.counter = CompileCounter()
        self.memory = planned_memory(self.stages, num_blocks)
        log_start(self.stages, self.kv_cache_config, seconds)

    def _head(self, params: Any) -> Any:
        """What turns hidden states into logits, or into what an engine that pools gives."""
        return self.engine_spec.model.head(params if len(self.stages) == 1 else params[-1])

    def _size_kv_cache(self, engine_spec: EngineSpec) -> KVCacheConfig:
        cache = self.config.cache
        place = (reserve_of(engine_spec).total, engine_spec.mesh.local_devices[0])
        if self.bundle:
            return compiled_kv_cache(self.bundle.num_blocks, cache, engine_spec.division, *place)
        return size_kv_cache(cache, engine_spec.division, engine_spec.demand, *place)

    def _find_scales(self, folder: Path | None) -> HeadScales:
        """What keys and values of 8 bits are multiplied with. Raises ConfigError, and CheckpointError."""
        spec, cache = self.engine_spec, self.config.cache
        if spec.cache_type.scales != "head":
            return HeadScales()
        found: LayerScales = {}
        layers, made_for = spec.scaled_layers, CACHE_TYPES["fp8_e4m3"].dtype
        if cache.kv_cache_scales is not None:
            made_for, found = read_scales_file(Path(cache.kv_cache_scales), spec.whole.num_layers, layers)
        elif folder is not None and self.config.load.load_format != "dummy":
            found = kv_scales_of(folder, layers)
        scales = HeadScales.of(found, made_for, spec.cache_type)
        scales.check(cache.kv_cache_dtype, spec.cache_type, layers)
        return scales

    def _open_bundle(self) -> Bundle | None:
        """The bundle that was asked for. Raises ConfigError when it is damaged or for another engine."""
        if self.config.compile.bundle is None:
            return None
        bundle = Bundle(Path(self.config.compile.bundle))
        bundle.check(self.engine_spec.fingerprint())
        return bundle

    def _compile(self, stages: Sequence[EnginePrograms]) -> CompiledPrograms:
        """The programs of all stages, compiled here or taken from the bundle."""
        builders = builders_of(stages)
        stored = self.bundle.loaders(list(builders), self.engine_spec.mesh, RESULT_TYPES) if self.bundle else {}
        folder, num_blocks, turns = jax.config.jax_compilation_cache_dir, self.kv_cache_config.num_blocks, {}
        if self.config.parallel.num_cores > 1 and folder is not None:
            turns = {"turn": CompileTurns(folder, (self.engine_spec.fingerprint(), num_blocks)).turn}
        index = None if stored else open_index(self.engine_spec, num_blocks, RESULT_TYPES)
        return CompiledPrograms(
            builders,
            progress=self.progress,
            stored=stored,
            on_demand=() if stored else self.step_programs.late,
            rare=self.step_programs.rare,
            first=NUM_FIRST,
            shares_cores=self.engine_spec.platform == "cpu",
            index=index,
            row_shares=self._row_shares(builders),
            **turns,
        )

    def _row_shares(self, builders: Iterable[ProgramKey]) -> dict[str, float]:
        """What a row that samples is of the work of a token, as the output head is of the other weights."""
        works = [work_of(stage) for stage in self.stages]
        head = works[-1].head_params
        share = head / max(sum(work.params for work in works) - head, 1)
        return {key.kind: share for key in builders if key.kind in SAMPLE_KINDS}

    def save_bundle(self, folder: Path) -> None:
        """Write all programs, once they are compiled, to an empty folder. Raises UsageError."""
        programs, num_blocks = self.programs.wait_all(on_demand=True), self.kv_cache_config.num_blocks[0]
        save_bundle(folder, programs, self.engine_spec.fingerprint(), num_blocks, RESULT_TYPES, self.progress)

    def _make_runner(self) -> ModelRunner:
        programs, cache = self.step_programs, self.kv_cache_config
        # Layouts for few tokens have none; the units of the others are the same.
        works = max((layout.shared_work for layout in programs.layouts.values()), key=len)
        sizes = zip(cache.block_sizes, cache.device_slots)
        units = [(size, work.unit // slots * size) for (size, slots), work in zip(sizes, works)]
        # Nothing attends to snapshots, so none is read for several rows at once.
        attended = [group.spec.is_attended for group in cache.groups]
        units = [(size, unit if each else NEVER_SHARED * size) for (size, unit), each in zip(units, attended)]
        shared = lambda: [SharedBlocks(*each) for each in units]
        visual = self._visual_rows()
        rows = [
            RequestRows(self.config.scheduler.max_num_seqs, len(cache.groups), shared(), visual)
            for _ in range(self.config.parallel.num_ranks)
        ]
        output_stage: OutputStage = Pooler()
        drafter: Drafter | None = None
        if not self.engine_spec.pools:
            output_stage = sampler = Sampler(
                rows, programs.row_state, self.engine_spec.custom, programs.multi_step_layouts
            )
            if self.engine_spec.draft is not None:
                drafter = ModelDrafter(sampler, programs.draft_multi_step_layouts)
            elif self.engine_spec.num_drafts:
                drafter = LookupDrafter(self.config.scheduler.max_num_seqs)
        after_step = self.balancer.step_dispatched if self.balancer is not None else None
        encoder = None
        if (spec := self.engine_spec.encoder) is not None:
            encoder = self._make_encoder(spec, rows[0])
        layouts, adapters = programs.layouts, self.adapters
        return ModelRunner(self.device, rows, layouts, output_stage, drafter, after_step, encoder, adapters)

    def _make_encoder(self, spec: EncoderSpec, rows: RequestRows) -> Encoder:
        """What computes pictures, and takes embeddings and gives its own to other engines if options say so."""
        parts, folder = (spec, self.step_programs.encode_layouts, rows), self.embeds_folder
        if folder is not None:
            return SharingEncoder(*parts, folder, self.embeds_space)
        return TakingEncoder(*parts) if self.engine_spec.takes_embeds else Encoder(*parts)

    def embeds_space(self) -> str:
        """Names all that embeddings depend on besides the picture, as the weights are now."""
        return embeds_space(self.engine_spec, self.weights.version)

    def _visual_rows(self) -> VisualRows | None:
        """What steps say of pictures, in an engine that sees: then there is one attention rank."""
        if (spec := self.engine_spec.encoder) is None:
            return None
        max_num_seqs, vision = self.config.scheduler.max_num_seqs, spec.vision
        return VisualRows(max_num_seqs, spec.cache.page_size, bool(spec.config.both_ways), vision.rope_offsets)

    def _pixel_table(self) -> Any:
        """What values of pixels become, on the devices of an engine that sees."""
        if (spec := self.engine_spec.encoder) is None:
            return None
        assert spec.vision.processor is not None, "its table says what pixels are"
        table_CV, everywhere = spec.vision.processor.table_CV, self.step_programs.functions.replicated
        return jax.make_array_from_callback(table_CV.shape, everywhere, lambda index: table_CV[index])

    def _make_adapters(self, folder: Path | None) -> AdapterSlots | None:
        """Where adapters are kept, in an engine that takes some."""
        specs = [stage.lora for stage in self.stages if stage.lora is not None]
        if not specs:
            return None
        load = self.config.load
        has_files = folder is not None and load.load_format != "dummy"
        read = reader_of(self.engine_spec, folder if has_files else None, load.download_dir)
        adapters = AdapterSlots(specs, read, self.balancer)
        self.device.head_stacks, self.device.tower_stacks = specs[-1].of_lines, specs[-1].tower
        adapters.begin_anew(self.device)
        return adapters

    def read_lora(self, request: LoRARequest) -> LoRAInfo:
        """Read an adapter into host memory; may run beside steps. Raises CheckpointError."""
        return self._adapters().read(request, self.weights.label)

    def drop_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter in host memory; whether there was one."""
        return self._adapters().drop(lora_int_id)

    def _adapters(self) -> AdapterSlots:
        if self.adapters is None:
            raise UsageError("the engine takes no adapters. Start it with enable_lora.")
        return self.adapters

    def _make_balancer(self) -> ExpertBalancer | None:
        """What moves experts between devices, if they are to be moved."""
        options = self.config.parallel.expert_balance
        return options and ExpertBalancer(self.device, options, self.engine_spec.mesh)

    def _open_transfer(self, offload: KVOffload | None) -> KVTransferWorker | None:
        """What keeps keys and values besides the devices, if anything."""
        if offload is None:
            return None
        return open_transfer(offload, self.engine_spec, self.kv_cache_config, self.device, self.weights.version)

    def new_state(self) -> DeviceState:
        """Device state of an engine that has computed nothing: all zeros."""
        zeros = self.programs[ProgramKey(ProgramKind.ZEROS)]
        state = DeviceState(*jax.block_until_ready(zeros()))  # or memory is missed later
        if self.engine_spec.cache_type.scales == "head":
            state.kv = self._with_scales(state.kv)
        return state

    def _with_scales(self, kv: Any) -> Any:
        """The KV tensors, of every stage where there are several, with the scales of layers and heads."""
        num_blocks = self.kv_cache_config.num_blocks[0]
        filled = [
            with_scales(each, stage.division.kv_cache(num_blocks), self.head_scales, stage.first_layer)
            for each, stage in zip(kv if len(self.stages) > 1 else [kv], self.stages)
        ]
        return tuple(filled) if len(self.stages) > 1 else filled[0]

    def _renew_state(self) -> None:
        self.device.state = self.new_state()
        if self.balancer is not None:
            self.balancer.forget()  # counts are zero again

    def call_extension(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `extension.py`. Raises UsageError: there is none."""
        raise UsageError(f"there is no worker extension to call {method!r} of. Give one as worker_extension_cls.")

    def recover(self) -> None:
        """After a failed step: forget every request and every block, keep weights and programs.

        The old KV cache goes first: there is no memory for two.
        """
        if self.kv_transfer is not None:
            self.kv_transfer.revoke()
        free_state(self.device)
        self._renew_state()
        if self.adapters is not None:
            free(self.device.stacks)
            self.adapters.begin_anew(self.device)
        self.programs.activity.end_all()
        self.runner = self._make_runner()

    def sleep(self, discard: bool) -> None:
        """Free KV cache and weights on the devices; `discard`: and on the host. No request may have a row afterwards.

        Rows, counters and programs stay, so waking compiles nothing.
        """
        device = self.device
        head = None if self.weights.is_lent else device.head  # it may be a parameter
        self.weights.put_aside(device.params, discard)
        free((head, device.stacks))
        device.params = device.head = None
        free_state(device)
        return_freed_pages()

    def wake_up(self, part: str) -> None:
        """Take "weights" or "kv_cache" back. Raises CheckpointError, and CapacityError when the memory is not free."""
        device = self.device
        with memory_for(part, "Free memory, and wake the engine again."):
            if part == "weights":
                self.weights.release((device.params, device.head))  # there only if falling asleep failed half way
                device.params = self.weights.bring_back()
                device.head = self._head(device.params)
                if self.adapters is not None:
                    free(device.stacks)
                    self.adapters.begin_anew(device)
            else:
                free_state(device)
                self._renew_state()

    def start_weight_update(self, is_partial: bool) -> None:
        """Begin an update; one that was begun before is forgotten. Raises UsageError, and ConflictError while weights
        sleep."""
        self.weight_update = None
        self._check_changeable()
        self.weight_update = WeightUpdate(self.stages, is_partial)

    def receive_weights(self, weights: Any, mapping: str | None) -> int:
        """A part of the update, see `WeightUpdate.add`. Raises ConflictError when none was begun, and its errors."""
        return self._begun().add(weights, mapping)

    def sums_of_weights(self) -> dict[str, int]:
        """Of the last part that was received, by which processes see whether all have the same."""
        return self._begun().sums_of_last()

    def take_weights_back(self) -> int:
        """Forget the last part that was received; bytes of the others."""
        return 0 if self.weight_update is None else self.weight_update.take_back()

    def abandon_weight_update(self) -> None:
        """Forget what has come of an update, if one was begun."""
        self.weight_update = None

    def check_weight_update(self) -> None:
        """Raise CheckpointError unless all is there that is to be replaced, and ConflictError."""
        self._check_changeable()
        self._begun().check()

    def make_room_for_update(self) -> None:
        """Have room for the largest of the weights that came, which are checked; no step may be in flight. Raises
        CapacityError, and nothing was replaced."""
        with memory_for("new weights", "The engine keeps those that it has. Free memory, and begin the update again."):
            self._begun().make_first(self.device.params)

    def finish_weight_update(self, label: str) -> None:
        """Replace the weights by those that came, for which there is room; no step may be in flight. Raises
        CapacityError when memory was too little after all: then there are none."""
        update, device = self._begun(), self.device
        self.weight_update = None
        head, leaves = device.head, set(map(id, jax.tree.leaves(device.params)))
        try:
            with memory_for("weights", "Free memory, and call wake_up for the weights of the checkpoint."):
                params = update.replace(device.params, self.weights.release)
        except BaseException:
            self.weights.put_aside(device.params, discard=True)
            device.params = device.head = None
            raise
        if update.is_complete:
            self.weights.is_lent = False
        free([leaf for leaf in jax.tree.leaves(head) if id(leaf) not in leaves])  # what was no parameter
        self._take_weights(params, label)

    def adopt_weights(self, tree: Any, label: str, donate: bool) -> None:
        """Take arrays in the structure of the parameters as parameters; `donate`: they are the engine's from now on.
        Raises CheckpointError, ConflictError."""
        self._check_changeable()
        params, before = adopted(tree, self.device.params), self.device.params
        taken = set(map(id, jax.tree.leaves(params)))
        self.weights.release([leaf for leaf in jax.tree.leaves(before) if id(leaf) not in taken])
        self.weights.is_lent = not donate
        self._take_weights(params, label)

    def _take_weights(self, params: Any, label: str) -> None:
        self.device.params = params
        self.device.head = self._head(params)
        self.weights.rename(label)

    def _begun(self) -> WeightUpdate:
        if self.weight_update is None:
            raise ConflictError("no update of weights was begun. Call start_weight_update() first.")
        return self.weight_update

    def _check_awake(self) -> None:
        if self.device.params is None:
            raise ConflictError("the weights sleep. Call wake_up() first.")

    def _check_changeable(self) -> None:
        self._check_awake()
        if self.adapters is not None:
            self.adapters.check_changeable()

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """What a function makes of the parameters, of which each stage's are an entry of a tuple where layers are dealt
        to stages. Raises ConflictError while they sleep."""
        self._check_awake()
        return func(self.device.params)

    def dense_model(self) -> "DenseModel":
        """The model for trainers; see `models/dense_forward.py`. Raises ConfigError."""
        from jaxpaged.worker.dense_model import dense_model  # only trainers need it

        return dense_model(self.stages)

    def start_profile(self, folder: str | None) -> None:
        """See `Profiler.start`."""
        self.profiler.start(folder)

    def stop_profile(self) -> None:
        """See `Profiler.stop`."""
        self.profiler.stop()

    def wait_for_programs(self) -> None:
        """Block until every program is compiled."""
        self.programs.wait_all()

    def stats(self) -> dict[str, Any]:
        counts, programs = self.device.counts, self.programs
        return {
            "steps": counts.steps,
            "scheduled_tokens": counts.scheduled_tokens,
            "padded_tokens": counts.padded_tokens,
            "token_buckets": list(self.engine_spec.token_buckets),
            "bucket_steps": dict(sorted(counts.buckets.items())),
            "programs": programs.num_wanted,
            "programs_ready": programs.num_ready,
            "ordinary_programs": len(programs.ordinary),
            "ordinary_programs_ready": programs.num_ordinary_ready,
            "program_states": programs.states,
            "program_failure": None if programs.failure is None else str(programs.failure),
            "compile_seconds": sum(programs.seconds.values()),
            "programs_from_bundle": len(programs.stored),
            "programs_from_cache": self.cache_hits.count,
            "recompiles": self.counter.count,
            "num_kv_blocks": len(self.runner.ranks) * sum(self.kv_cache_config.num_blocks),
            **self.memory,
            **(self.balancer.stats() if self.balancer is not None else {}),
            **(self.kv_transfer.stats() if self.kv_transfer is not None else {}),
            **(self.embeds_folder.stats() if self.embeds_folder is not None else {}),
        }

    def shutdown(self) -> None:
        if self.kv_transfer is not None:
            self.kv_transfer.close()
        if self.embeds_folder is not None:
            self.embeds_folder.close()
        self.profiler.close()
        self.programs.stop()
        self.counter.close()
        self.cache_hits.close()


def meshes_of(parallel: ParallelConfig) -> tuple[Mesh, ...]:
    """The devices of every stage. Raises ConfigError when they are too few."""
    return stage_meshes(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.num_processes,
        spreads_experts=parallel.enable_expert_parallel,
        ranks=parallel.num_ranks,
    )


def free_state(device: Device) -> None:
    """Free KV cache and sampling state before new ones are made, or none."""
    free(vars(device.state) if device.state else None)
    device.state = None


def log_start(stages: Sequence[EngineSpec], kv_cache: KVCacheConfig, seconds: float) -> None:
    """Say what was loaded where, within `seconds`, and how many requests of full length the KV cache holds."""
    config, demand, memory = stages[-1].config, stages[-1].demand, planned_memory(stages, kv_cache.num_blocks[0])
    devices = [device for stage in stages for device in stage.mesh.devices.flat]
    num_ranks = config.parallel.num_ranks
    concurrency = num_ranks * kv_cache.concurrency(demand.max_model_len, demand.max_num_batched_tokens)
    record = {
        "model": config.model.model,
        "num_devices": len(devices),
        "device_kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "weight_forms": forms_of(stages),
        "weight_bytes": memory["weight_bytes"],
        "weight_seconds": round(seconds, 3),
        "kv_cache_bytes": memory["kv_cache_bytes"],
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "kv_cache_tokens": int(concurrency * demand.max_model_len),
        "decode_context_parallel_size": config.parallel.decode_context_parallel_size,
        "pipeline_parallel_size": len(stages),
        "attention_ranks": num_ranks,
        "max_model_len": demand.max_model_len,
        "max_concurrency": round(concurrency, 2),
    }
    words = {
        "weights": weights_in_words(stages),
        "weight_mib": memory["weight_bytes"] / 2**20,
        "kv_cache_mib": memory["kv_cache_bytes"] / 2**20,
        "division": division_in_words(stages),
    }
    logger.info(
        "%(model)s on %(num_devices)d x %(device_kind)s (%(platform)s), %(dtype)s%(weights)s: "
        "weights of %(weight_mib).1f MiB a device in %(weight_seconds).1f s, "
        "KV cache of %(kv_cache_mib).1f MiB a device in %(kv_cache_dtype)s for %(kv_cache_tokens)d tokens, "
        "which is %(max_concurrency).1f requests of %(max_model_len)d tokens at a time%(division)s",
        record | words,
        extra=record,
    )


def forms_of(stages: Sequence[EngineSpec]) -> dict[str, int]:
    """What weights of a quantised checkpoint are on the devices, and how many parameters are so."""
    return dict(sum((Counter(stage.forms) for stage in stages), Counter[str]()))


def weights_in_words(stages: Sequence[EngineSpec]) -> str:
    """In what weights are, where they are no floats of 16 or 32 bits."""
    rounded, forms = stages[-1].config.model.quantization, forms_of(stages)
    if rounded:
        return f", weights in {rounded}"
    return f", weights in {', '.join(forms)}" if forms else ""


def division_in_words(stages: Sequence[EngineSpec]) -> str:
    """How contexts, requests and layers are divided among devices, where they are."""
    parallel, words = stages[-1].config.parallel, ""
    if parallel.decode_context_parallel_size > 1:
        words += f", each context over {parallel.decode_context_parallel_size} devices"
    if parallel.num_ranks > 1:
        words += f"; {parallel.num_ranks} attention ranks with requests of their own have the experts together"
    if len(stages) > 1:
        dealt = ", ".join(str(stage.decoder.num_layers) for stage in stages)
        words += f"; {len(stages)} stages of {dealt} layers, bytes are those of the largest"
    return words

"""Puts the device side together: mesh, KV cache size, programs, weights, device state.

The order makes start-up short. Everything that programs need is known from shapes, so they compile in threads while
the weights load; the engine is ready when the weights are, and a step waits for its own programs only.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.kv_cache_spec import blocks_for_tokens, group_layers
from jaxpaged.layers.attention import AttentionContext, kv_struct
from jaxpaged.messages import Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.params.checkpoint import init_dummy_params, load_params
from jaxpaged.params.sharding import param_shapes
from jaxpaged.sampling.custom import CustomProcessors, load_processors
from jaxpaged.sampling.state import StateLayout, load_row, load_tokens
from jaxpaged.worker.buckets import MIN_BUCKET, doubling_buckets
from jaxpaged.worker.bundles import Bundle, save_bundle
from jaxpaged.worker.decode_batch import DecodeLayout, decode_layout
from jaxpaged.worker.decode_loop import lower_decode
from jaxpaged.worker.fingerprint import Fingerprint, fingerprint
from jaxpaged.worker.kv_blocks import Demand, compiled_kv_cache, size_kv_cache
from jaxpaged.worker.model_runner import DeviceState, ModelRunner
from jaxpaged.worker.packed import StepLayout, step_layout
from jaxpaged.worker.programs import CompileCounter, ProgramKey, Programs, enable_compilation_cache
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.row_uploads import TOKENS_UPLOAD_SIZE
from jaxpaged.worker.step import RESULT_TYPES, Shapes, StepFunctions
from pallas_kernels.ragged_paged_attention import choose_backend

MAX_STEPS = 32
"""Steps that one program can run, unless an option says otherwise."""
MOST_LOGPROBS = 128
"""Log probabilities per token that a run of decode steps may keep until its end."""


class Worker:
    """The devices of one engine. `config` is resolved; `decoder` describes the model in `folder`.

    Raises CapacityError when the KV cache cannot hold one request of `max_model_len`, ConfigError when the devices
    are too few, CheckpointError when the weights do not fit the description.
    """

    def __init__(
        self, config: EngineConfig, model: Model, decoder: DecoderConfig, folder: Path | None,
        progress: Progress | None = None,
    ):  # fmt: skip
        self.config, self.model = config, model
        self.progress = progress or (lambda stage, done, total: None)
        self.decoder = replace(decoder, max_model_len=config.model.max_model_len, dtype=config.model.dtype)
        self.num_shards = config.parallel.tensor_parallel_size
        self.mesh = make_mesh(self.num_shards)
        enable_compilation_cache(config.compile.compilation_cache_dir)
        self.specs = model.param_specs(self.decoder, self.num_shards)
        self.param_shapes = param_shapes(self.specs, self.decoder, self.mesh, self.dtype)
        self.bundle = self._open_bundle()
        self.kv_cache_config = self._size_kv_cache()
        self.programs = self._make_programs()
        self.programs.start()
        try:
            params = self._load(folder)
        except BaseException:
            self.programs.stop()
            raise
        self.runner = self._make_runner(params)
        self.counter = CompileCounter()

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.config.model.dtype)

    @cached_property
    def token_buckets(self) -> tuple[int, ...]:
        given = self.config.compile.token_buckets
        return tuple(sorted(given)) if given else doubling_buckets(self.config.scheduler.max_num_batched_tokens)

    @cached_property
    def sample_buckets(self) -> tuple[int, ...]:
        return doubling_buckets(self.config.scheduler.max_num_seqs)

    @cached_property
    def layouts(self) -> dict[int, StepLayout]:
        """Forward bucket -> where the parts of its packed array lie."""
        cache = self.kv_cache_config
        return {
            size: step_layout(size, self.config.scheduler.max_num_seqs, len(cache.groups), cache.block_size)
            for size in self.token_buckets
        }

    @cached_property
    def decode_layouts(self) -> dict[int, DecodeLayout]:
        """Buckets of runs of decode steps, as far as all requests can fill them: with those of single steps, so that
        a token is computed in the same shapes either way."""
        max_num_seqs, cache = self.config.scheduler.max_num_seqs, self.kv_cache_config
        max_steps = self.config.scheduler.num_scheduler_steps or MAX_STEPS
        if max_steps == 1:
            return {}
        largest = next(size for size in self.token_buckets if size >= max_num_seqs)
        sizes = (len(cache.groups), cache.block_size)
        return {
            size: decode_layout(size, max_num_seqs, self.sample_buckets, max_steps, *sizes)
            for size in self.token_buckets
            if size <= largest
        }

    @cached_property
    def functions(self) -> StepFunctions:
        return StepFunctions(
            model=self.model,
            config=self.decoder,
            attention=self.attention,
            kv_cache=self.kv_cache_config,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            num_hidden=max(self.config.scheduler.max_num_seqs, MIN_BUCKET),
            logprobs_mode=self.config.model.logprobs_mode,
            max_logprobs=min(self.config.model.max_logprobs, self.decoder.vocab_size),
            custom=self.custom,
        )

    @cached_property
    def custom(self) -> CustomProcessors:
        return load_processors(self.config.model.logits_processors)

    @cached_property
    def sampling_layout(self) -> StateLayout:
        """Sizes of the sampling state. Logits are as wide as the vocabulary is once it is split over devices."""
        head = self.model.head(self.param_shapes)
        return StateLayout(self.config.scheduler.max_num_seqs, head.shape[0], self.custom.num_params)

    @cached_property
    def attention(self) -> AttentionContext:
        platform = self.mesh.devices.flat[0].platform
        return AttentionContext(self.mesh, choose_backend(self.config.compile.attention_backend, platform))

    @cached_property
    def shapes(self) -> Shapes:
        cache, spec = self.kv_cache_config, self.kv_cache_config.groups[0].spec
        sizes = (cache.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        kv = [kv_struct(self.attention, *sizes, self.kv_dtype) for _ in range(cache.num_tensors)]
        max_blocks = blocks_for_tokens(self.config.model.max_model_len, self.kv_cache_config.block_size)
        return Shapes(self.functions, self.param_shapes, kv, self.sampling_layout, max_blocks)

    @property
    def kv_dtype(self) -> Any:
        return jnp.dtype(self.config.cache.kv_cache_dtype)

    def _size_kv_cache(self) -> Any:
        config = self.config
        specs = self.model.attention_specs(
            self.decoder, config.cache.block_size, self.kv_dtype.itemsize, self.num_shards
        )
        demand = Demand(
            config.model.max_model_len, config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        )
        groups, device = group_layers(specs), self.mesh.devices.flat[0]
        place = (self.num_shards, self._reserved_bytes(), device)
        if self.bundle:
            return compiled_kv_cache(self.bundle.num_blocks, config.cache, groups, *place)
        return size_kv_cache(config.cache, groups, demand, *place)

    def _reserved_bytes(self) -> int:
        """Bytes per device for weights and temporaries, from shapes alone: an upper estimate.

        The largest step holds a few [T, F] and [T, D] arrays at a time, and the sampler a few float32 [S, V] ones.
        """
        weights = sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(self.param_shapes))
        scheduler, decoder = self.config.scheduler, self.decoder
        per_token = 3 * decoder.intermediate_size // self.num_shards + 8 * decoder.hidden_size
        activations = scheduler.max_num_batched_tokens * per_token * self.dtype.itemsize
        logits = 6 * scheduler.max_num_seqs * decoder.vocab_size * 4
        return weights + activations + logits

    def _open_bundle(self) -> Bundle | None:
        """The bundle that was asked for. Raises ConfigError when it is damaged or for another engine."""
        if self.config.compile.bundle is None:
            return None
        bundle = Bundle(Path(self.config.compile.bundle))
        bundle.check(self.fingerprint())
        return bundle

    def _make_programs(self) -> Programs:
        """The table, compiled here or taken from the bundle."""
        builders = self._builders()
        stored = self.bundle.loaders(list(builders), self.mesh, RESULT_TYPES) if self.bundle else {}
        waits = self.config.scheduler.num_scheduler_steps is None and not stored
        on_demand = [key for key in builders if waits and key.kind.startswith("decode")]
        return Programs(builders, progress=self.progress, stored=stored, on_demand=on_demand)

    def fingerprint(self) -> Fingerprint:
        """What the programs depend on."""
        resolved = {
            "token_buckets": str(self.token_buckets),
            "sample_buckets": str(self.sample_buckets),
            "attention_backend": self.attention.backend,
        }
        return fingerprint(self.config, self.decoder, self.mesh, self.param_shapes, self.custom, resolved)

    def save_bundle(self, folder: Path) -> None:
        """Write all programs, once they are compiled, to an empty folder. Raises UsageError."""
        programs, num_blocks = self.programs.wait_all(on_demand=True), self.kv_cache_config.num_blocks
        save_bundle(folder, programs, self.fingerprint(), num_blocks, RESULT_TYPES, self.progress)

    def _builders(self) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """How to lower every program, in the order in which they are wanted.

        First what a lone short prompt needs, then the other forward buckets, then what fewer requests use.
        """
        shapes = self.shapes
        builders = {ProgramKey("zeros"): shapes.lower_zeros}
        decode, small_prompt = self.token_buckets[0], self.token_buckets[min(3, len(self.token_buckets) - 1)]
        for size in sorted(self.token_buckets, key=lambda size: (size != small_prompt, size != decode, size)):
            builders[ProgramKey("forward", size)] = partial(shapes.lower_forward, self.layouts[size])
            if size == small_prompt:
                builders[ProgramKey("sample", self.sample_buckets[0])] = partial(
                    shapes.lower_sample, self.sample_buckets[0]
                )
        builders[ProgramKey("tables")] = shapes.lower_tables
        for size in self.sample_buckets:
            builders.setdefault(ProgramKey("sample", size), partial(shapes.lower_sample, size))
        builders[ProgramKey("load_row")] = partial(shapes.lower_load, load_row, self.sampling_layout.packed_size)
        builders[ProgramKey("load_tokens")] = partial(shapes.lower_load, load_tokens, TOKENS_UPLOAD_SIZE)
        for size in self.sample_buckets:
            builders[ProgramKey("sample_full", size)] = partial(shapes.lower_sample_full, size)
        for size in self.token_buckets:
            builders[ProgramKey("prompt_logprobs", size)] = partial(shapes.lower_prompt_logprobs, size)
        return builders | self._decode_builders()

    def _decode_builders(self) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """Runs of decode steps, which nobody waits for. With the full sampler only if the log probabilities of all
        steps are small enough to be kept until the last one."""
        builders = {}
        for kind in ("decode", "decode_full"):
            full = kind == "decode_full"
            if full and self.functions.max_logprobs > MOST_LOGPROBS:
                break
            for size, layout in self.decode_layouts.items():
                builders[ProgramKey(kind, size)] = partial(lower_decode, self.shapes, layout, full)
        return builders

    def _load(self, folder: Path | None) -> Any:
        if self.config.load.load_format == "dummy":
            return init_dummy_params(self.specs, self.decoder, self.mesh, self.dtype, seed=self.config.model.seed)
        progress, load_format = partial(self.progress, "weights"), self.config.load.load_format
        return load_params(self.specs, self.decoder, folder, self.mesh, self.dtype, progress, load_format)

    def _make_runner(self, params: Any) -> ModelRunner:
        scheduler = self.config.scheduler
        return ModelRunner(
            programs=self.programs,
            params=params,
            head=self.model.head(params),
            state=self.new_state(),
            rows=RequestRows(scheduler.max_num_seqs, len(self.kv_cache_config.groups)),
            sampling=self.sampling_layout,
            custom=self.custom,
            layouts=self.layouts,
            sample_buckets=self.sample_buckets,
            sharding=self.functions.replicated,
            decode_layouts=self.decode_layouts,
        )

    def new_state(self) -> DeviceState:
        """Device state of an engine that has computed nothing: all zeros."""
        return DeviceState(*self.programs[ProgramKey("zeros")]())

    def recover(self) -> None:
        """After a failed step: forget every request and every block, keep weights and programs."""
        runner = self.runner
        self.runner = self._make_runner(runner.params)
        self.runner.counts = runner.counts

    def stats(self) -> dict[str, Any]:
        counts, programs = self.runner.counts, self.programs
        return {
            "steps": counts.steps,
            "scheduled_tokens": counts.scheduled_tokens,
            "padded_tokens": counts.padded_tokens,
            "token_buckets": list(self.token_buckets),
            "bucket_steps": dict(sorted(counts.buckets.items())),
            "programs": programs.num_wanted,
            "programs_ready": programs.num_ready,
            "compile_seconds": sum(programs.seconds.values()),
            "programs_from_bundle": len(programs.stored),
            "recompiles": self.counter.count,
            "num_kv_blocks": self.kv_cache_config.num_blocks,
        }

    def shutdown(self) -> None:
        self.programs.stop()
        self.counter.close()


def bytes_on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's part of an array."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    size = leaf.dtype.itemsize
    for extent in shape:
        size *= extent
    return size


"""What an engine's programs are, known from options and a model's description alone: no weight, no device memory.

`Blueprint` has what comes before the size of the KV cache is known, `EnginePrograms` what follows from it. The worker
builds an engine from them; they are as good for a topology of devices that are not here. Neither knows how programs
are kept or called.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.config import EngineConfig, settled
from jaxpaged.config.speculation import Speculation, speculation_of
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import (
    CacheSpec,
    KVCacheConfig,
    KVCacheGroup,
    blocks_for_tokens,
    group_layers,
    groups_of_layers,
)
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.layers.linear import XLA, choose_matmul_backend, takes_one_row
from jaxpaged.models.config import DecoderConfig, with_redundant
from jaxpaged.models.drafted import DraftedParams, drafted_model, drafting_model
from jaxpaged.models.interface import DraftModel, Model
from jaxpaged.models.stages import Stage, decoder_of, params_of
from jaxpaged.params.quantized import quantized_specs
from jaxpaged.params.sharding import bytes_on_device, num_ranks, param_shapes
from jaxpaged.sampling.custom import CustomProcessors, load_processors
from jaxpaged.sampling.limits import INTERPRET, LimitsMethod, choose_method
from jaxpaged.sampling.state import StateLayout, load_row, load_tokens
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import features_of
from jaxpaged.worker.cache.kinds import kind_of, tensor_struct
from jaxpaged.worker.context_split import split_contexts
from jaxpaged.worker.drafters.lookup import lookup_builders
from jaxpaged.worker.drafters.model import draft_builders
from jaxpaged.worker.kv_blocks import Demand, Division
from jaxpaged.worker.kv_transfer.forms import form_of
from jaxpaged.worker.kv_transfer.programs import copy_builders
from jaxpaged.worker.programs.buckets import MIN_BUCKET, default_token_buckets, doubling_buckets
from jaxpaged.worker.programs.compiler_options import Options, compiler_options
from jaxpaged.worker.programs.fingerprint import Fingerprint, fingerprint
from jaxpaged.worker.programs.table import ProgramKey
from jaxpaged.worker.step.decode_loop import lower_decode
from jaxpaged.worker.step.expert_moves import load_structs, move_builders, with_tables
from jaxpaged.worker.step.functions import Shapes, StepFunctions
from jaxpaged.worker.step.packed import SHARED, RunLayout, StepLayout, step_layout
from jaxpaged.worker.step.row_uploads import TOKENS_UPLOAD_SIZE
from jaxpaged.worker.step.verify import VERIFY_KINDS, lower_verify
from pallas_kernels.ragged_paged_attention import choose_backend

MAX_STEPS = {"gpu": 1}
"""Platform -> decode steps that one program can run, unless an option says otherwise; `OTHER_MAX_STEPS` elsewhere."""
OTHER_MAX_STEPS = 32
MOST_LOGPROBS = 128
"""Log probabilities per token that a run of decode steps may keep until its end."""
DECODE_KINDS = ("decode", "decode_full")
MASKED_KIND = "sample_masked"
RARE_KINDS = frozenset(
    {"load_row", "load_tokens", "sample_full", MASKED_KIND, "prompt_logprobs", DECODE_KINDS[1]}
    | {VERIFY_KINDS["sample_full"], VERIFY_KINDS[MASKED_KIND]}
)
"""Programs that only requests with an `Extra` need: penalties, biases, log probabilities, shapes. An engine that has
all others serves ordinary requests at full speed."""
CUSTOM_KINDS = frozenset({"load_row", "load_tokens", "sample_full", VERIFY_KINDS["sample_full"]})
"""Those of them that any request may need where there are custom logits processors."""

Builders = dict[ProgramKey, Callable[[], jax.stages.Lowered]]

SMALL_PROMPT, FEW_REQUESTS = 64, 8
"""Tokens of a prompt, and requests, that must not wait for larger programs."""
NUM_FIRST = 4
"""How many of `EnginePrograms.builders()` a lone short prompt and its answer need."""


class Blueprint:
    """One engine, or a stage of it, on the devices of `mesh`. `config` is resolved; `decoder` describes the whole model
    as its files do."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        decoder: DecoderConfig,
        mesh: Mesh | AbstractMesh,
        stage: Stage | None = None,
    ):
        """`stage`: the layers that there are on these devices; None: all. `whole` describes all of them."""
        self.config, self.model, self.mesh, self.stage = config, model, mesh, stage
        balance = config.parallel.expert_balance
        self.whole = self._settled(with_redundant(decoder, balance.num_redundant_experts if balance else 0))
        self.decoder = self.whole if stage is None else decoder_of(stage, self.whole)
        self.num_shards = config.parallel.tensor_parallel_size
        self.dtype = jnp.dtype(config.model.dtype)
        self.kv_dtype = jnp.dtype(config.cache.kv_cache_dtype)
        self.page_form = form_of(config.cache.offload, self.kv_dtype, [settled(config.cache.block_size)])
        specs, sizes = model.param_specs(self.whole, self.num_shards), self.whole.dim_sizes()
        self.whole_specs = quantized_specs(specs, config.model.quantization, sizes)
        self.specs = self.whole_specs if stage is None else params_of(stage, self.whole_specs)
        self.param_shapes = param_shapes(self.specs, self.decoder, mesh, self.dtype)
        if balance is not None:
            self.param_shapes = with_tables(self.param_shapes, mesh, shapes_only=True)
        self.draft: DraftModel | None = None
        if model.draft is not None:
            self._add_draft(model.draft)

    def _settled[C: DecoderConfig](self, decoder: C) -> C:
        """A description as the options want the model."""
        config = self.config
        return replace(
            decoder,
            max_model_len=config.model.max_model_len,
            dtype=config.model.dtype,
            deterministic=config.compile.deterministic,
            matmul_backend=self._matmul_backend,
        )

    @property
    def _matmul_backend(self) -> str:
        """The kernel that multiplies. Devices that are not here have none of ours."""
        if isinstance(self.mesh, AbstractMesh):
            return XLA
        return choose_matmul_backend(self.platform, self.mesh.size, self.config.compile.deterministic)

    def _add_draft(self, draft: DraftModel) -> None:
        """From now on `model` and `param_shapes` are those of both; `drafting` is what drafts."""
        self.draft = replace(draft, config=self._settled(draft.config))
        self.drafting = drafting_model(self.model, self.draft)
        self.model = drafted_model(self.model, self.draft)
        specs = draft.model.param_specs(self.draft.config, self.num_shards)
        self.draft_specs = quantized_specs(specs, draft.quantization, self.draft.config.dim_sizes())
        shapes = param_shapes(self.draft_specs, self.draft.config, self.mesh, self.dtype)
        self.param_shapes = DraftedParams(self.param_shapes, shapes)

    @property
    def decoders(self) -> tuple[DecoderConfig, ...]:
        """The descriptions of all models, in the order of their layers."""
        return (self.decoder,) if self.draft is None else (self.decoder, self.draft.config)

    @property
    def platform(self) -> str:
        if isinstance(self.mesh, AbstractMesh):
            return self.mesh.abstract_device.platform
        return self.mesh.devices.flat[0].platform

    @property
    def has_other_processes(self) -> bool:
        """Whether several processes compute as one."""
        if isinstance(self.mesh, AbstractMesh):
            return False
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    @cached_property
    def token_buckets(self) -> tuple[int, ...]:
        given, largest = self.config.compile.token_buckets, self.config.scheduler.max_num_batched_tokens
        kernels = takes_one_row(self._matmul_backend, self.dtype)
        return tuple(sorted(given)) if given else default_token_buckets(largest, self.platform, kernels)

    @cached_property
    def sample_buckets(self) -> tuple[int, ...]:
        kernels = takes_one_row(self._matmul_backend, self.dtype)
        return doubling_buckets(self.config.scheduler.max_num_seqs, self.platform, kernels)

    @property
    def max_steps(self) -> int:
        """Decode steps that one program can run. The programs of a stage run none."""
        if self.stage is not None:
            return 1
        return self.config.scheduler.num_scheduler_steps or MAX_STEPS.get(self.platform, OTHER_MAX_STEPS)

    @cached_property
    def compiler_options(self) -> dict[str, Options]:
        """Kind of program -> options of the compiler."""
        return compiler_options(self.mesh, self.config.model.quantization is not None)

    @cached_property
    def custom(self) -> CustomProcessors:
        return load_processors(self.config.model.logits_processors)

    def needs_full(self, params: SamplingParams) -> bool:
        """Whether a request needs the full sampler. Raises RequestError when a custom logits processor refuses it."""
        return bool(features_of(params) or self.custom.of(params)[0])

    @cached_property
    def attention(self) -> AttentionContext:
        """Raises ConfigError when the kernel that was asked for cannot run here, or not with such heads and blocks."""
        options = self.config.compile
        name = "invariant" if options.deterministic else options.attention_backend
        specs = [spec for spec in self._cache_specs if spec.is_attended]
        try:
            backend = choose_backend(name, self.platform)
            context = AttentionContext(self.mesh, backend, self.config.parallel.decode_context_parallel_size)
            num_heads = [decoder.num_heads for decoder in (self.whole, *self.decoders[1:]) for _ in decoder.layers]
            for heads, spec in zip(num_heads, specs, strict=True):
                kind_of(spec).check_heads(context, heads, spec, self.dtype, self.kv_dtype)
        except ValueError as error:
            raise ConfigError(f"attention_backend: {error}") from error
        return context

    @property
    def _cache_specs(self) -> Sequence[CacheSpec]:
        """Of all layers, those of other stages included."""
        block_size, itemsize = self.config.cache.block_size, self.kv_dtype.itemsize
        specs = self.model.attention_specs(self.whole, block_size, itemsize, self.num_shards)
        shards = self.config.parallel.decode_context_parallel_size
        return split_contexts(specs, shards, self.num_shards, (self.whole, *self.decoders[1:]))

    @cached_property
    def sampling_layout(self) -> StateLayout:
        """Sizes of the sampling state. Logits are as wide as the vocabulary is once it is split over devices."""
        head = self.model.head(self.param_shapes)
        return StateLayout(self.config.scheduler.max_num_seqs, head.shape[0], self.custom.num_params)

    @cached_property
    def limits(self) -> LimitsMethod:
        """How the sampler finds what top_k, top_p and min_p leave; simulated where attention is."""
        if self.model.head(self.param_shapes) is None or num_ranks(self.mesh) > 1:
            return LimitsMethod()  # an embedding model draws nothing, and the kernel takes the rows of one rank
        simulated = self.attention.backend.removesuffix(INTERPRET)
        return choose_method(
            self.platform,
            self.mesh,
            self.sampling_layout.vocab_size,
            simulated=simulated if simulated != self.attention.backend else "",
        )

    @cached_property
    def whole_groups(self) -> tuple[KVCacheGroup, ...]:
        """Layers of all stages that cache alike, with the bytes that the kernel's layout takes."""
        specs = [kind_of(spec).as_stored(spec, self.attention.backend) for spec in self._cache_specs]
        return group_layers(specs, is_staged=self.stage is not None)

    @cached_property
    def kv_groups(self) -> tuple[KVCacheGroup, ...]:
        """The same, of the layers that are here."""
        return self.whole_groups if self.stage is None else groups_of_layers(self.whole_groups, self.stage.layers)

    @property
    def demand(self) -> Demand:
        """What requests may ask of the KV cache."""
        scheduler = self.config.scheduler
        return Demand(self.config.model.max_model_len, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)

    @cached_property
    def division(self) -> Division:
        """How memory for KV blocks is divided."""
        return Division(self.kv_groups, self.demand, self.num_shards)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(self.param_shapes))

    @property
    def speculation(self) -> Speculation | None:
        """How tokens are drafted; None: they are not."""
        return speculation_of(self.config.speculative.speculative_config)

    @property
    def num_drafts(self) -> int:
        """Tokens that are drafted for a row and step, at most."""
        return self.config.speculative.num_drafts

    def fingerprint(self) -> Fingerprint:
        """What the programs depend on."""
        resolved = {
            "token_buckets": str(self.token_buckets),
            "sample_buckets": str(self.sample_buckets),
            "attention_backend": self.attention.backend,
            "compiler_options": str(self.compiler_options),
            "speculation": str(self.speculation),
            "draft_model": str(self.draft and self.draft.config),
            "kv_offload": str(self.config.cache.offload and self.page_form),
        }
        return fingerprint(self.config, self.decoder, self.mesh, self.param_shapes, self.custom, resolved)


class EnginePrograms:
    """The programs of a blueprint whose KV cache has a size."""

    def __init__(self, blueprint: Blueprint, kv_cache: KVCacheConfig):
        self.blueprint, self.kv_cache = blueprint, kv_cache

    @cached_property
    def layouts(self) -> dict[int, StepLayout]:
        """Forward bucket -> where the parts of its packed array lie."""
        return {size: self.layout(size) for size in self.blueprint.token_buckets}

    def layout(self, num_tokens: int) -> StepLayout:
        """Of a step with so many tokens."""
        max_num_seqs, backend = self.blueprint.config.scheduler.max_num_seqs, self.blueprint.attention.backend
        sizes, slots = self.kv_cache.block_sizes, self.kv_cache.device_slots
        return step_layout(num_tokens, max_num_seqs, sizes, backend, slots)

    @cached_property
    def runs(self) -> dict[int, RunLayout]:
        """Buckets of runs of decode steps, as far as all requests can fill them: with those of single steps, so that
        a token is computed in the same shapes either way."""
        blueprint, scheduler = self.blueprint, self.blueprint.config.scheduler
        if scheduler.num_scheduler_steps == 1 or blueprint.stage is not None:
            return {}
        largest = next(size for size in blueprint.token_buckets if size >= scheduler.max_num_seqs)
        num_lines = lambda layout: next(size for size in blueprint.sample_buckets if size >= layout.num_rows)
        return {
            size: RunLayout(layout, num_lines(layout), blueprint.max_steps)
            for size, layout in self.layouts.items()
            if size <= largest
        }

    @cached_property
    def draft_runs(self) -> dict[int, RunLayout]:
        """Buckets of the decode steps of a model or a head that drafts, if one does."""
        blueprint = self.blueprint
        if blueprint.draft is None:
            return {}
        return {size: RunLayout(self.layout(size), size, blueprint.num_drafts) for size in blueprint.sample_buckets}

    @property
    def row_state(self) -> StateLayout:
        """What is kept on the device for each row besides KV blocks."""
        return self.blueprint.sampling_layout

    @cached_property
    def functions(self) -> StepFunctions:
        blueprint, config = self.blueprint, self.blueprint.config
        return StepFunctions(
            model=blueprint.model,
            config=blueprint.decoder,
            attention=blueprint.attention,
            kv_cache=self.kv_cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_hidden=max(config.scheduler.max_num_seqs, MIN_BUCKET),
            logprobs_mode=config.model.logprobs_mode,
            max_logprobs=min(config.model.max_logprobs, blueprint.decoder.vocab_size),
            custom=blueprint.custom,
            limits=blueprint.limits,
            is_first=blueprint.stage is None or blueprint.stage.is_first,
        )

    @property
    def rare_kinds(self) -> frozenset[str]:
        """Kinds of programs that no ordinary request of this engine needs."""
        return RARE_KINDS - CUSTOM_KINDS if self.blueprint.custom.processors else RARE_KINDS

    shapes_type = Shapes

    @cached_property
    def shapes(self) -> Shapes:
        blueprint, sizes = self.blueprint, self.kv_cache.block_sizes
        kv = [tensor_struct(blueprint.attention, *each, blueprint.kv_dtype) for each in self.kv_cache.tensors]
        kv += load_structs(blueprint.param_shapes, blueprint.mesh)
        max_blocks = blocks_for_tokens(blueprint.config.model.max_model_len, min(sizes))
        max_tokens = blueprint.token_buckets[-1]
        rows = (kv, self.row_state, max_blocks, max_tokens)
        return self.shapes_type(
            self.functions,
            blueprint.param_shapes,
            *rows,
            blueprint.compiler_options,
            blueprint.config.model.max_model_len,
            blueprint.speculation,
        )

    def builders(self) -> Builders:
        """How to lower every program, in the order in which they are wanted.

        First what a lone short prompt needs, then the other forward buckets, then what fewer requests use. Which of
        them are compiled at the start, and which on demand, is decided elsewhere.
        """
        shapes, blueprint = self.shapes, self.blueprint
        token_buckets, sample_buckets = blueprint.token_buckets, blueprint.sample_buckets
        builders: Builders = {ProgramKey("zeros"): shapes.lower_zeros}
        small_prompt = next((size for size in token_buckets if size >= SMALL_PROMPT), token_buckets[-1])
        for size in sorted(token_buckets, key=lambda size: (size != small_prompt, size != token_buckets[0], size)):
            builders |= self._with_layers("forward", size, shapes.lower_forward, self.layouts[size])
            if size == small_prompt:
                few = next((size for size in sample_buckets if size >= FEW_REQUESTS), sample_buckets[-1])
                builders[ProgramKey("sample", few)] = partial(shapes.lower_sample, few, False)
        builders[ProgramKey("tables")] = shapes.lower_tables
        for size in sample_buckets:
            builders.setdefault(ProgramKey("sample", size), partial(shapes.lower_sample, size, False))
        builders |= self._draft_builders()
        builders[ProgramKey("load_row")] = partial(shapes.lower_load, load_row, blueprint.sampling_layout.packed_size)
        builders[ProgramKey("load_tokens")] = partial(shapes.lower_load, load_tokens, TOKENS_UPLOAD_SIZE)
        for size in sample_buckets:
            builders[ProgramKey("sample_full", size)] = partial(shapes.lower_sample, size, True)
        for size in sample_buckets:
            builders[ProgramKey(MASKED_KIND, size)] = partial(shapes.lower_sample, size, True, masked=True)
        builders[ProgramKey("prompt_logprobs")] = shapes.lower_prompt_logprobs
        return builders | self._copy_builders() | self._decode_builders() | move_builders(shapes)

    def _with_layers(
        self, kind: str, size: int, lower: Callable[[StepLayout], jax.stages.Lowered], layout: StepLayout
    ) -> Builders:
        """The program of a bucket, and another for steps in which rows share spans where one for both would be slower.

        Processes that compute together could choose differently between two, so they have one, and so do stages.
        """
        blueprint = self.blueprint
        if not layout.has_two_programs or blueprint.stage is not None or blueprint.has_other_processes:
            return {ProgramKey(kind, size): partial(lower, layout)}
        alone = partial(lower, replace(layout, reads_shared=False))
        return {ProgramKey(kind, size): alone, ProgramKey(kind + SHARED, size): partial(lower, layout)}

    def _copy_builders(self) -> Builders:
        """Copies of blocks off the devices and back, where the options want them."""
        offload, backend = self.blueprint.config.cache.offload, self.blueprint.attention.backend
        args = self.kv_cache, self.shapes.kv, backend, self.functions.replicated, self.blueprint.page_form
        return {} if offload is None else copy_builders(*args)

    def _draft_builders(self) -> Builders:
        """What drafts and what verifies, if anything does."""
        speculation, sizes = self.blueprint.speculation, self.blueprint.sample_buckets
        if speculation is None:
            return {}
        if self.blueprint.draft is None:
            builders: Builders = lookup_builders(self.shapes, speculation, sizes)
        else:
            builders = draft_builders(
                self.shapes, self.blueprint.drafting, self.blueprint.draft.config, self.draft_runs
            )
        for sampler, kind in VERIFY_KINDS.items():
            for size in sizes:
                asked = (sampler != "sample", sampler == MASKED_KIND)
                builders[ProgramKey(kind, size)] = partial(lower_verify, self.shapes, size, *asked)
        return builders

    def _decode_builders(self) -> Builders:
        """Runs of decode steps, which nobody waits for. With the full sampler only if the log probabilities of all
        steps are small enough to be kept until the last one."""
        kinds = DECODE_KINDS[: 1 if self.functions.max_logprobs > MOST_LOGPROBS else 2]
        builders: Builders = {}
        for kind in kinds:
            for size, run in self.runs.items():
                lower = lambda step, run=run, full=kind == "decode_full": lower_decode(
                    self.shapes, replace(run, step=step), full
                )
                builders |= self._with_layers(kind, size, lower, run.step)
        return builders

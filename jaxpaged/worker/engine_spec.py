"""What an engine is, known from options and a model's description alone: no weight, no device memory.

`EngineSpec` has everything that is known before the size of the KV cache: the model, its devices, shapes of parameters,
groups of the KV cache, and the buckets. `programs/engine_programs.py` has the programs that follow. A topology of
devices that are not here has specs too.

Buckets are the padded sizes that exist: a program has fixed shapes, so a step is padded to the next size that has a
program. Forward programs grow along tokens only: a step of T tokens has at most T requests, so its row dimension is
`min(T, max_num_seqs)`. Sampling programs grow along the rows that sample. The two families add up instead of
multiplying.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.config import EngineConfig, settled
from jaxpaged.config.cache_types import CACHE_TYPES, LAYER_KINDS, CacheType, of_draft
from jaxpaged.config.speculation import Speculation, speculation_of
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import CacheSpec, KVCacheConfig, KVCacheGroup, group_layers, groups_of_layers
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.layers.experts import expert_kernel
from jaxpaged.layers.linear import XLA, choose_matmul_backend, stored_kernel, takes_one_row
from jaxpaged.layers.recurrence import REFERENCE, check_backend
from jaxpaged.models import joined
from jaxpaged.models.config import DecoderConfig, telling, with_redundant
from jaxpaged.models.drafted import DraftedParams, drafted_model, drafting_model
from jaxpaged.models.interface import DraftModel, Model
from jaxpaged.models.joined import joined_shapes
from jaxpaged.models.seeing import without_tower
from jaxpaged.models.stages import Stage, deal_layers, decoder_of, params_of
from jaxpaged.params.adapters.targets import targets_of
from jaxpaged.params.forms import Device, formed_specs, forms_in_words, shards_of
from jaxpaged.params.quantized import BLOCKS, Stored, quantized_specs
from jaxpaged.params.schemes.reading import rounding_of
from jaxpaged.params.sharding import bytes_on_device, num_ranks, param_shapes
from jaxpaged.plugins.loading import digests
from jaxpaged.sampling.custom import CustomProcessors, load_processors
from jaxpaged.sampling.limits import INTERPRET, LimitsMethod, choose_method
from jaxpaged.sampling.state import StateLayout
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import features_of
from jaxpaged.worker.cache.head_scales import HeadScales
from jaxpaged.worker.cache.kinds import kind_of
from jaxpaged.worker.context_split import split_contexts
from jaxpaged.worker.encoder_spec import EncoderSpec, check_together, check_tower, encoder_spec
from jaxpaged.worker.kv_blocks import Demand, Division
from jaxpaged.worker.kv_transfer.forms import form_of
from jaxpaged.worker.lora_stacks import LoraSpec, check_modules, lora_spec, of_stage, scores_of
from jaxpaged.worker.programs.compiler_options import Options, compiler_options
from jaxpaged.worker.programs.fingerprint import Fingerprint, fingerprint
from jaxpaged.worker.step.expert_moves import with_tables
from pallas_kernels.ragged_paged_attention import choose_backend

MAX_STEPS = {"gpu": 1}
"""Platform -> decode steps that one program can run, unless an option says otherwise; `OTHER_MAX_STEPS` elsewhere."""
OTHER_MAX_STEPS = 32
# The smallest of the doubling sizes: on accelerators a matmul tile has at least eight rows, and so have XLA:CPU's.
MIN_BUCKET = 8

# A CPU has smaller sizes too, since rows are work there: eight take 1.3 times as long as two (bench_products.py).
# XLA's products of one row are 4-12 times slower than those of two, so with these there is but a size for a single
# request, of two. Where products of few rows are kernels of our own, one row takes 0.89 of the step of two (4 and 8
# bits, a 110M Llama), and their products two rows 0.5 to 0.6 and four 0.7 of the time of eight.
SINGLE_REQUEST, FEW_ROWS = (2,), (1, 2, 4)


def doubling_buckets(largest: int, platform: str, kernels: bool = False) -> tuple[int, ...]:
    """8, 16, 32, ... and `largest` itself; at least `MIN_BUCKET`. On a CPU with smaller ones before them; `kernels`:
    they multiply a single row."""
    sizes = list(FEW_ROWS if kernels else SINGLE_REQUEST) if platform == "cpu" else []
    size = MIN_BUCKET
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, max(largest, MIN_BUCKET))


def default_token_buckets(largest: int, platform: str, kernels: bool = False) -> tuple[int, ...]:
    """The doubling sizes, and from 128 tokens on also those half way between two of them.

    `jaxpaged buckets fit` on the steps of scripts/bench_offline.py's workloads proposes such sizes: with two more
    programs for 512 tokens, 6.5 % of what is computed is padding instead of 10.5.
    """
    sizes = doubling_buckets(largest, platform, kernels)
    between = (low + low // 2 for low, high in pairwise(sizes) if low >= 128 and high == 2 * low)
    return tuple(sorted((*sizes, *between)))


class EngineSpec:
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
        """`stage`: the layers that there are on these devices; None: all. `whole` describes all of them.
        `decoder_model` is the model without what drafts for it."""
        self.config, self.model, self.mesh, self.stage = config, model, mesh, stage
        self.decoder_model = model
        self.ec_transfer = config.multimodal.ec_transfer
        if decoder.vision is not None:
            check_together(config)
        elif self.ec_transfer is not None:
            raise ConfigError(
                f"ec_transfer_config names a folder of embeddings of pictures, and {config.model.model} sees none. "
                "Leave it out."
            )
        elif config.multimodal.enable_mm_embeds:
            raise ConfigError(f"enable_mm_embeds is True, and {config.model.model} sees no pictures. Leave it out.")
        balance = config.parallel.expert_balance
        decoder = with_redundant(decoder, balance.num_redundant_experts if balance else 0)
        self.whole = self._settled(telling(decoder) if config.model.enable_return_routed_experts else decoder)
        self.decoder = self.whole if stage is None else decoder_of(stage, self.whole)
        self.num_shards = config.parallel.tensor_parallel_size
        self.dtype = jnp.dtype(config.model.dtype)
        self.cache_type = CACHE_TYPES[config.cache.kv_cache_dtype]
        self.kv_dtype = self.dtype if self.cache_type.is_scaled else jnp.dtype(self.cache_type.dtype)
        specs, sizes = model.param_specs(self.whole, self.num_shards), self.whole.dim_sizes()
        self.whole_specs = self._formed(specs, rounding_of(config.model.quantization, decoder.quantization), sizes)
        self.specs = self.whole_specs if stage is None else params_of(stage, self.whole_specs)
        self.param_shapes = self.shapes_of(self.specs, self.decoder)
        if balance is not None:
            self.param_shapes = with_tables(self.param_shapes, mesh, shapes_only=True)
        self.draft: DraftModel | None = None
        if model.draft is not None:
            self._add_draft(model.draft)
        has_snapshots = not all(spec.needs_blocks for spec in self.cache_specs)
        block_sizes = [settled(config.cache.block_size)]
        self.page_form = form_of(config.cache.offload, self.kv_dtype, block_sizes, has_snapshots=has_snapshots)

    def _settled[C: DecoderConfig](self, decoder: C) -> C:
        """A description as the options want the model."""
        config, vision = self.config, decoder.vision
        if vision is not None:
            by_items = config.multimodal.mm_encoder_tp_mode == "data"
            vision = replace(vision, splits_items=by_items)
        return replace(
            decoder,
            max_model_len=config.model.max_model_len,
            dtype=config.model.dtype,
            deterministic=config.compile.deterministic,
            matmul_backend=self._matmul_backend,
            vision=vision,
        )

    @property
    def _matmul_backend(self) -> str:
        """The kernel that multiplies. CPUs that are not here have none of ours."""
        if isinstance(self.mesh, AbstractMesh) and self.platform == "cpu":
            return XLA
        return choose_matmul_backend(self.platform, self.mesh.size, self.config.compile.deterministic)

    def _add_draft(self, draft: DraftModel) -> None:
        """From now on `model` and `param_shapes` are those of both; `drafting` is what drafts."""
        self.draft = replace(draft, config=self._settled(draft.config))
        self.drafting = drafting_model(self.model, self.draft)
        self.model = drafted_model(self.model, self.draft)
        specs = draft.model.param_specs(self.draft.config, self.num_shards)
        sizes = self.draft.config.dim_sizes()
        self.draft_specs = self._formed(specs, rounding_of(draft.quantization, draft.config.quantization), sizes)
        shapes = self.shapes_of(self.draft_specs, self.draft.config)
        self.param_shapes = DraftedParams(self.param_shapes, shapes)

    def _formed(self, specs: Any, rounding: str | None, sizes: Mapping[str, int]) -> Any:
        """Specs with the forms that weights have on these devices: those of a quantised checkpoint, and those that are
        rounded when they are loaded."""
        specs = quantized_specs(specs, rounding, sizes)
        if not any(spec.scheme or spec.quantized == BLOCKS for spec in jax.tree.leaves(specs)):
            return specs
        device = Device(self.platform, self._kernel_for, shards_of(self.mesh.shape))
        return formed_specs(specs, self.config.model.quantized_form, sizes, device)

    def _kernel_for(self, form: Stored, outputs: int, inputs: int, of_experts: bool) -> str | None:
        """What multiplies weights of a form on a device."""
        if of_experts:
            return expert_kernel(self.platform, self.dtype, form, outputs, inputs)
        if self.config.compile.deterministic:
            return None
        return stored_kernel(self.platform, self.dtype, form, outputs, inputs)

    @property
    def forms(self) -> dict[str, int]:
        """What weights of a quantised checkpoint are here, in words, and how many parameters are so."""
        return forms_in_words(self.specs)

    def shapes_of(self, specs: Any, decoder: DecoderConfig) -> Any:
        """Shapes of a model's parameters as programs take them."""
        shapes = param_shapes(specs, decoder, self.mesh, self.dtype)
        return joined_shapes(shapes) if self.joins_weights else shapes

    @property
    def joins_weights(self) -> bool:
        """Whether weights lie side by side that are multiplied with the same. Shapes without any devices do not."""
        if isinstance(self.mesh, AbstractMesh) and self.mesh.abstract_device is None:
            return False
        return self.platform in joined.PLATFORMS

    @property
    def decoders(self) -> tuple[DecoderConfig, ...]:
        """The descriptions of all models, in the order of their layers."""
        return (self.decoder,) if self.draft is None else (self.decoder, self.draft.config)

    @property
    def first_layer(self) -> int:
        """The number of the first layer that is here, in the whole model."""
        return 0 if self.stage is None else self.stage.layers.start

    @property
    def is_last(self) -> bool:
        """Whether tokens are drawn, or vectors given: on a stage that is the last one, or where there are none."""
        return self.stage is None or self.stage.is_last

    @property
    def pools(self) -> bool:
        """Whether the engine gives vectors or scores in place of tokens, or encodes pictures and nothing else."""
        return self.config.model.runner == "pooling" or self.encodes_only

    @property
    def encodes_only(self) -> bool:
        """Whether there is no decoder."""
        return self.config.multimodal.mm_encoder_only

    @property
    def loads_all(self) -> bool:
        """Whether all of the model is loaded that has a description: its decoder, and its tower if it sees."""
        return not (self.encodes_only or (self.encoder is not None and not self.encoder.sizes))

    @property
    def pooling_type(self) -> str:
        if self.encodes_only:
            return "LAST"
        return self.config.model.pooler_config["pooling_type"] if self.pools else ""

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
        """Options of the compiler for programs with layers, and for others."""
        return compiler_options(self.mesh, self.has_quantized)

    @cached_property
    def has_quantized(self) -> bool:
        """Whether weights are multiplied that are no 16-bit floats."""
        return any(spec.quantized for spec in jax.tree.leaves(self.specs))

    @cached_property
    def custom(self) -> CustomProcessors:
        return load_processors(self.config.model.logits_processors)

    def needs_full(self, params: SamplingParams) -> bool:
        """Whether a request needs the full sampler. Raises RequestError when a custom logits processor refuses it."""
        return bool(features_of(params) or self.custom.of(params)[0])

    @property
    def recurrence(self) -> str:
        """Who computes layers with states. Raises ConfigError where it cannot run here, or has nothing to do."""
        name = self.config.compile.recurrence_backend
        try:
            check_backend(name, self.platform)
        except ValueError as error:
            raise ConfigError(f"recurrence_backend: {error}") from error
        if name != REFERENCE and self.decoder.short_conv is None:
            raise ConfigError(
                f"recurrence_backend is {name!r}, and {self.decoder.architecture} has no layer with a state. Leave it "
                "out."
            )
        return name

    @cached_property
    def attention(self) -> AttentionContext:
        """Raises ConfigError when the kernel that was asked for cannot run here, or not with such heads and blocks."""
        options = self.config.compile
        name = "invariant" if options.deterministic else options.attention_backend
        try:
            backend = choose_backend(name, self.platform)
            shards = self.config.parallel.decode_context_parallel_size
            context = AttentionContext(self.mesh, backend, shards, self.recurrence)
            decoders = self.whole, *self.decoders[1:]
            num_heads = [decoder.num_heads for decoder in decoders for _ in range(decoder.num_caches)]
            for heads, spec in zip(num_heads, self.cache_specs):  # the last may be features, to which nothing attends
                if spec.is_attended:
                    kind_of(spec).check_heads(context, heads, spec, self.dtype, self.kv_dtype)
        except ValueError as error:
            raise ConfigError(f"attention_backend: {error}") from error
        return context

    @property
    def cache_specs(self) -> Sequence[CacheSpec]:
        """Of all layers, those of other stages included."""
        block_size, itemsize = self.config.cache.block_size, self.kv_dtype.itemsize
        specs = self.model.attention_specs(self.whole, block_size, itemsize, self.num_shards)
        if self.cache_type.is_scaled:
            skipped, num_layers = self.config.cache.kv_cache_dtype_skip_layers, self.whole.num_caches
            specs = in_eight_bits(specs, self.cache_type, skipped, num_layers)
        specs = [spec.with_drafts(self.num_drafts) for spec in specs]
        shards = self.config.parallel.decode_context_parallel_size
        return split_contexts(specs, shards, self.num_shards, (self.whole, *self.decoders[1:]))

    @property
    def scaled_layers(self) -> dict[int, int]:
        """Layers of the whole decoder whose keys and values have a scale for each head -> how many heads there are."""
        specs = list(self.cache_specs)[: self.whole.num_caches]
        heads = {i: spec.page_heads for i, spec in enumerate(specs) if spec.scales == "head"}
        return {i: each[0] for i, each in heads.items() if each is not None}

    @cached_property
    def sampling_layout(self) -> StateLayout:
        """Sizes of the sampling state. Logits are as wide as the vocabulary is once it is split over devices."""
        head = self.model.head(self.param_shapes)
        most_traced = self.config.max_model_len if self.config.model.enable_trace_replay else 0
        return StateLayout(self.config.scheduler.max_num_seqs, head.shape[0], self.custom.num_params, most_traced)

    @cached_property
    def limits(self) -> LimitsMethod:
        """How the sampler finds the least logit that may be drawn; simulated where attention is."""
        if self.pools or self.model.head(self.param_shapes) is None or num_ranks(self.mesh) > 1:
            return LimitsMethod()  # nothing is drawn, or elsewhere; and the kernel takes the rows of one rank
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
        specs = [kind_of(spec).as_stored(spec, self.attention.backend) for spec in self.cache_specs]
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

    @cached_property
    def encoder(self) -> EncoderSpec | None:
        """Of an engine that sees. Raises ConfigError for options that contradict the model."""
        tower = self.whole.vision
        return None if tower is None else encoder_spec(self.config, self.model, tower, self.platform)

    @property
    def saves_embeds(self) -> bool:
        """Whether embeddings of pictures go to other engines."""
        return self.ec_transfer is not None and self.ec_transfer.saves

    @property
    def takes_embeds(self) -> bool:
        """Whether embeddings of pictures come from elsewhere, too: from callers, or from other engines."""
        loads = self.ec_transfer is not None and self.ec_transfer.loads
        return self.encoder is not None and (loads or self.config.multimodal.enable_mm_embeds)

    @property
    def embeds_traffic(self) -> tuple[bool, bool, int] | None:
        """Whether embeddings leave the devices, and come to them, and how many at a time; None: neither."""
        if self.encoder is None or not (self.saves_embeds or self.takes_embeds):
            return None
        return self.saves_embeds, self.takes_embeds, self.encoder.num_copied

    @property
    def token_params(self) -> Any:
        """Shapes of the parameters of programs of tokens: all but the tower's."""
        return self.param_shapes if self.encoder is None else without_tower(self.param_shapes)

    @cached_property
    def lora(self) -> LoraSpec | None:
        """The stacks of adapters; None: the engine takes none. Raises ConfigError for modules that there are not."""
        options = self.config.lora
        if not options.enable_lora:
            return None
        targets, modules = targets_of(self.whole_specs), options.lora_target_modules or None
        with_tower = options.enable_tower_connector_lora
        if with_tower:
            check_tower(self.config, self.encoder)
        check_modules(targets, modules, with_tower)
        if self.stage is not None:
            targets = of_stage(targets, targets_of(self.specs))
        return lora_spec(
            targets,
            self.token_params,
            self.decoder.dim_sizes(),
            self.mesh,
            max_loras=options.max_loras,
            max_rank=options.max_lora_rank,
            dtype=self.dtype if options.lora_dtype == "auto" else jnp.dtype(options.lora_dtype),
            modules=modules,
            with_tower=with_tower,
            prefix=".decoder" if self.draft is not None else "",
            scores=scores_of(self.specs, self.decoder.dim_sizes(), modules) if self.is_last else {},
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device, and of the stacks of adapters."""
        of_adapters = 0 if self.lora is None else self.lora.num_bytes
        return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(self.param_shapes)) + of_adapters

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
            "attention_backend": with_digest(self.attention.backend),
            "recurrence_backend": with_digest(self.attention.recurrence),
            "compiler_options": str(self.compiler_options),
            "speculation": str(self.speculation),
            "draft_model": str(self.draft and self.draft.config),
            "kv_offload": str(self.config.cache.offload and self.page_form),
            "ec_transfer": str(self.embeds_traffic),
            "lora": str(self.lora and self.lora.shapes),
            "encoder": str(self.encoder and (self.encoder.cache_shape, self.encoder.sizes)),
        }
        return fingerprint(self.config, self.model, self.decoder, self.mesh, self.param_shapes, self.custom, resolved)


def with_digest(backend: str) -> str:
    """A backend's name, and of a stranger's what its files are. Raises ConfigError where there are none."""
    return f"{backend} {digests([backend], ())[backend]}" if ":" in backend else backend


def in_eight_bits(
    specs: Sequence[CacheSpec], cache_type: CacheType, skipped: Sequence[str], num_layers: int
) -> list[CacheSpec]:
    """What layers cache, those of the decoder and of what drafts behind them, where the engine has a type of 8 bits.
    `skipped`: numbers of layers, and kinds of them, that keep the model's. Raises ConfigError for what is neither."""
    unknown = {*skipped} - {*LAYER_KINDS} - {str(i) for i in range(num_layers)}
    if unknown:
        raise ConfigError(
            f"kv_cache_dtype_skip_layers names {', '.join(sorted(unknown))}; accepted are numbers of layers, 0 to "
            f"{num_layers - 1}, and {', '.join(LAYER_KINDS)}."
        )

    def of_layer(i: int, spec: CacheSpec) -> CacheSpec:
        if i >= num_layers:
            return spec.cached_as(of_draft(cache_type))
        return spec if str(i) in skipped or spec.kind in skipped else spec.cached_as(cache_type)

    found = [of_layer(i, spec) for i, spec in enumerate(specs)]
    if all(spec.scales == "none" for spec in found):
        kinds = ", ".join(sorted({spec.kind for spec in specs}))
        raise ConfigError(
            f"kv_cache_dtype asks for 8 bits, but no layer is cached so: the model's layers are of {kinds}, and "
            "kv_cache_dtype_skip_layers may name others. Leave it out."
        )
    return found


def engine_specs(
    config: EngineConfig, model: Model, decoder: DecoderConfig, meshes: Sequence[Mesh | AbstractMesh]
) -> list[EngineSpec]:
    """One for each stage; of an engine without stages one for all layers. Raises ConfigError."""
    if len(meshes) > 1 and not decoder.splits_into_stages:
        raise ConfigError(
            f"pipeline_parallel_size is {len(meshes)}, but layers of {decoder.architecture} read or write what others "
            "have cached, so they cannot be cut into stages. Leave the option out."
        )
    stages = deal_layers(decoder.num_layers, len(meshes)) if len(meshes) > 1 else (None,)
    return [EngineSpec(config, model, decoder, *each) for each in zip(meshes, stages, strict=True)]


def whole_kv_cache(engine_spec: EngineSpec, num_blocks: int, scales: HeadScales) -> KVCacheConfig:
    """The cache of all stages as one, whose first pool has `num_blocks`: a block id is a block on each of them."""
    division = Division(engine_spec.whole_groups, engine_spec.demand, engine_spec.num_shards)
    return replace(division.kv_cache(num_blocks), content=content_of(engine_spec, scales))


def content_of(engine_spec: EngineSpec, scales: HeadScales) -> str:
    """Names a type of 8 bits, the layers that have it, and scales; empty where there is none."""
    if not engine_spec.cache_type.is_scaled:
        return ""
    cache = engine_spec.config.cache
    words = [cache.kv_cache_dtype, scales.identity, ",".join(sorted({*cache.kv_cache_dtype_skip_layers}))]
    return " ".join(words).rstrip()

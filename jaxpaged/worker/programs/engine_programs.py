"""The programs of one engine whose KV cache has a size: which of the declared ones it has, and how each is lowered.

This module does not know how programs are kept or called.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from jaxpaged.kv_cache_spec import KVCacheConfig, blocks_for_tokens
from jaxpaged.layers.ranks import of_each_rank
from jaxpaged.messages import ProgramKey
from jaxpaged.sampling.state import StateLayout
from jaxpaged.sampling_params.features import Extra
from jaxpaged.worker.cache.kinds import tensor_struct
from jaxpaged.worker.engine_spec import MIN_BUCKET, EngineSpec
from jaxpaged.worker.kv_transfer.programs import copies_of
from jaxpaged.worker.programs.declare import PROGRAMS, Axis, Program, ProgramKind, When
from jaxpaged.worker.step.encoding import EncodeLayout, encode_layout
from jaxpaged.worker.step.expert_moves import load_structs, parts_to_move
from jaxpaged.worker.step.functions import StepFunctions
from jaxpaged.worker.step.packed import MultiStepLayout, StepLayout, step_layout
from jaxpaged.worker.step.prompt_sums import SumsLayout
from jaxpaged.worker.step.shapes import Shapes

MOST_LOGPROBS = 128
"""Log probabilities and their token ids that a multi-step decode may keep of each token until its end; or masks of so
many bytes."""
SMALL_PROMPT, FEW_REQUESTS = 64, 8
"""Tokens of a prompt, and requests, that must not wait for larger programs."""
NUM_FIRST = 4
"""How many of `EnginePrograms.keys` a lone short prompt and its answer need."""


class Bucket(NamedTuple):
    """A size along an axis, and what a function is told of it. Each KV pool has sizes of its own."""

    size: int
    static: Any = None
    pool_idx: int = 0


class EnginePrograms:
    """The programs of an engine, or of a stage of it."""

    def __init__(self, engine_spec: EngineSpec, kv_cache: KVCacheConfig):
        self.engine_spec, self.kv_cache = engine_spec, kv_cache

    @cached_property
    def layouts(self) -> dict[int, StepLayout]:
        """Forward bucket -> where the parts of its packed array lie."""
        return {size: self.layout(size) for size in self.engine_spec.token_buckets}

    def layout(self, num_tokens: int) -> StepLayout:
        """Of a step with so many tokens."""
        max_num_seqs, backend = self.engine_spec.config.scheduler.max_num_seqs, self.engine_spec.attention.backend
        sizes, slots = self.kv_cache.block_sizes, self.kv_cache.device_slots
        layout = step_layout(num_tokens, max_num_seqs, sizes, backend, slots)
        if (lora := self.engine_spec.lora) is not None:
            layout = replace(layout, has_lora=True, lora_level=lora.num_levels)
        if (encoder := self.engine_spec.encoder) is None:
            return layout
        has_ends, has_offsets = bool(encoder.config.both_ways), encoder.vision.rope_offsets is not None
        return replace(layout, has_visible_ends=has_ends, has_rope_offsets=has_offsets)

    @cached_property
    def encode_layouts(self) -> dict[ProgramKey, EncodeLayout]:
        """The same of encode programs, in an engine that sees."""
        if (encoder := self.engine_spec.encoder) is None:
            return {}
        has_lora = self.engine_spec.lora is not None and bool(self.engine_spec.lora.tower)
        kinds = {ProgramKind.ENCODE: 1}
        if encoder.takes_videos:
            kinds[ProgramKind.ENCODE_VIDEO] = encoder.config.frames
        return {
            ProgramKey(kind, size): encode_layout(encoder, size, frames, has_lora)
            for kind, frames in kinds.items()
            for size in encoder.sizes
        }

    @cached_property
    def multi_step_layouts(self) -> dict[int, MultiStepLayout]:
        """Buckets of multi-step decodes, as far as all requests can fill them: with those of single steps, so that
        a token is computed in the same shapes either way."""
        engine_spec, scheduler = self.engine_spec, self.engine_spec.config.scheduler
        if scheduler.num_scheduler_steps == 1 or engine_spec.stage is not None or engine_spec.pools:
            return {}
        largest = next(size for size in engine_spec.token_buckets if size >= scheduler.max_num_seqs)
        num_lines = lambda layout: next(size for size in engine_spec.sample_buckets if size >= layout.num_rows)
        return {
            size: MultiStepLayout(layout, num_lines(layout), engine_spec.max_steps)
            for size, layout in self.layouts.items()
            if size <= largest
        }

    @cached_property
    def draft_multi_step_layouts(self) -> dict[int, MultiStepLayout]:
        """Buckets of the decode steps of a model or a head that drafts, if one does."""
        engine_spec = self.engine_spec
        if engine_spec.draft is None:
            return {}
        return {
            size: MultiStepLayout(replace(self.layout(size), has_lora=False), size, engine_spec.num_drafts)
            for size in engine_spec.sample_buckets
        }

    @cached_property
    def row_state(self) -> StateLayout | SumsLayout | None:
        """What is kept on the device for each row besides tokens and KV blocks: sampling state, or sums of prompts."""
        engine_spec = self.engine_spec
        if not engine_spec.is_last:
            return None
        if not engine_spec.pools:
            return engine_spec.sampling_layout
        rows = engine_spec.config.scheduler.max_num_seqs
        return SumsLayout(rows, engine_spec.decoder.hidden_size, engine_spec.pooling_type)

    @cached_property
    def functions(self) -> StepFunctions:
        engine_spec, config = self.engine_spec, self.engine_spec.config
        functions = StepFunctions(
            model=engine_spec.model,
            config=engine_spec.decoder,
            attention=engine_spec.attention,
            kv_cache=self.kv_cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_sampled=max(config.scheduler.max_num_seqs, MIN_BUCKET),
            logprobs_mode=config.model.logprobs_mode,
            max_logprobs=min(config.model.max_logprobs, engine_spec.decoder.vocab_size),
            custom=engine_spec.custom,
            limits=engine_spec.limits,
            is_first=engine_spec.stage is None or engine_spec.stage.is_first,
            speculation=engine_spec.speculation,
            pooling_type=engine_spec.pooling_type,
            encoder=engine_spec.encoder,
            lora=engine_spec.lora,
            tells_masks=config.model.return_sampling_mask,
        )
        if (draft := engine_spec.draft) is None:
            return functions
        # Its layers lie behind those of the decoder.
        first = engine_spec.decoder.num_caches
        drafting = replace(functions, model=engine_spec.drafting, config=draft.config, first_layer=first)
        return replace(functions, drafting=drafting)

    @cached_property
    def shapes(self) -> Shapes:
        engine_spec = self.engine_spec
        num_rows = engine_spec.config.scheduler.max_num_seqs + 1
        place = partial(tensor_struct, engine_spec.attention, num_rows=num_rows)
        kv = [place(spec, n, engine_spec.kv_dtype, num_layers=layers) for spec, n, layers in self.kv_cache.tensors]
        kv += load_structs(engine_spec.param_shapes, engine_spec.mesh)
        max_model_len = engine_spec.config.model.max_model_len
        return Shapes(
            self.functions,
            engine_spec.param_shapes,
            kv,
            self.row_state,
            max_blocks=blocks_for_tokens(max_model_len, min(self.kv_cache.block_sizes)),
            max_tokens=engine_spec.token_buckets[-1],
            max_model_len=max_model_len,
        )

    # ---- which there are -----------------------------------------------------------------------------

    @cached_property
    def _declared(self) -> dict[ProgramKey, tuple[Program, Any]]:
        """The declaration of every program, and what its function is told of the bucket. Declarations that follow each
        other on one axis are wanted together, bucket by bucket."""
        own = [program for program in PROGRAMS if program.where(self.engine_spec)]
        found = {}
        for axis, programs in itertools.groupby(own, key=lambda program: program.axis):
            together = list(programs)
            for bucket in self._buckets(axis):
                for program in together:
                    found[program.key(bucket.pool_idx, bucket.size)] = program, bucket.static
        return {key: found[key] for key in (*filter(found.__contains__, self._first), *found)}

    @property
    def _first(self) -> list[ProgramKey]:
        """What a lone short prompt and its answer need, in the order in which it does."""
        tokens, rows = self.engine_spec.token_buckets, self.engine_spec.sample_buckets
        small_prompt = next((size for size in tokens if size >= SMALL_PROMPT), tokens[-1])
        few = next((size for size in rows if size >= FEW_REQUESTS), rows[-1])
        return [
            ProgramKey(ProgramKind.ZEROS),
            ProgramKey(ProgramKind.FORWARD, small_prompt),
            ProgramKey(ProgramKind.ACCUMULATE, small_prompt),
            ProgramKey(ProgramKind.SAMPLE, few),
            ProgramKey(ProgramKind.POOL, few),
            ProgramKey(ProgramKind.FORWARD, tokens[0]),
        ]

    def _buckets(self, axis: Axis) -> Iterable[Bucket]:
        """The sizes of an axis in this engine."""
        layouts, multi_step = self.layouts, self.multi_step_layouts
        match axis:
            case Axis.STATE:
                return [Bucket(0, self.shapes.state)]
            case Axis.ONE:
                return [Bucket(0)]
            case Axis.TOKENS:
                return [Bucket(size, self._alone(layout)) for size, layout in layouts.items()]
            case Axis.SHARED_TOKENS:
                return [Bucket(size, layout) for size, layout in layouts.items() if self._has_two_programs(layout)]
            case Axis.ROWS:
                return [Bucket(size, size) for size in self.engine_spec.sample_buckets]
            case Axis.FULL_MULTI_STEPS | Axis.SHARED_FULL_MULTI_STEPS if self._tells_much:
                return []
            case Axis.MULTI_STEPS | Axis.FULL_MULTI_STEPS:
                return [Bucket(size, replace(each, step=self._alone(each.step))) for size, each in multi_step.items()]
            case Axis.SHARED_MULTI_STEPS | Axis.SHARED_FULL_MULTI_STEPS:
                return [Bucket(size, each) for size, each in multi_step.items() if self._has_two_programs(each.step)]
            case Axis.DRAFT_MULTI_STEPS:
                return [Bucket(size, each) for size, each in self.draft_multi_step_layouts.items()]
            case Axis.PICTURES | Axis.VIDEOS:
                kind = ProgramKind.ENCODE if axis is Axis.PICTURES else ProgramKind.ENCODE_VIDEO
                return [Bucket(key.size, each) for key, each in self.encode_layouts.items() if key.kind == kind]
            case Axis.COPIES:
                return self._copies()
            case Axis.PARTS:
                return [Bucket(i, part) for i, part in enumerate(parts_to_move(self.shapes.params), 1)]

    def _has_two_programs(self, layout: StepLayout) -> bool:
        """Whether steps in which rows share blocks have a program of their own, since one for all would be slower.

        Processes that compute together could choose differently between two, so they have one. So do stages, and
        engines that pool.
        """
        engine_spec = self.engine_spec
        is_alone = engine_spec.stage is None and not engine_spec.has_other_processes and not engine_spec.pools
        return layout.has_two_programs and is_alone

    @property
    def _tells_much(self) -> bool:
        functions = self.functions
        mask_bytes = self.engine_spec.sampling_layout.vocab_size // 8 if functions.tells_masks else 0
        return functions.max_logprobs > MOST_LOGPROBS or mask_bytes > 8 * MOST_LOGPROBS

    def _alone(self, layout: StepLayout) -> StepLayout:
        """The layout of a program that has another one beside it for steps in which rows share blocks."""
        return replace(layout, reads_shared=False) if self._has_two_programs(layout) else layout

    def _copies(self) -> list[Bucket]:
        """Copies of blocks off the devices and back, where the options want them."""
        engine_spec = self.engine_spec
        if engine_spec.config.cache.offload is None:
            return []
        settings = engine_spec.attention.backend, self.functions.replicated, engine_spec.page_form
        copies = copies_of(self.kv_cache, self.shapes.kv, *settings)
        return [Bucket(copy.num_pieces, copy, pool_idx) for pool_idx, copy in copies]

    # ---- when they are needed ------------------------------------------------------------------------

    @property
    def rare(self) -> frozenset[ProgramKey]:
        """Programs that no ordinary request of this engine needs. Where there are custom logits processors, any request
        may need the full sampler. On a CPU text is ordinary, and pictures are not."""
        ordinary = {When.START, When.ONCE_IT_PAYS}
        if self.engine_spec.platform != "cpu":  # there compiling takes the cores that compute
            ordinary.add(Extra.PICTURES)
        if self.engine_spec.custom.processors:
            ordinary.add(Extra.FULL_SAMPLER)
        return frozenset(key for key, (program, _) in self._declared.items() if program.when not in ordinary)

    @property
    def late(self) -> frozenset[ProgramKey]:
        """Programs that are compiled once a step could use them: those that are rare, and those of several steps unless
        an option asks for them."""
        if self.engine_spec.config.scheduler.num_scheduler_steps is not None:
            return self.rare
        pays = (key for key, (program, _) in self._declared.items() if program.when is When.ONCE_IT_PAYS)
        return self.rare.union(pays)

    # ---- how they are lowered ------------------------------------------------------------------------

    def builders(self) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """How to lower every program, in the order in which they are wanted: first what a lone short prompt needs."""
        return {key: partial(self.lower, key) for key in self._declared}

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """A program from the shapes of its arguments: of all attention ranks, from the function of one."""
        program, static = self._declared[key]
        mesh, shapes = self.engine_spec.mesh, self.shapes
        function = program.function(self.functions, static)
        arguments = tuple(shapes.argument(name, static) for name in program.arguments)
        results = tuple(shapes.sharding(name, static) for name in program.results)
        if program.by_rank:
            function = of_each_rank(mesh, function, arguments)
        jitted = jax.jit(
            named(function, program),
            donate_argnums=program.donated,
            out_shardings=results if len(results) > 1 else results[0],
            compiler_options=self.engine_spec.compiler_options.get(program.options or ""),
        )
        return jitted.lower(*arguments)


def named(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """The function under the names that traces and profiles show: those of the declaration."""

    def called(*arguments: Any) -> Any:
        return function(*arguments)

    called.__name__ = called.__qualname__ = str(program.kind)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    called.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in program.arguments])
    return called

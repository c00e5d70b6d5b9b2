"""The programs of an engine whose KV cache has a size: which there are, and how each is lowered.

They follow from an `EngineSpec` and the size of its KV cache. This module does not know how programs are kept or
called.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import jax

from jaxpaged.kv_cache_spec import KVCacheConfig, blocks_for_tokens
from jaxpaged.messages import ProgramKey
from jaxpaged.sampling.state import StateLayout, load_row, load_tokens
from jaxpaged.worker.cache.kinds import tensor_struct
from jaxpaged.worker.drafters.lookup import lookup_builders
from jaxpaged.worker.drafters.model import draft_builders
from jaxpaged.worker.engine_spec import MIN_BUCKET, EngineSpec
from jaxpaged.worker.kv_transfer.programs import copy_builders
from jaxpaged.worker.step.decode_loop import lower_decode
from jaxpaged.worker.step.expert_moves import load_structs, move_builders
from jaxpaged.worker.step.functions import Shapes, StepFunctions
from jaxpaged.worker.step.packed import SHARED, RunLayout, StepLayout, step_layout
from jaxpaged.worker.step.row_uploads import TOKENS_UPLOAD_SIZE
from jaxpaged.worker.step.verify import VERIFY_KINDS, lower_verify

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


class EnginePrograms:
    """The programs of an engine spec whose KV cache has a size."""

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
        return step_layout(num_tokens, max_num_seqs, sizes, backend, slots)

    @cached_property
    def runs(self) -> dict[int, RunLayout]:
        """Buckets of runs of decode steps, as far as all requests can fill them: with those of single steps, so that
        a token is computed in the same shapes either way."""
        engine_spec, scheduler = self.engine_spec, self.engine_spec.config.scheduler
        if scheduler.num_scheduler_steps == 1 or engine_spec.stage is not None:
            return {}
        largest = next(size for size in engine_spec.token_buckets if size >= scheduler.max_num_seqs)
        num_lines = lambda layout: next(size for size in engine_spec.sample_buckets if size >= layout.num_rows)
        return {
            size: RunLayout(layout, num_lines(layout), engine_spec.max_steps)
            for size, layout in self.layouts.items()
            if size <= largest
        }

    @cached_property
    def draft_runs(self) -> dict[int, RunLayout]:
        """Buckets of the decode steps of a model or a head that drafts, if one does."""
        engine_spec = self.engine_spec
        if engine_spec.draft is None:
            return {}
        return {size: RunLayout(self.layout(size), size, engine_spec.num_drafts) for size in engine_spec.sample_buckets}

    @property
    def row_state(self) -> StateLayout:
        """What is kept on the device for each row besides KV blocks."""
        return self.engine_spec.sampling_layout

    @cached_property
    def functions(self) -> StepFunctions:
        engine_spec, config = self.engine_spec, self.engine_spec.config
        return StepFunctions(
            model=engine_spec.model,
            config=engine_spec.decoder,
            attention=engine_spec.attention,
            kv_cache=self.kv_cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_hidden=max(config.scheduler.max_num_seqs, MIN_BUCKET),
            logprobs_mode=config.model.logprobs_mode,
            max_logprobs=min(config.model.max_logprobs, engine_spec.decoder.vocab_size),
            custom=engine_spec.custom,
            limits=engine_spec.limits,
            is_first=engine_spec.stage is None or engine_spec.stage.is_first,
        )

    @property
    def rare_kinds(self) -> frozenset[str]:
        """Kinds of programs that no ordinary request of this engine needs."""
        return RARE_KINDS - CUSTOM_KINDS if self.engine_spec.custom.processors else RARE_KINDS

    shapes_type = Shapes

    @cached_property
    def shapes(self) -> Shapes:
        engine_spec, sizes = self.engine_spec, self.kv_cache.block_sizes
        num_rows = engine_spec.config.scheduler.max_num_seqs + 1
        kv = [
            tensor_struct(engine_spec.attention, *each, engine_spec.kv_dtype, num_rows=num_rows)
            for each in self.kv_cache.tensors
        ]
        kv += load_structs(engine_spec.param_shapes, engine_spec.mesh)
        max_blocks = blocks_for_tokens(engine_spec.config.model.max_model_len, min(sizes))
        max_tokens = engine_spec.token_buckets[-1]
        rows = (kv, self.row_state, max_blocks, max_tokens)
        return self.shapes_type(
            self.functions,
            engine_spec.param_shapes,
            *rows,
            engine_spec.compiler_options,
            engine_spec.config.model.max_model_len,
            engine_spec.speculation,
        )

    def builders(self) -> Builders:
        """How to lower every program, in the order in which they are wanted.

        First what a lone short prompt needs, then the other forward buckets, then what fewer requests use. Which of
        them are compiled at the start, and which on demand, is decided elsewhere.
        """
        shapes, engine_spec = self.shapes, self.engine_spec
        token_buckets, sample_buckets = engine_spec.token_buckets, engine_spec.sample_buckets
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
        builders[ProgramKey("load_row")] = partial(shapes.lower_load, load_row, engine_spec.sampling_layout.packed_size)
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
        engine_spec = self.engine_spec
        if not layout.has_two_programs or engine_spec.stage is not None or engine_spec.has_other_processes:
            return {ProgramKey(kind, size): partial(lower, layout)}
        alone = partial(lower, replace(layout, reads_shared=False))
        return {ProgramKey(kind, size): alone, ProgramKey(kind + SHARED, size): partial(lower, layout)}

    def _copy_builders(self) -> Builders:
        """Copies of blocks off the devices and back, where the options want them."""
        offload, backend = self.engine_spec.config.cache.offload, self.engine_spec.attention.backend
        args = self.kv_cache, self.shapes.kv, backend, self.functions.replicated, self.engine_spec.page_form
        return {} if offload is None else copy_builders(*args)

    def _draft_builders(self) -> Builders:
        """What drafts and what verifies, if anything does."""
        speculation, sizes = self.engine_spec.speculation, self.engine_spec.sample_buckets
        if speculation is None:
            return {}
        if self.engine_spec.draft is None:
            builders: Builders = lookup_builders(self.shapes, speculation, sizes)
        else:
            builders = draft_builders(
                self.shapes, self.engine_spec.drafting, self.engine_spec.draft.config, self.draft_runs
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

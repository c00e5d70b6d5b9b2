"""The programs of a pooling engine, with `pool` in place of `sample`, and the output stage that calls them.

    forward[T]     as it is
    accumulate[T]  hidden, sums, packed -> sums, hidden of the prompts that are complete; not for LAST
    pool[S]        head, hidden of the prompts that are complete -> float32 vectors or scores

A prompt may take several steps, so what its tokens add up to stays on the device, a float32 line per row. The last
token needs no such sum. This module does not know which requests there are, nor what becomes of the vectors.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.messages import ModelRunnerOutput, NewRequestData, ProgramKey
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.model_runner import StageOutput, Step
from jaxpaged.worker.programs.engine_programs import SMALL_PROMPT, Builders, EnginePrograms
from jaxpaged.worker.programs.pipeline import EarlierPrograms
from jaxpaged.worker.step.expert_moves import move_builders
from jaxpaged.worker.step.functions import Shapes, locate_places
from jaxpaged.worker.step.packed import RunLayout, StepLayout


@dataclass(frozen=True)
class SumsLayout:
    """The sums of all rows, in the place of sampling state. LAST keeps none."""

    max_num_seqs: int
    hidden_size: int
    pooling_type: str

    def abstract(self) -> jax.ShapeDtypeStruct | None:
        if self.pooling_type == "LAST":
            return None
        return jax.ShapeDtypeStruct((self.max_num_seqs + 1, self.hidden_size), jnp.float32)


def accumulate(
    layout: StepLayout, num_hidden: int, pooling_type: str, hidden_LD: Any, sums_RD: Any, packed: Any
) -> tuple[Any, Any]:
    """Add a step's hidden states to the sums of their rows -> (sums_RD, pooled_SD of the requests that sample).

    MEAN adds all tokens and divides by their number, CLS adds the first one alone. A row whose request begins in this
    step begins at zero, whatever it held. Sums are taken token by token, so a request's NaN stays its own.
    """
    parts, hidden_TD = layout.split(packed), hidden_LD[: layout.num_tokens]
    seq_T, positions_T, is_padding_T = locate_places(layout, parts)
    counts_T = ~is_padding_T if pooling_type == "MEAN" else ~is_padding_T & (positions_T == 0)
    values_TD = jnp.where(counts_T[:, None], hidden_TD.astype(jnp.float32), 0.0)
    new_SD = jax.ops.segment_sum(values_TD, seq_T, layout.num_rows, indices_are_sorted=True)
    starts_S = parts.query_start_loc_R1
    num_before_S = parts.seq_lens_R - (starts_S[1:] - starts_S[:-1])
    totals_SD = jnp.where(num_before_S[:, None] > 0, sums_RD[parts.rows_R], 0.0) + new_SD
    done_S = seq_T[parts.sample_idxs_R]
    divisors_S = parts.seq_lens_R[done_S] if pooling_type == "MEAN" else jnp.ones_like(done_S)
    pooled_SD = totals_SD[done_S] / jnp.maximum(divisors_S, 1)[:, None].astype(jnp.float32)
    return (
        sums_RD.at[parts.rows_R].set(totals_SD),
        jnp.pad(pooled_SD, ((0, num_hidden - layout.num_rows), (0, 0))),
    )


class PoolingShapes(Shapes):
    """Shapes of what the two programs take; `sampling` are the sums, or None."""

    def lower_accumulate(self, layout: StepLayout, pooling_type: str) -> jax.stages.Lowered:
        def accumulate_step(hidden, sums, packed):
            return accumulate(layout, self.functions.num_hidden, pooling_type, hidden, sums, packed)

        return self.lower(accumulate_step, (self.all_hidden, self.sampling, self.packed(layout.size)), donated=(1,))

    def lower_pool(self, size: int) -> jax.stages.Lowered:
        f = self.functions
        hidden = self.hidden(f.num_hidden)
        if self.sampling is not None:
            hidden = self._array((f.num_hidden, f.config.hidden_size), jnp.float32)

        def pool(head, hidden):
            return f.model.compute_logits(head, f.config, hidden[:size])

        return self.lower(pool, (self.head, hidden))


def programs_for(engine_spec: EngineSpec, kv_cache: KVCacheConfig) -> EnginePrograms:
    """The programs of the engine that a spec describes, whether it generates or pools, or of a stage of it."""
    if engine_spec.stage is not None and not engine_spec.stage.is_last:
        return EarlierPrograms(engine_spec, kv_cache)
    pools = engine_spec.config.model.runner == "pooling"
    return (PoolingPrograms if pools else EnginePrograms)(engine_spec, kv_cache)


class PoolingPrograms(EnginePrograms):
    """The programs of a pooling engine whose KV cache has a size."""

    shapes_type = PoolingShapes

    @cached_property
    def runs(self) -> dict[int, RunLayout]:
        """None: nothing is generated."""
        return {}

    @property
    def pooling_type(self) -> str:
        return self.engine_spec.config.model.pooler_config["pooling_type"]

    @cached_property
    def row_state(self) -> SumsLayout:
        """What is kept of prompts that take several steps."""
        rows = self.engine_spec.config.scheduler.max_num_seqs
        return SumsLayout(rows, self.engine_spec.decoder.hidden_size, self.pooling_type)

    def builders(self) -> Builders:
        """How to lower every program, in the order in which they are wanted: first those of a short prompt."""
        shapes, engine_spec = self.shapes, self.engine_spec
        builders: Builders = {ProgramKey("zeros"): shapes.lower_zeros}
        small_prompt = next((size for size in engine_spec.token_buckets if size >= SMALL_PROMPT), None)
        pools = {ProgramKey("pool", size): partial(shapes.lower_pool, size) for size in engine_spec.sample_buckets}
        for size in sorted(engine_spec.token_buckets, key=lambda size: (size != small_prompt, size)):
            builders[ProgramKey("forward", size)] = partial(shapes.lower_forward, self.layouts[size])
            if self.pooling_type != "LAST":
                accumulating = partial(shapes.lower_accumulate, self.layouts[size], self.pooling_type)
                builders[ProgramKey("accumulate", size)] = accumulating
            builders |= pools
        builders[ProgramKey("tables")] = shapes.lower_tables
        return builders | move_builders(shapes)


NOT_NUMBERS = "its hidden states are not finite numbers"


class Pooler:
    """The output stage of an engine that pools. A prompt that is complete gives its vector, not a token. Which tokens
    count is compiled into the programs.

    `DeviceState.row_state` holds the sums of rows whose prompt takes several steps; None where there are none.
    """

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """Sums begin at zero where a prompt begins."""

    def dispatch(self, device: Device, step: Step, masks_NW: np.ndarray | None = None) -> StageOutput:
        assert masks_NW is None, "nothing is drawn in an engine that pools"
        key, state, hidden_SD = step.scheduled.programs.finish, device.state, step.hidden_SD
        if state.row_state is not None:
            accumulate = ProgramKey("accumulate", step.program.size)
            state.row_state, hidden_SD = device.call(accumulate, state.hidden, state.row_state, step.packed)
        if key is None:
            return StageOutput()
        ids_of_ranks = [rank.sampling()[0] for rank in step.ranks]
        pooled = PooledLines(ids_of_ranks, start_copy(device.call(key, device.head, hidden_SD)))
        return StageOutput([pooled], len(step.ranks) * key.size)


@dataclass
class PooledLines:
    """`pooled` is `[S, ...]`; the requests are the first lines. So it is for each attention rank, in turn."""

    ids_of_ranks: Sequence[list[str]]
    pooled: Any

    def read(self, output: ModelRunnerOutput) -> None:
        of_ranks = np.split(np.asarray(self.pooled), len(self.ids_of_ranks))
        output.request_ids = list(itertools.chain.from_iterable(self.ids_of_ranks))
        output.pooled = np.concatenate([lines[: len(ids)] for lines, ids in zip(of_ranks, self.ids_of_ranks)])
        is_finite = np.isfinite(output.pooled).all(axis=1)
        output.corrupted = [output.request_ids[i] for i in np.flatnonzero(~is_finite)]
        output.failed.update(dict.fromkeys(output.corrupted, NOT_NUMBERS))

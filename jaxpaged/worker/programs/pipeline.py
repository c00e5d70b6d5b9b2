"""The programs of an engine whose layers are dealt to stages, each on devices of its own: one program a stage, called
as if they were one.

    forward[T]   on each stage what its layers make of the tokens, which the next one takes
    sample[S]    on the last stage; the newest tokens of all rows go back to the first one

Nothing waits for anything on the host: what a stage gives is sent to the next by a copy between devices. So the stages
are all busy, in different steps, where these have different requests (`core/rank.py`): the first stage begins a step
as soon as the tokens are there that this one's requests drew last, whatever later steps draw.

A stage has its layers' keys and values, and its own copy of block tables and of where rows are, which follow from the
steps alike. `DeviceState` has tuples of these, one entry a stage. This module does not know what layers do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxpaged.messages import ProgramKey
from jaxpaged.sampling.rows import ROW
from jaxpaged.worker.programs.engine_programs import MASKED_KIND, Builders, EnginePrograms
from jaxpaged.worker.step.functions import RowTokens, Shapes, write_tables
from jaxpaged.worker.step.packed import StepLayout

SAMPLE_KINDS = frozenset({"sample", "sample_full", MASKED_KIND})
"""Programs that draw tokens."""


@struct.dataclass
class StagedRows:
    """`RowTokens` of every stage. The last one's have the newest tokens; `drawn` are copies on the first stage, which
    reads them, after each of the last few steps that drew, the oldest first. `drew`: the rows that did in these."""

    stages: tuple[RowTokens, ...]
    drawn: tuple[jax.Array, ...]
    drew: tuple[frozenset[int], ...] = struct.field(pytree_node=False)

    def tokens_for(self, rows: frozenset[int]) -> jax.Array:
        """Tokens of all rows, of which those of `rows` are the newest; no later than must be, since a copy is there
        only when its step is done."""
        newest = max((i for i, drew in enumerate(self.drew) if not drew.isdisjoint(rows)), default=0)
        return self.drawn[newest]

    def after(self, last: RowTokens, drawn: jax.Array, drew: frozenset[int]) -> "StagedRows":
        """Once a step has drawn tokens. What is forgotten is older than every step that has not drawn yet."""
        kept = slice(-len(self.stages), None)
        return StagedRows((*self.stages[:-1], last), (*self.drawn[kept], drawn), (*self.drew[kept], drew))


class NoRowState:
    """In the place of sampling state, on stages that draw nothing."""

    def abstract(self) -> None:
        return None


class EarlierShapes(Shapes):
    """Shapes of what a stage takes that is not the last one."""

    @property
    def state(self) -> tuple[Any, ...]:
        return self.kv, self.tables, self.rows

    def lower_forward(self, layout: StepLayout) -> jax.stages.Lowered:
        """One more argument than the last stage's: what the stage before made of the tokens, or, of the first one, the
        newest tokens of all rows."""
        f, whole = self.functions, self.functions.replicated

        def forward(params: Any, kv: Any, tables: Any, rows: RowTokens, packed: Any, given: Any) -> tuple[Any, ...]:
            parts = layout.split(packed)
            tables = write_tables(tables, parts.table_place_U, parts.table_idx_U, parts.table_block_U)
            if f.is_first:
                rows, given = rows._replace(last_token_R=given), None
            stream_TD, kv, rows = f.hidden_states(layout, params, kv, tables, rows, parts, stream_TD=given)
            return kv, tables, rows, stream_TD

        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.kv)
        step = jax.jit(
            forward,
            donate_argnames=("kv", "tables", "rows"),
            out_shardings=(shardings, whole, whole, whole),
            compiler_options=self.options.get("forward"),
        )
        given = self.rows.last_token_R if f.is_first else self.hidden(layout.num_tokens)
        return step.lower(self.params, *self.state, self.packed(layout.size), given)


class EarlierPrograms(EnginePrograms):
    """The programs of a stage that is not the last one."""

    shapes_type = EarlierShapes

    @property
    def row_state(self) -> Any:
        return NoRowState()


@dataclass(frozen=True)
class LoweredStages:
    """A program of every stage, which `join` makes one of once they are compiled."""

    stages: Sequence[jax.stages.Lowered]
    join: Callable[[Sequence[Any]], Callable[..., Any]]

    def compile(self) -> Callable[..., Any]:
        return self.join([each.compile() for each in self.stages])


def builders_of(stages: Sequence[EnginePrograms]) -> Builders:
    """The builders of an engine, whether it has stages or one part."""
    return Pipeline(stages).builders() if len(stages) > 1 else stages[0].builders()


def lowered_stages(
    lowered: LoweredStages | jax.stages.Lowered, num_stages: int
) -> Sequence[tuple[int, jax.stages.Lowered]]:
    """What a builder of these made, by stage: of a program that one stage alone has, the last one's."""
    parts = lowered.stages if isinstance(lowered, LoweredStages) else [lowered]
    return list(enumerate(parts, start=num_stages - len(parts)))


class Pipeline:
    """The builders of an engine, from the programs of its stages, the last one's behind the others'."""

    def __init__(self, stages: Sequence[EnginePrograms]):
        self.shapes = [each.shapes for each in stages]
        self.places: list[NamedSharding] = [each.functions.replicated for each in stages]
        self._last = stages[-1]

    def builders(self) -> Builders:
        """Those of the last stage, with those of the others where these take part."""
        return {key: self._joined(key, build) for key, build in self._last.builders().items()}

    def _joined(self, key: ProgramKey, build: Callable[[], Any]) -> Callable[[], Any]:
        if key.kind == "forward":
            layout = self._last.layouts[key.size]
            return partial(self._lower, methodcaller("lower_forward", layout), partial(self._forward, layout))
        if key.kind == "zeros":
            return partial(self._lower, methodcaller("lower_zeros"), self._zeros)
        if key.kind == "tables":
            return partial(self._lower, methodcaller("lower_tables"), self._tables)
        if key.kind in SAMPLE_KINDS:
            return lambda: LoweredStages([build()], self._sample)
        return build

    def _lower(self, lower: Callable[[Shapes], jax.stages.Lowered], join: Callable[..., Any]) -> LoweredStages:
        return LoweredStages([lower(shapes) for shapes in self.shapes], join)

    def _forward(self, layout: StepLayout, programs: Sequence[Any]) -> Callable[..., Any]:
        def forward(params, kv, tables, rows, hidden, packed):
            given = rows.tokens_for(rows_that_drew(layout, packed))
            changed = []
            for i, program in enumerate(programs[:-1]):
                *state, given = program(params[i], kv[i], tables[i], rows.stages[i], packed, given)
                changed.append(state)
                given = jax.device_put(given, self.places[i + 1])
            own = params[-1], kv[-1], tables[-1], rows.stages[-1]
            *state, hidden, hidden_SD = programs[-1](*own, hidden, packed, given)
            kv, tables, stages = zip(*changed, state, strict=True)
            return kv, tables, rows.replace(stages=stages), hidden, hidden_SD

        return forward

    def _sample(self, programs: Sequence[Any]) -> Callable[..., Any]:
        def sample(head, hidden, rows, sampling, packed, *masks):
            last, *results = programs[0](head, hidden, rows.stages[-1], sampling, packed, *masks)
            drew = frozenset(packed.view(np.int32)[:, ROW].tolist())
            return rows.after(last, jax.device_put(last.last_token_R, self.places[0]), drew), *results

        return sample

    def _zeros(self, programs: Sequence[Any]) -> Callable[..., Any]:
        def zeros():
            *earlier, (*own, sampling, hidden) = [program() for program in programs]
            kv, tables, stages = zip(*earlier, own, strict=True)
            drawn = jax.device_put(stages[-1].last_token_R, self.places[0])
            return kv, tables, StagedRows(stages, (drawn,), (frozenset(),)), sampling, hidden

        return zeros

    def _tables(self, programs: Sequence[Any]) -> Callable[..., Any]:
        def write(tables, packed):
            return tuple(program(own, packed) for program, own in zip(programs, tables, strict=True))

        return write


def rows_that_drew(layout: StepLayout, packed: np.ndarray) -> frozenset[int]:
    """The rows of a step whose next token the host does not know."""
    parts = layout.split(packed)
    return frozenset(parts.rows_R[parts.seq_lens_R < 0].tolist())

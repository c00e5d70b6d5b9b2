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
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxpaged.messages import ProgramKey
from jaxpaged.sampling.rows import ROW
from jaxpaged.worker.programs.declare import SAMPLE_KINDS, ProgramKind
from jaxpaged.worker.programs.engine_programs import EnginePrograms
from jaxpaged.worker.step.packed import StepLayout
from jaxpaged.worker.step.row_tokens import RowTokens


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


@dataclass(frozen=True)
class LoweredStages:
    """A program of every stage, which `join` makes one of once they are compiled."""

    stages: Sequence[jax.stages.Lowered]
    join: Callable[[Sequence[Any]], Callable[..., Any]]

    def compile(self) -> Callable[..., Any]:
        return self.join([each.compile() for each in self.stages])


def builders_of(stages: Sequence[EnginePrograms]) -> dict[ProgramKey, Callable[[], Any]]:
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
        self._stages = stages
        self.places: list[NamedSharding] = [each.functions.replicated for each in stages]

    def builders(self) -> dict[ProgramKey, Callable[[], Any]]:
        """Those of the last stage, with those of the others where these take part."""
        return {key: self._joined(key, build) for key, build in self._stages[-1].builders().items()}

    def _joined(self, key: ProgramKey, build: Callable[[], Any]) -> Callable[[], Any]:
        of_all = lambda join: partial(self._lower, key, join)
        match key.kind:
            case ProgramKind.FORWARD:
                return of_all(partial(self._forward, self._stages[-1].layouts[key.size]))
            case ProgramKind.LORA_ZEROS:
                return of_all(lambda programs: lambda: tuple(program() for program in programs))
            case ProgramKind.LOAD_LORA:
                return of_all(self._load_lora)
            case ProgramKind.ZEROS:
                return of_all(self._zeros)
            case ProgramKind.TABLES:
                return of_all(self._tables)
            case kind if kind in SAMPLE_KINDS:
                return lambda: LoweredStages([build()], self._sample)
        return build

    def _lower(self, key: ProgramKey, join: Callable[..., Any]) -> LoweredStages:
        return LoweredStages([stage.lower(key) for stage in self._stages], join)

    def _forward(self, layout: StepLayout, programs: Sequence[Any]) -> Callable[..., Any]:
        def forward(params, kv, tables, rows, hidden, packed):
            given = rows.tokens_for(rows_that_drew(layout, packed))
            changed = []
            for i, program in enumerate(programs[:-1]):
                *state, given = program(params[i], kv[i], tables[i], rows.stages[i], packed, given)
                changed.append(state)
                given = jax.device_put(given, self.places[i + 1])
            own = params[-1], kv[-1], tables[-1], rows.stages[-1]
            *state, hidden, sampled_SD, experts = programs[-1](*own, hidden, packed, given)
            kv, tables, stages = zip(*changed, state, strict=True)
            return kv, tables, rows.replace(stages=stages), hidden, sampled_SD, experts

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

    def _load_lora(self, programs: Sequence[Any]) -> Callable[..., Any]:
        def load(stacks, uploads, slot):
            each = zip(programs, stacks, uploads, strict=True)
            return tuple(program(own, upload, slot) for program, own, upload in each)

        return load


def rows_that_drew(layout: StepLayout, packed: np.ndarray) -> frozenset[int]:
    """The rows of a step whose next token the host does not know."""
    parts = layout.split(packed)
    return frozenset(parts.rows_R[parts.seq_lens_R < 0].tolist())

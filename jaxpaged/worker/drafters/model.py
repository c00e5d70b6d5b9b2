"""Drafts by a model or a head: a run of its decode steps (`step/decode_loop.py`), in one program.

    draft[S]: params, state, packed, lines -> state, drafts

Its layers lie behind those of the decoder, and each pass over tokens of a request is one of both
(`models/drafted.py`): so drafting begins with the newest token, and needs no catching up. What it writes into the
cache lies at places of the newest token and of the drafts behind it, which the step that verifies writes again.

A row drafts as it draws: with its temperature, limits, seed and positions. A draft is accepted where it is what the
decoder draws, and two models of nearly the same probabilities mostly draw the same with the same noise.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.messages import NewRequestData, ProgramKey
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.sampling.rows import NUM_COLUMNS
from jaxpaged.worker.device import Device
from jaxpaged.worker.model_runner import DRAFT_KIND, DraftRequest
from jaxpaged.worker.request_rows import NUM_STOP_IDS
from jaxpaged.worker.step.decode_loop import decode
from jaxpaged.worker.step.functions import NOTHING, Shapes, StepFunctions
from jaxpaged.worker.step.input_batch import run_lines
from jaxpaged.worker.step.packed import RunLayout, StepLayout
from jaxpaged.worker.step.sampler import Sampler


def draft(
    functions: StepFunctions, layout: RunLayout, params: Any, state: tuple[Any, ...], packed: Any, lines_SC: Any
) -> tuple[tuple[Any, ...], Any]:
    """(The device state (kv, tables, rows) with drafts for the rows of a step, these drafts_SK). `functions` are those
    of what drafts (`drafting_model`), and `params` the parameters of both."""
    kv, tables, rows = state
    head = functions.model.head(params)
    own = rows._replace(drafts_RK=None)
    run, tables = decode(functions, layout, params, head, kv, tables, own, None, packed, lines_SC)
    row_S = layout.step.split(packed).rows_R
    drafts_SK = jnp.where(run.tokens_IR < 0, NOTHING, run.tokens_IR).T
    return (run.kv, tables, rows._replace(drafts_RK=rows.drafts_RK.at[row_S].set(drafts_SK))), drafts_SK


def lower_draft(shapes: Shapes, functions: StepFunctions, layout: RunLayout) -> jax.stages.Lowered:
    """The program of a bucket. `functions` as in `draft`."""

    def draft_step(params, state, packed, lines):
        return draft(functions, layout, params, state, packed, lines)

    state = (shapes.kv, shapes.tables, shapes.rows)
    program = jax.jit(
        draft_step,
        donate_argnames=("state",),
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), functions.replicated),
        compiler_options=shapes.options.get(DRAFT_KIND),
    )
    lines = shapes.packed(layout.num_lines, NUM_COLUMNS + 1 + NUM_STOP_IDS)
    return program.lower(shapes.params, state, shapes.packed(layout.step.size), lines)


def draft_builders(
    shapes: Shapes, model: Model, config: DecoderConfig, layouts: Mapping[int, RunLayout]
) -> dict[ProgramKey, Any]:
    """How to lower the program of every bucket. `model` drafts (`drafting_model`), and its layers, which `config`
    describes, lie behind the decoder's."""
    functions = replace(shapes.functions, model=model, config=config, first_layer=shapes.functions.config.num_layers)
    return {
        ProgramKey(DRAFT_KIND, size): partial(lower_draft, shapes, functions, each) for size, each in layouts.items()
    }


class ModelDrafter:
    """Dispatches the programs above; the drafts stay on the device. `sampler` knows how its rows draw."""

    def __init__(self, sampler: Sampler, runs: Mapping[int, RunLayout]):
        self._sampler = sampler
        self.layouts: Mapping[int, StepLayout] = {size: run.step for size, run in runs.items()}

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """The step's own pass computes the prompt."""

    def propose(self, device: Device, key: ProgramKey, draft: DraftRequest, packed: np.ndarray | None) -> Any:
        rows, state = draft.newest.rows, device.state
        lines_SF, stop_ids_RJ = self._sampler.lines([rows], key.size), self._sampler.ranks[0].stop_ids_RJ[rows]
        (state.kv, state.tables, state.rows), drafts_SK = device.call(
            key,
            device.params,
            (state.kv, state.tables, state.rows),
            packed,
            run_lines(lines_SF, draft.num_drafts, stop_ids_RJ),
        )
        return drafts_SK

    def release(self, device: Device, row: int, num_prompt_tokens: int) -> None:
        """Nothing is kept of a row."""

"""The functions of programs that run several decode steps, with the sampled tokens feeding the next step.

`packed` and `lines` are those of a single step that decodes, the first of them; the lines say besides when rows end.
A row that samples one of its stop ids, or whose logits are not numbers, computes nothing more; the loop ends with the
last row of all attention ranks, none of which can compute without the others. The host decides what ends a request:
rows stop here only so that less is computed in vain, and a stop id that did not fit into the row costs time, not
correctness.

No row has more than one token in a step, so attention has nothing in it for prompts. Two layers of a 1B Llama and all
that is around them, 32 rows on a v6e: 0.64 million estimated cycles with that, and 0.58 without; 29 kernels and 21. So
a single step in which all decode takes such a program too (`worker/programs/choose.py`), once there have been many. A
token's place is not its row's, since rows end: hidden states of one step are gathered once, which costs nothing that
shows.

A program of at most one step has no loop. On a GPU it is one graph of launches, in which nothing waits for the host; of
a loop the host reads the condition in each turn. There a step is dispatched while the one before it is computed, so
that several steps in one program save nothing.

The steps are those of `StepFunctions`, and so are their tokens. This module knows nothing of why they are so
many.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpaged.layers.lora import SlottedLines
from jaxpaged.layers.ranks import of_any_rank
from jaxpaged.sampling.rows import NUM_COLUMNS, lines_of_active
from jaxpaged.worker.step.adapters import without_adapters
from jaxpaged.worker.step.functions import StepFunctions, write_tables
from jaxpaged.worker.step.packed import MultiStepLayout, StepParts
from jaxpaged.worker.step.row_tokens import NOT_COMPUTED, NOTHING, RowTokens


class MultiStepState(NamedTuple):
    """What the loop carries from step to step.

    `limit_R` is the number of the step from which on a row computes nothing; `goes_on`: not all rows, of any attention
    rank, are as far. `logprobs` is None in the plain program. `expert_IRLJ`: the experts of the computed
    tokens, if they are told.
    """

    step: Any
    goes_on: Any
    limit_R: Any
    kv: Any
    rows: RowTokens
    sampling: Any
    tokens_IR: Any
    logprobs: Any
    expert_IRLJ: Any


class Ends(NamedTuple):
    """Behind the columns of `SamplingRows.pack`: when a row ends at the latest, and tokens that end it, -1 for none."""

    lines_SF: Any
    limit_R: Any
    stop_ids_RJ: Any


def decode_steps(
    functions: StepFunctions,
    layout: MultiStepLayout,
    params: Any,
    head: Any,
    kv: Any,
    tables_GRM: Any,
    rows: RowTokens,
    sampling: Any,
    packed: Any,
    lines_SC: Any,
) -> tuple[MultiStepState, Any]:
    """All steps -> (the state that the last one left, tables_GRM). `sampling` None: the plain sampler.

    `tokens_IR` is `[max_steps, R]`, and so are the log probabilities; I is the number of the step.
    """
    parts, num_rows = layout.step.split(packed), layout.step.num_rows
    ends = Ends(lines_SC[:, :NUM_COLUMNS], lines_SC[:num_rows, NUM_COLUMNS], lines_SC[:num_rows, NUM_COLUMNS + 1 :])
    tables_GRM = write_tables(tables_GRM, parts.table_place_U, parts.table_idx_U, parts.table_block_U)
    token_ids_R, newest_R = parts.token_ids_T[:num_rows], rows.last_token_R[parts.rows_R]
    own_R, known_R = rows.num_computed_R[parts.rows_R], token_ids_R >= 0
    rows = rows._replace(
        last_token_R=rows.last_token_R.at[parts.rows_R].set(jnp.where(known_R, token_ids_R, newest_R)),
        num_computed_R=rows.num_computed_R.at[parts.rows_R].set(
            jnp.where(parts.seq_lens_R < 0, own_R, parts.seq_lens_R - 1)
        ),
    )
    ended_R = ~known_R & is_stop(newest_R, ends.stop_ids_RJ)

    def one_step(state: MultiStepState) -> MultiStepState:
        return decode_step(functions, layout, params, head, tables_GRM, parts, ends, state)

    limit_R = jnp.where(ended_R, 0, ends.limit_R)
    first = MultiStepState(
        step=jnp.int32(0),
        goes_on=of_any_rank(functions.attention.mesh, jnp.any(limit_R > 0)),
        limit_R=limit_R,
        kv=kv,
        rows=rows,
        sampling=sampling,
        tokens_IR=jnp.full((layout.max_steps, num_rows), NOT_COMPUTED, jnp.int32),
        logprobs=functions.no_logprobs(sampling, layout.max_steps, num_rows),
        expert_IRLJ=functions.no_experts(layout.max_steps, num_rows),
    )
    if layout.max_steps == 1:
        return one_step(first), tables_GRM
    return jax.lax.while_loop(lambda state: state.goes_on, one_step, first), tables_GRM


def decode_step(
    functions: StepFunctions,
    layout: MultiStepLayout,
    params: Any,
    head: Any,
    tables_GRM: Any,
    parts: StepParts,
    ends: Ends,
    state: MultiStepState,
) -> MultiStepState:
    """One token of every row that has not ended: those rows' tokens lie one after the other, as in a single step."""
    active_R = state.step < state.limit_R
    step_parts = parts_of_step(layout, parts, active_R)
    hidden_TD, kv, rows, expert_TLJ = functions.hidden_states(
        layout.step, params, state.kv, tables_GRM, state.rows, step_parts, decodes_only=True
    )
    num_rows, num_lines = layout.step.num_rows, layout.num_lines
    if functions.marks_lines and layout.step.lora_level:
        hidden_TD = SlottedLines(hidden_TD, functions.slots_of_tokens(layout.step, step_parts))
    hidden_SD = functions.lines_of(hidden_TD, step_parts.sample_idxs_R, num_lines)
    active_S = jnp.pad(active_R, (0, num_lines - num_rows))
    lines_SF = lines_of_active(ends.lines_SF, active_S, functions.max_num_seqs)
    logits_SV = functions.logits(head, hidden_SD, layout.step.lora_level)
    rows, tokens_S, sampling, lines = functions.draw(logits_SV, rows, state.sampling, lines_SF)
    logprobs = jax.tree.map(lambda kept, new: kept.at[state.step].set(new[:num_rows]), state.logprobs, lines)
    tokens_R = tokens_S[:num_rows]
    ended_R = (tokens_R < 0) | is_stop(tokens_R, ends.stop_ids_RJ)
    limit_R = jnp.where(active_R & ended_R, state.step + 1, state.limit_R)
    return MultiStepState(
        step=state.step + 1,
        goes_on=of_any_rank(functions.attention.mesh, jnp.any(state.step + 1 < limit_R)),
        limit_R=limit_R,
        kv=kv,
        rows=rows,
        sampling=sampling,
        tokens_IR=state.tokens_IR.at[state.step].set(jnp.where(active_R, tokens_R, NOT_COMPUTED)),
        logprobs=logprobs,
        expert_IRLJ=jax.tree.map(
            lambda kept, new: kept.at[state.step].set(new[step_parts.sample_idxs_R]), state.expert_IRLJ, expert_TLJ
        ),
    )


def decode(
    functions: StepFunctions,
    layout: MultiStepLayout,
    params: Any,
    head: Any,
    kv: Any,
    tables_GRM: Any,
    rows: RowTokens,
    sampling: Any,
    packed: Any,
    lines_SC: Any,
) -> tuple[Any, ...]:
    """All steps -> (kv, tables_GRM, rows, sampling state, tokens_IR, log probabilities, expert_IRLJ)."""
    state, tables_GRM = decode_steps(functions, layout, params, head, kv, tables_GRM, rows, sampling, packed, lines_SC)
    return state.kv, tables_GRM, state.rows, state.sampling, state.tokens_IR, state.logprobs, state.expert_IRLJ


def draft(
    functions: StepFunctions,
    layout: MultiStepLayout,
    params: Any,
    kv: Any,
    tables_GRM: Any,
    rows: RowTokens,
    packed: Any,
    lines_SC: Any,
) -> tuple[Any, ...]:
    """Decode steps of a model or a head that drafts, from the newest tokens on -> (kv, tables_GRM, rows with drafts,
    these drafts_SK). `functions` are those of what drafts, and `params` the parameters of both models."""
    params = without_adapters(params)
    head, own = functions.model.head(params), rows._replace(drafts_RK=None)
    state, tables_GRM = decode_steps(functions, layout, params, head, kv, tables_GRM, own, None, packed, lines_SC)
    row_S = layout.step.split(packed).rows_R
    drafts_SK = jnp.where(state.tokens_IR < 0, NOTHING, state.tokens_IR).T
    return state.kv, tables_GRM, rows._replace(drafts_RK=rows.drafts_RK.at[row_S].set(drafts_SK)), drafts_SK


def is_stop(tokens_R: Any, stop_ids_RJ: Any) -> Any:
    return jnp.any(tokens_R[:, None] == stop_ids_RJ, axis=1)


def parts_of_step(layout: MultiStepLayout, parts: StepParts, active_R: Any) -> StepParts:
    """One of the steps in the terms of a single one: rows that have ended have no token in it."""
    ends_R = jnp.cumsum(active_R.astype(jnp.int32))
    parts = parts._replace(
        query_start_loc_R1=jnp.pad(ends_R, (1, 0)),
        seq_lens_R=jnp.where(parts.seq_lens_R != 0, -1, 0),
        token_ids_T=jnp.full(layout.step.num_tokens, -1, jnp.int32),
        sample_idxs_R=jnp.maximum(ends_R - 1, 0),
    )
    if not layout.step.has_rope_offsets:
        return parts
    # A row's offsets stay the same, but its token's place does not.
    offsets_3T = parts.rope_offsets_3T.reshape(3, -1)
    place_R = jnp.where(active_R, ends_R - 1, layout.step.num_tokens)
    offsets_3T = offsets_3T.at[:, place_R].set(offsets_3T[:, : layout.step.num_rows], mode="drop")
    return parts._replace(rope_offsets_3T=offsets_3T.reshape(-1))

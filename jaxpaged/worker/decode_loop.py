"""The function of a program that runs several decode steps, with the sampled tokens feeding the next step.

    decode[T]:      params, head, kv, tables, last_token, packed -> kv, tables, last_token, tokens
    decode_full[T]: the same with the sampling state, and log probabilities beside the tokens

A row that samples one of its stop ids, or whose logits are not numbers, computes nothing more; the loop ends with the
last row. The host decides what ends a request: rows stop here only so that less is computed in vain, and a stop id
that did not fit into the row costs time, not correctness.

The steps are those of `StepFunctions`, and so are their tokens. This module knows nothing of why a run is as long as
it is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpaged.sampling.rows import later_lines
from jaxpaged.worker.decode_batch import DecodeLayout, DecodeParts
from jaxpaged.worker.packed import StepParts
from jaxpaged.worker.step import Shapes, StepFunctions, write_tables

NOT_COMPUTED = -2
"""In place of a token: the row had ended. -1 is a token that means nothing, as in a single step."""


class Run(NamedTuple):
    """What the loop carries from step to step.

    `limit_R` is the number of the step from which on a row computes nothing. `logprobs` is None in the plain program.
    """

    step: Any
    limit_R: Any
    kv: Any
    last_token_R: Any
    sampling: Any
    tokens_IR: Any
    logprobs: Any


def decode(
    functions: StepFunctions, layout: DecodeLayout, params: Any, head: Any, kv: Any, tables_GRM: Any,
    last_token_R: Any, sampling: Any, packed: Any,
) -> tuple[Run, Any]:  # fmt: skip
    """All steps of a run -> (what the last one left, tables_GRM). `sampling` None: the plain sampler.

    `tokens_IR` is `[max_steps, R]`, and so are the log probabilities; I is the number of the step.
    """
    parts = layout.split(packed)
    tables_GRM = write_tables(tables_GRM, parts.table_place_U, parts.table_idx_U, parts.table_block_U)
    sampled_R = last_token_R[parts.rows_R]
    known_R = parts.token_ids_R >= 0
    last_token_R = last_token_R.at[parts.rows_R].set(jnp.where(known_R, parts.token_ids_R, sampled_R))
    ended_R = ~known_R & is_stop(sampled_R, parts.stop_ids_RJ)

    def one_step(run: Run) -> Run:
        return decode_step(functions, layout, params, head, tables_GRM, parts, run)

    first = Run(
        step=jnp.int32(0),
        limit_R=jnp.where(ended_R, 0, parts.num_tokens_R),
        kv=kv,
        last_token_R=last_token_R,
        sampling=sampling,
        tokens_IR=jnp.full((layout.max_steps, layout.step.num_rows), NOT_COMPUTED, jnp.int32),
        logprobs=None if sampling is None else functions.no_logprobs(layout.max_steps, layout.step.num_rows),
    )
    return jax.lax.while_loop(lambda run: jnp.any(run.step < run.limit_R), one_step, first), tables_GRM


def decode_step(
    functions: StepFunctions, layout: DecodeLayout, params: Any, head: Any, tables_GRM: Any, parts: DecodeParts,
    run: Run,
) -> Run:  # fmt: skip
    """One token of every row that has not ended: those rows' tokens lie one after the other, as in a single step."""
    active_R = run.step < run.limit_R
    step_parts = parts_of_step(layout, parts, run.step, active_R)
    hidden_TD, kv = functions.hidden_states(layout.step, params, run.kv, tables_GRM, run.last_token_R, step_parts)
    num_rows, num_lines = layout.step.num_rows, layout.num_lines
    hidden_SD = jnp.pad(hidden_TD[step_parts.sample_idxs_R], ((0, num_lines - num_rows), (0, 0)))
    active_S = jnp.pad(active_R, (0, num_lines - num_rows))
    lines_SF = later_lines(parts.sampling_SF, run.step, active_S, functions.max_num_seqs)
    lines_SF = jax.lax.bitcast_convert_type(lines_SF, jnp.float32)
    sampling, logprobs = run.sampling, run.logprobs
    if sampling is None:
        last_token_R, tokens_S = functions.sample(num_lines, head, hidden_SD, run.last_token_R, lines_SF)
    else:
        last_token_R, tokens_S, sampling, lines = functions.sample_full(
            num_lines, head, hidden_SD, run.last_token_R, sampling, lines_SF
        )
        logprobs = jax.tree.map(lambda kept, new: kept.at[run.step].set(new[:num_rows]), logprobs, lines)
    tokens_R = tokens_S[:num_rows]
    ended_R = (tokens_R < 0) | is_stop(tokens_R, parts.stop_ids_RJ)
    return Run(
        step=run.step + 1,
        limit_R=jnp.where(active_R & ended_R, run.step + 1, run.limit_R),
        kv=kv,
        last_token_R=last_token_R,
        sampling=sampling,
        tokens_IR=run.tokens_IR.at[run.step].set(jnp.where(active_R, tokens_R, NOT_COMPUTED)),
        logprobs=logprobs,
    )


def is_stop(tokens_R: Any, stop_ids_RJ: Any) -> Any:
    return jnp.any(tokens_R[:, None] == stop_ids_RJ, axis=1)


def parts_of_step(layout: DecodeLayout, parts: DecodeParts, step: Any, active_R: Any) -> StepParts:
    """A step of a run in the terms of a single one: rows that have ended have no token in it."""
    ends_R = jnp.cumsum(active_R.astype(jnp.int32))
    nothing = jnp.zeros(0, jnp.int32)
    return StepParts(
        num_seqs=parts.num_seqs,
        rows_R=parts.rows_R,
        query_start_loc_R1=jnp.pad(ends_R, (1, 0)),
        seq_lens_R=jnp.where(parts.seq_lens_R > 0, parts.seq_lens_R + step, 0),
        token_ids_T=jnp.full(layout.step.num_tokens, -1, jnp.int32),
        sample_idxs_R=jnp.maximum(ends_R - 1, 0),
        table_place_U=nothing,
        table_idx_U=nothing,
        table_block_U=nothing,
    )


def lower_decode(shapes: Shapes, layout: DecodeLayout, full: bool) -> jax.stages.Lowered:
    """The program of a bucket, with the full sampler or the plain one."""
    f, whole = shapes.functions, shapes.functions.replicated
    state = (shapes.kv, shapes.tables, shapes.last_token, shapes.sampling if full else None)

    def decode_run(params, head, state, packed):
        kv, tables, last_token, sampling = state
        run, tables = decode(f, layout, params, head, kv, tables, last_token, sampling, packed)
        return (run.kv, tables, run.last_token_R, run.sampling), run.tokens_IR, run.logprobs

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    program = jax.jit(
        decode_run, donate_argnames=("state",), out_shardings=(shardings, whole, whole),
        compiler_options=shapes.options.get("decode_full" if full else "decode"),
    )  # fmt: skip
    return program.lower(shapes.params, shapes.head, state, shapes.packed(layout.size))

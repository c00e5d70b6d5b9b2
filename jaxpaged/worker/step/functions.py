"""The functions that become programs, and what they donate. Statics, donation and shardings are declared here only.

A step is two programs, dispatched back to back without waiting:

    forward[T]: params, kv, tables, rows, hidden, packed -> kv, tables, rows, hidden, hidden of those that sample
    sample[S]:  head, hidden of those that sample, rows, sampling, packed -> rows, tokens, sampling, log probabilities

The sampled token stays on the device in `RowTokens` and feeds the next step, which begins where the row is: the host
need not know how many tokens a step gave to schedule the next one. `sample_full` does the same with
penalties, bias, masks and log probabilities, for steps in which some request uses them; `sample_masked` takes masks
of grammars besides. The logits are computed in
the sampling program, so that a long prefill pays for the rows that sample and not for its token bucket.
Tokens and log probabilities are `[I, S]`, one line for each token that a row can get: one here, several in
`decode_loop.py` and in `verify.py`.

`hidden` has a line for every token of the largest bucket, whatever the step's: a smaller step writes the first ones, in
place. So what follows on all tokens of a step, `prompt_logprobs`, is one program and not one per bucket.

`StepFunctions` holds what is static; its methods are pure functions of their arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpaged.config.speculation import Speculation
from jaxpaged.kv_cache_spec import CacheSpec, KVCacheConfig
from jaxpaged.layers.attention import AttentionBatch, AttentionContext
from jaxpaged.layers.ranks import lying_like, of_each_rank, of_ranks
from jaxpaged.layers.state import StateBatch, StateTensor
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, Model
from jaxpaged.params.sharding import num_ranks, partition_spec
from jaxpaged.sampling.custom import CustomProcessors
from jaxpaged.sampling.limits import LimitsMethod
from jaxpaged.sampling.logprobs import LogprobOutput, prompt_logprobs
from jaxpaged.sampling.rows import NUM_COLUMNS, placed_lines, unpack_rows
from jaxpaged.sampling.sampler import SampleOutput, sample_full, sample_plain
from jaxpaged.sampling.state import SamplingState, StateLayout, load_row, load_tokens
from jaxpaged.worker.cache.kinds import kind_of
from jaxpaged.worker.programs.compiler_options import OTHERS, Options
from jaxpaged.worker.step.packed import StepLayout, StepParts
from jaxpaged.worker.step.zero_pages import zeros_on
from pallas_kernels.ragged_paged_attention import KVTensor
from pallas_kernels.token_places import token_places

TABLE_CHUNK = 1024
"""Block table entries that one call of the table program writes."""


NOTHING = -1
"""In place of a token: there is no draft, or a kept answer ends."""
NOTHING_ALLOWED, NOT_COMPUTED, CORRUPTED = -1, -2, -3
"""In place of a drawn token: what the request asks for leaves none; its row had ended; the logits are no numbers."""


class Answers(NamedTuple):
    """Answers to earlier requests, one after the other in a ring, each ended by NOTHING. The next goes to `cursor`."""

    tokens_C: Any
    cursor: Any


class RowTokens(NamedTuple):
    """What the device knows of each row; the null row comes last and means nothing.

    last_token_R: the newest token, if it was drawn here. num_computed_R: how many tokens are computed. A token that
    the host does not know is the newest one, and stands behind them. Where tokens are drafted, drafts_RK is what a
    drafter supposes to follow the newest one. Where drafts are looked for in a row, history_RL holds all its known
    tokens, and `answers` are kept where they are looked for in those.
    """

    last_token_R: Any
    num_computed_R: Any
    history_RL: Any = None
    drafts_RK: Any = None
    answers: Answers | None = None


RESULT_TYPES = (KVTensor, StateTensor, SamplingState, LogprobOutput, RowTokens, Answers)
"""What programs return besides arrays, tuples and lists."""

PROMPT_LOGPROB_TILE = 32
"""Prompt tokens whose log probabilities one call computes: [tile, V] float32 must stay small."""


@dataclass(frozen=True)
class StepFunctions:
    """The step of one engine. `num_hidden` rows of hidden states go from forward to sample, whatever the bucket.

    `first_layer`: where the layers of `model` begin among those that cache. Another model's may come before.
    `is_first`: there is no stage before; of any other, what the one before made of the tokens is the last argument.
    """

    model: Model
    config: DecoderConfig
    attention: AttentionContext
    kv_cache: KVCacheConfig
    max_num_seqs: int
    num_hidden: int
    logprobs_mode: str
    max_logprobs: int
    custom: CustomProcessors
    limits: LimitsMethod
    first_layer: int = 0
    is_first: bool = True

    @property
    def replicated(self) -> NamedSharding:
        """Of what is whole on each device, of each of the attention ranks if there are several."""
        return of_ranks(self.attention.mesh)

    def forward(
        self,
        layout: StepLayout,
        params: Any,
        kv: Any,
        tables_GRM: Any,
        rows: RowTokens,
        hidden_LD: Any,
        packed: Any,
        stream_TD: Any = None,
    ):
        """One pass over the tokens of a step -> (kv, tables_GRM, rows, hidden_LD, hidden_SD of the tokens that sample).

        `hidden_LD` keeps the hidden states of a step of any size: this one's are its first T lines.
        """
        parts = layout.split(packed)
        tables_GRM = write_tables(tables_GRM, parts.table_place_U, parts.table_idx_U, parts.table_block_U)
        hidden_TD, kv, rows = self.hidden_states(layout, params, kv, tables_GRM, rows, parts, stream_TD=stream_TD)
        sampled_RD = hidden_TD[parts.sample_idxs_R]
        hidden_SD = jnp.pad(sampled_RD, ((0, self.num_hidden - layout.num_rows), (0, 0)))
        return kv, tables_GRM, rows, jax.lax.dynamic_update_slice(hidden_LD, hidden_TD, (0, 0)), hidden_SD

    def hidden_states(
        self,
        layout: StepLayout,
        params: Any,
        kv: Any,
        tables_GRM: Any,
        rows: RowTokens,
        parts: StepParts,
        decodes_only: bool = False,
        stream_TD: Any = None,
    ) -> tuple[Any, Any, RowTokens]:
        """The model on the tokens of a step -> (hidden_TD, kv, rows with these tokens computed).

        `decodes_only`: no request has more than one of them.
        """
        parts, rows = place_rows(parts, rows)
        tokens_T, positions_T = locate_tokens(layout, parts, rows)
        attention = self.attention_batches(layout, parts, tables_GRM, decodes_only)
        caches = self.kv_cache.layer_caches()[self.first_layer :]
        batch = Batch(tokens_T, positions_T, attention, caches, stream_TD)
        output = self.model.forward(params, self.config, batch, kv)
        kv = output.kv
        if output.load_LE is not None:  # the engine's arrays end with the counts of tokens of experts
            kv[-1] = kv[-1] + output.load_LE
        return output.hidden_TD, kv, rows

    def attention_batches(
        self, layout: StepLayout, parts: StepParts, tables_GRM: Any, decodes_only: bool
    ) -> tuple[AttentionBatch | StateBatch, ...]:
        """What attention needs to know of this step, once per KV group."""

        shared_G6R = layout.shared_of_groups(parts) if layout.shared_work and layout.reads_shared else None

        def of_group(g: int, spec: CacheSpec) -> AttentionBatch | StateBatch:
            return kind_of(spec).step_batch(
                self.attention,
                spec,
                parts,
                tables_GRM[g, parts.rows_R],
                num_tokens=layout.num_tokens,
                decodes_only=decodes_only,
                shared_6R=None if shared_G6R is None else shared_G6R[g],
            )

        return tuple(of_group(g, group.spec) for g, group in enumerate(self.kv_cache.groups))

    def logits(self, head: Any, hidden_SD: Any) -> Any:
        """Float32 logits [S, V], each device's part of the vocabulary computed where that part of the head lies.

        Without the constraint XLA lets what reads the logits, the kernel that finds limits row by row, say how they
        are split, and sends the whole head to every device in each step: 2 GB of Llama 3.1 70B's in place of 33 MB.
        """
        logits_SV = self.model.compute_logits(head, self.config, hidden_SD)
        if self.attention.mesh.size == 1:
            return logits_SV
        return jax.lax.with_sharding_constraint(logits_SV, lying_like(self.attention.mesh, partition_spec("SV")))

    def draw(
        self, logits_SV: Any, rows: RowTokens, sampling: SamplingState | None, packed_SF: Any, masks_SW: Any = None
    ):
        """A token for each line of logits -> (rows, tokens_S, sampling state, log probabilities); -1 where the logits
        are no distribution. `sampling` None: the plain sampler, which gives no log probabilities.

        `masks_SW`: the tokens that grammars allow; None: no row has a grammar.
        """
        lines_SF = placed_lines(packed_SF, rows.num_computed_R)
        if sampling is None:
            output = sample_plain(logits_SV, lines_SF, self.limits)
        else:
            sampling, output = sample_full(
                logits_SV,
                sampling,
                lines_SF,
                logprobs_mode=self.logprobs_mode,
                max_logprobs=self.max_logprobs,
                mask_bits_SW=masks_SW,
                custom=self.custom,
                method=self.limits,
            )
        return *record_sample(rows, lines_SF, output), sampling, output.logprobs

    def no_logprobs(self, *shape: int) -> LogprobOutput:
        """Room for log probabilities, `shape` in front."""
        columns = (*shape, 1 + self.max_logprobs)
        return LogprobOutput(jnp.zeros(columns, jnp.int32), jnp.zeros(columns), jnp.zeros(shape, jnp.int32))

    def prompt_logprobs(self, head: Any, hidden_LD: Any, packed_2C: Any):
        """Log probabilities of prompt tokens. `packed_2C` holds places in the step, and the tokens that followed."""
        logits_CV = self.logits(head, hidden_LD[packed_2C[0]])
        return prompt_logprobs(logits_CV, packed_2C[1], self.max_logprobs, self.logprobs_mode, self.limits)


def record_sample(rows: RowTokens, lines_SF: Any, output: SampleOutput) -> tuple[RowTokens, Any]:
    """Keep the drawn tokens for the next step, and mark those that mean nothing."""
    params = unpack_rows(lines_SF)
    rows = rows._replace(last_token_R=rows.last_token_R.at[params.row_S].set(output.tokens_S))
    if rows.history_RL is not None:
        history_RL = rows.history_RL.at[params.row_S, params.position_S].set(output.tokens_S, mode="drop")
        rows = rows._replace(history_RL=history_RL)
    reason_S = jnp.where(output.corrupted_S, CORRUPTED, NOTHING_ALLOWED)
    return rows, jnp.where(output.bad_S, reason_S, output.tokens_S)


def place_rows(parts: StepParts, rows: RowTokens) -> tuple[StepParts, RowTokens]:
    """Where the tokens of a step stand: behind those that are computed, unless the host says where -> (parts that
    say so of all rows, rows with these tokens computed)."""
    num_new_R = parts.query_start_loc_R1[1:] - parts.query_start_loc_R1[:-1]
    own_R = rows.num_computed_R[parts.rows_R] + num_new_R
    seq_lens_R = jnp.where(parts.seq_lens_R < 0, own_R, parts.seq_lens_R)
    num_computed_R = rows.num_computed_R.at[parts.rows_R].set(seq_lens_R)
    return parts._replace(seq_lens_R=seq_lens_R), rows._replace(num_computed_R=num_computed_R)


def locate_tokens(layout: StepLayout, parts: StepParts, rows: RowTokens) -> tuple[Any, Any]:
    """(tokens_T, positions_T): which token each place of the step holds and where it stands in its request."""
    seq_T, positions_T, is_padding_T = locate_places(layout, parts)
    row_T = parts.rows_R[seq_T]
    unknown_T = rows.last_token_R[row_T]
    if rows.drafts_RK is not None:
        nth_T = jnp.arange(layout.num_tokens, dtype=jnp.int32) - parts.query_start_loc_R1[seq_T]
        drafts_T = rows.drafts_RK[row_T, jnp.clip(nth_T - 1, 0, rows.drafts_RK.shape[1] - 1)]
        unknown_T = jnp.where(nth_T > 0, jnp.maximum(drafts_T, 0), unknown_T)
    tokens_T = jnp.where(parts.token_ids_T >= 0, parts.token_ids_T, unknown_T)
    return jnp.where(is_padding_T, 0, tokens_T), jnp.where(is_padding_T, 0, positions_T)


def locate_places(layout: StepLayout, parts: StepParts) -> tuple[Any, Any, Any]:
    """(seq_T, positions_T, is_padding_T): which of the step's requests each place belongs to, and where in it."""
    seq_T, positions_T, real_T = token_places(parts.query_start_loc_R1, parts.seq_lens_R, layout.num_tokens)
    return seq_T, positions_T, ~real_T


def write_tables(tables_GRM: Any, place_U: Any, idx_U: Any, block_U: Any) -> Any:
    """Set entries of the block tables. Padding entries all write to the null row."""
    groups, rows, blocks = tables_GRM.shape
    flat = tables_GRM.reshape(groups * rows, blocks).at[place_U, idx_U].set(block_U)
    return flat.reshape(groups, rows, blocks)


def write_table_chunk(tables_GRM: Any, packed_3U: Any) -> Any:
    return write_tables(tables_GRM, packed_3U[0], packed_3U[1], packed_3U[2])


class Shapes:
    """Shapes, types and shardings of everything that programs take, from which they are lowered.

    `options`: those of the compiler, by kind of program.
    """

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        kv: Any,
        sampling: StateLayout,
        max_blocks: int,
        max_tokens: int,
        options: Mapping[str, Options],
        max_model_len: int,
        speculation: Speculation | None = None,
    ):
        self.functions, self.params, self.kv, self.options = functions, params, kv, options
        self.num_ranks = num_ranks(functions.attention.mesh)
        self.all_hidden = self.hidden(max_tokens)
        rows = functions.max_num_seqs + 1
        self.tables = self._array((len(functions.kv_cache.groups), rows, max_blocks), jnp.int32)
        self.rows = RowTokens(self._array((rows,), jnp.int32), self._array((rows,), jnp.int32))
        if speculation is not None:
            drafts = self._array((rows, speculation.num_speculative_tokens), jnp.int32)
            self.rows = self.rows._replace(drafts_RK=drafts)
            if speculation.match_lengths is not None:
                self.rows = self.rows._replace(history_RL=self._array((rows, max_model_len), jnp.int32))
            if speculation.num_answer_tokens:
                kept = self._array((speculation.num_answer_tokens,), jnp.int32), self._array((), jnp.int32)
                self.rows = self.rows._replace(answers=Answers(*kept))
        self.sampling = jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), sampling.abstract())
        self.head = functions.model.head(params)
        self.zeros = zeros_on(functions.attention.mesh)

    @property
    def state(self) -> tuple[Any, ...]:
        """All that lives on the devices from step to step, in the order of `DeviceState`: the KV cache, then the rest,
        whose size does not depend on the number of blocks."""
        return self.kv, self.tables, self.rows, self.sampling, self.all_hidden

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Of all attention ranks together, one after the other along the first axis."""
        if self.num_ranks > 1:
            shape = (self.num_ranks * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.functions.replicated)

    def lower(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], donated: Sequence[int] = (), **settings: Any
    ) -> jax.stages.Lowered:
        """A program of all ranks, from the function of one and the shapes of its arguments."""
        function = of_each_rank(self.functions.attention.mesh, function, arguments)
        settings.setdefault("out_shardings", self.functions.replicated)
        settings.setdefault("compiler_options", self.options.get(OTHERS))
        return jax.jit(function, donate_argnums=tuple(donated), **settings).lower(*arguments)

    def packed(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def lines(self, size: int) -> jax.ShapeDtypeStruct:
        """What `SamplingRows.pack` makes."""
        return self._array((size, NUM_COLUMNS), jnp.float32)

    def hidden(self, size: int) -> jax.ShapeDtypeStruct:
        return self._array((size, self.functions.config.hidden_size), jnp.dtype(self.functions.config.dtype))

    def lower_forward(self, layout: StepLayout) -> jax.stages.Lowered:
        f, whole = self.functions, self.functions.replicated
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.kv)

        def forward(params, kv, tables, rows, hidden, packed, stream=None):
            return f.forward(layout, params, kv, tables, rows, hidden, packed, stream)

        state = (self.kv, self.tables, self.rows, self.all_hidden)
        stream = () if f.is_first else (self.hidden(layout.num_tokens),)
        return self.lower(
            forward,
            (self.params, *state, self.packed(layout.size), *stream),
            donated=(1, 2, 3, 4),
            out_shardings=(shardings, whole, whole, whole, whole),
            compiler_options=self.options.get("forward"),
        )

    def lower_sample(self, size: int, full: bool, masked: bool = False) -> jax.stages.Lowered:
        """`full`: with everything that a request can ask for; `masked`: grammars too."""
        f = self.functions

        def sample(head, hidden, rows, sampling, packed, masks=None):
            logits_SV = f.logits(head, hidden[:size])
            of_first = None if masks is None else masks[0]
            rows, tokens_S, sampling, logprobs = f.draw(logits_SV, rows, sampling, packed, of_first)
            return rows, tokens_S[None], sampling, jax.tree.map(lambda lines: lines[None], logprobs)

        arguments = (self.head, self.hidden(f.num_hidden), self.rows, self.sampling if full else None, self.lines(size))
        return self.lower(sample, (*arguments, *self.masks(1, size, masked)), donated=(2, 3))

    def masks(self, num_most: int, size: int, masked: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The argument with the masks of grammars, if there is one: for every token that each row may get."""
        num_words = -(-self.sampling.seen_RV.shape[1] // 32)
        return (self._array((num_most, size, num_words), jnp.uint32),) if masked else ()

    def lower_prompt_logprobs(self) -> jax.stages.Lowered:
        arguments = (self.head, self.all_hidden, self.packed(2, PROMPT_LOGPROB_TILE))
        return self.lower(self.functions.prompt_logprobs, arguments)

    def lower_zeros(self) -> jax.stages.Lowered:
        """The device state of an engine that has computed nothing."""
        leaves, tree = jax.tree.flatten(self.state)
        step = jax.jit(
            lambda: tree.unflatten(self.zeros(leaves)),
            out_shardings=tree.unflatten(leaf.sharding for leaf in leaves),
        )
        return step.lower()

    def lower_tables(self) -> jax.stages.Lowered:
        return self.lower(write_table_chunk, (self.tables, self.packed(3, TABLE_CHUNK)), donated=(0,))

    def lower_load(self, load: Callable[..., Any], size: int) -> jax.stages.Lowered:
        """`load_row` or `load_tokens`, which write one request's part of the sampling state."""
        assert load in (load_row, load_tokens)
        return self.lower(load, (self.sampling, self.packed(size)), donated=(0,))

"""The functions of a step: what its two programs compute. `programs/declare.py` says what they take, donate and return.

The logits are computed in the sampling program, so that a long prefill pays for the rows that sample and not for its
token bucket. Tokens and log probabilities are `[I, S]`, one line for each token that a row can get: one here, several
in `decode_loop.py` and in `verify.py`.

The hidden states of a step have a line for every token of the largest bucket, whatever the step's: a smaller step
writes the first ones, in place. So what follows on all tokens of a step, such as the log probabilities of prompts, is
one program and not one per bucket.

`StepFunctions` holds what is static; its methods are pure functions of their arguments. Letters: in `encoded_SE` S are
the slots of the encoder cache, and E the numbers of an embedding; in `expert_TLJ` L are blocks of experts, and J those
of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.config import RAW_AND_PROCESSED
from jaxpaged.config.speculation import Speculation
from jaxpaged.kv_cache_spec import CacheSpec, KVCacheConfig
from jaxpaged.layers.attention import AttentionBatch, AttentionContext
from jaxpaged.layers.experts import Routed
from jaxpaged.layers.lora import SlottedLines
from jaxpaged.layers.ranks import lying_like, of_ranks
from jaxpaged.layers.state import StateBatch, StateTensor
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, Model
from jaxpaged.models.vision.interface import WINDOWS
from jaxpaged.params.sharding import partition_spec
from jaxpaged.sampling.custom import CustomProcessors
from jaxpaged.sampling.limits import LimitsMethod
from jaxpaged.sampling.logprobs import LogprobOutput, prompt_logprobs
from jaxpaged.sampling.rows import placed_lines
from jaxpaged.sampling.sampler import sample_full, sample_plain
from jaxpaged.sampling.state import SamplingState
from jaxpaged.worker.cache.kinds import kind_of
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.lora_stacks import LoraSpec
from jaxpaged.worker.step.adapters import bound_head, bound_params, slotted_scores
from jaxpaged.worker.step.packed import StepLayout, StepParts
from jaxpaged.worker.step.row_tokens import (
    Answers,
    RowTokens,
    locate_places,
    locate_tokens,
    place_rows,
    record_sample,
)
from pallas_kernels.ragged_paged_attention import KVTensor

TABLE_CHUNK = 1024
"""Block table entries that one call of the table program writes."""


RESULT_TYPES = (KVTensor, StateTensor, SamplingState, LogprobOutput, RowTokens, Answers, SlottedLines)
"""What programs return besides arrays, tuples and lists."""

PROMPT_LOGPROB_TILE = 32
"""Prompt tokens whose log probabilities one call computes: [tile, V] float32 must stay small."""


@dataclass(frozen=True)
class StepFunctions:
    """The step of one engine. The hidden states of `num_sampled` tokens go from forward to sample, whatever the bucket.

    `first_layer`: where the layers of `model` begin among those that cache. Another model's may come before.
    `is_first`: there is no stage before; of any other, what the one before made of the tokens is the last argument.
    `speculation`: how tokens are drafted, and `drafting` the step of the model that does, if one does.
    `pooling_type`: of an engine that pools. `encoder`: of one that sees. `lora`: of one that has adapters.
    `tells_masks`: log probabilities go with what limits left.
    """

    model: Model
    config: DecoderConfig
    attention: AttentionContext
    kv_cache: KVCacheConfig
    max_num_seqs: int
    num_sampled: int
    logprobs_mode: str
    max_logprobs: int
    custom: CustomProcessors
    limits: LimitsMethod
    first_layer: int = 0
    is_first: bool = True
    speculation: Speculation | None = None
    drafting: "StepFunctions | None" = None
    pooling_type: str = ""
    encoder: EncoderSpec | None = None
    lora: LoraSpec | None = None
    tells_masks: bool = False

    @property
    def replicated(self) -> NamedSharding:
        """Of what is whole on each device, of each of the attention ranks if there are several."""
        return of_ranks(self.attention.mesh)

    @property
    def marks_lines(self) -> bool:
        """Whether hidden states go with the slots of their adapters, since some change what is computed of them."""
        return self.lora is not None and bool(self.lora.of_lines)

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
        encoded_SE: Any = None,
    ):
        """One pass over the tokens of a step -> (kv, tables_GRM, rows, hidden_LD, sampled_SD: hidden states of
        the tokens that sample, expert_TLJ: the experts of each token in each layer that has some, if they are told).

        `hidden_LD` keeps the hidden states of a step of any size: this one's are its first T lines. `encoded_SE`: the
        encoder cache, in an engine that sees.
        """
        parts = layout.split(packed)
        tables_GRM = write_tables(tables_GRM, parts.table_place_U, parts.table_idx_U, parts.table_block_U)
        hidden_TD, kv, rows, expert_TLJ = self.hidden_states(
            layout, params, kv, tables_GRM, rows, parts, stream_TD=stream_TD, encoded_SE=encoded_SE
        )
        if self.marks_lines:
            hidden_TD = SlottedLines(hidden_TD, self.slots_of_tokens(layout, parts))
        sampled_SD = self.lines_of(hidden_TD, parts.sample_idxs_R, self.num_sampled)
        return kv, tables_GRM, rows, jax.tree.map(with_first, hidden_LD, hidden_TD), sampled_SD, expert_TLJ

    def lines_of(self, hidden_TD: Any, idxs_R: Any, num_lines: int) -> Any:
        """Some of the hidden states, with zeros behind them."""

        def of_array(array: Any) -> Any:
            lines = array[idxs_R]
            return jnp.pad(lines, ((0, num_lines - len(lines)), *[(0, 0)] * (array.ndim - 1)))

        return jax.tree.map(of_array, hidden_TD)

    def forward_of_stage(
        self, layout: StepLayout, params: Any, kv: Any, tables_GRM: Any, rows: RowTokens, packed: Any, given: Any
    ) -> tuple[Any, ...]:
        """The same on a stage that is not the last one -> (kv, tables_GRM, rows, stream_TD for the next stage).

        `given`: the result of the stage before, or, on the first one, the newest tokens of all rows.
        """
        parts = layout.split(packed)
        tables_GRM = write_tables(tables_GRM, parts.table_place_U, parts.table_idx_U, parts.table_block_U)
        if self.is_first:
            rows, given = rows._replace(last_token_R=given), None
        stream_TD, kv, rows, _ = self.hidden_states(layout, params, kv, tables_GRM, rows, parts, stream_TD=given)
        return kv, tables_GRM, rows, stream_TD

    def sample(
        self,
        size: int,
        head: Any,
        sampled_SD: Any,
        rows: RowTokens,
        sampling: Any,
        packed_SF: Any,
        masks_ISW: Any = None,
    ) -> tuple[Any, ...]:
        """A token for each of `size` rows -> (rows, tokens_IS, sampling state, log probabilities); see `draw`."""
        logits_SV = self.logits(head, jax.tree.map(lambda lines: lines[:size], sampled_SD))
        masks_SW = None if masks_ISW is None else masks_ISW[0]
        rows, tokens_S, sampling, logprobs = self.draw(logits_SV, rows, sampling, packed_SF, masks_SW)
        return rows, tokens_S[None], sampling, jax.tree.map(lambda lines: lines[None], logprobs)

    def pool(self, size: int, head: Any, pooled_SD: Any) -> Any:
        """Vectors or scores of `size` prompts, from their last hidden states or their sums."""
        pooled_SD = jax.tree.map(lambda lines: lines[:size], pooled_SD)
        scores = lambda head, pooled_SD: self.model.compute_logits(head, self.config, pooled_SD)
        if isinstance(pooled_SD, SlottedLines):
            return slotted_scores(scores, head, pooled_SD)
        return scores(head, pooled_SD)

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
        encoded_SE: Any = None,
    ) -> tuple[Any, Any, RowTokens, Any]:
        """The model on the tokens of a step -> (hidden_TD, kv, rows with these tokens computed, expert_TLJ or None).

        `decodes_only`: no request has more than one of them, and none is replaced by an embedding.
        """
        parts, rows = place_rows(parts, rows)
        tokens_T, positions_T = locate_tokens(layout, parts, rows)
        if layout.has_lora and layout.lora_level:
            params = self.with_adapters(layout, params, parts)
        attention = self.attention_batches(layout, parts, tables_GRM, decodes_only)
        caches = self.kv_cache.layer_caches()[self.first_layer :]
        batch = Batch(tokens_T, positions_T, attention, caches, stream_TD)
        if encoded_SE is not None:
            batch = with_embeddings(batch, parts.token_ids_T, encoded_SE)
        if layout.has_rope_offsets:
            batch = batch.replace(rope_offsets_3T=parts.rope_offsets_3T.reshape(3, layout.num_tokens))
        output = self.model.forward(params, self.config, batch, kv)
        kv, routed = output.kv, output.routed or Routed()
        if routed.load_E is not None:  # the engine's arrays end with the counts of tokens of experts
            kv[-1] = kv[-1] + routed.load_E
        expert_TLJ = None if routed.expert_TJ is None else self.whole(routed.expert_TJ.swapaxes(0, 1))
        return output.hidden_TD, kv, rows, expert_TLJ

    def with_adapters(self, layout: StepLayout, params: Any, parts: StepParts) -> Any:
        """The model's parameters with what the adapters of the tokens' requests add."""
        assert self.lora is not None, "steps have slots where the engine has adapters"
        return bound_params(params, self.lora, self.slots_of_tokens(layout, parts), layout.lora_level)

    def slots_of_tokens(self, layout: StepLayout, parts: StepParts) -> Any:
        """Int32 [T], 0 for tokens of requests without an adapter and for padding."""
        if not layout.lora_level:
            return jnp.zeros(layout.num_tokens, jnp.int32)
        seq_T, _, is_padding_T = locate_places(layout, parts)
        return jnp.where(is_padding_T, 0, parts.lora_slots_R[seq_T])

    def attention_batches(
        self, layout: StepLayout, parts: StepParts, tables_GRM: Any, decodes_only: bool
    ) -> tuple[AttentionBatch | StateBatch, ...]:
        """What attention needs to know of this step, once per KV group."""
        reads_shared = layout.shared_work and layout.reads_shared and not self.config.sees_both_ways
        shared_G6R = layout.shared_of_groups(parts) if reads_shared else None
        visible_ends = self.visible_ends(layout, parts, decodes_only)

        def of_group(g: int, spec: CacheSpec) -> AttentionBatch | StateBatch:
            batch = kind_of(spec).step_batch(
                self.attention,
                spec,
                parts,
                tables_GRM[g, parts.rows_R],
                num_tokens=layout.num_tokens,
                decodes_only=decodes_only,
                shared_6R=None if shared_G6R is None else shared_G6R[g],
                visible_end_T=visible_ends(spec),
            )
            return batch if spec.scales != "head" else batch.replace(scales_row=self.kv_cache.place_in_pool(g))

        return tuple(of_group(g, group.spec) for g, group in enumerate(self.kv_cache.groups))

    def visible_ends(
        self, layout: StepLayout, parts: StepParts, decodes_only: bool
    ) -> Callable[[CacheSpec], jax.Array | None]:
        """One past the last position that each token sees, in layers of a kind; None: its own is the last.

        In an encoder each token sees all of its text, or where layers have a window, as far behind itself as before.
        """
        if decodes_only or not (layout.has_visible_ends or self.config.sees_both_ways):
            return lambda spec: None
        _, positions_T, _ = locate_places(layout, parts)
        if self.config.sees_both_ways:
            return lambda spec: positions_T + (spec.window or layout.num_tokens)  # ends of texts are before that
        end_T = jnp.maximum(parts.visible_ends_T, positions_T + 1)
        in_windows_only = self.config.vision is not None and self.config.vision.both_ways == WINDOWS
        return lambda spec: None if in_windows_only and spec.window is None else end_T

    def logits(self, head: Any, sampled_SD: Any, lora_level: int | None = None) -> Any:
        """Float32 logits [S, V], each device's part of the vocabulary computed where that part of the head lies.

        Without the constraint XLA lets what reads the logits, the kernel that finds limits row by row, say how they
        are split, and sends the whole head to every device in each step: 2 GB of Llama 3.1 70B's in place of 33 MB.
        `lora_level`: how much of the head's stacks the program takes, where there are some; None: all.
        """
        if isinstance(sampled_SD, SlottedLines):
            assert self.lora is not None, "only an engine with adapters has slots"
            level = self.lora.num_levels if lora_level is None else lora_level
            head, sampled_SD = bound_head(head, self.lora, sampled_SD.slots, level), sampled_SD.lines
        logits_SV = self.model.compute_logits(head, self.config, sampled_SD)
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
        lines_SF = self.whole(placed_lines(packed_SF, rows.num_computed_R))
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
                tells_masks=self.tells_masks,
            )
        output = jax.tree.map(self.whole, output)
        return *record_sample(rows, lines_SF, output), sampling, output.logprobs

    def whole(self, small: Any) -> Any:
        """A small array as each device has it whole.

        Rows of logits are split over the devices to draw from them. Without the constraint XLA splits by rows whatever
        meets them too, and sends each of some thirty such arrays around by itself, in every decode step.
        """
        if self.attention.mesh.size == 1:
            return small
        return jax.lax.with_sharding_constraint(small, lying_like(self.attention.mesh, PartitionSpec()))

    def no_logprobs(self, sampling: SamplingState | None, *shape: int) -> LogprobOutput | None:
        """Room for log probabilities, `shape` in front. `sampling` None: the plain sampler gives none."""
        if sampling is None:
            return None
        columns = (*shape, 1 + self.max_logprobs)
        return LogprobOutput(
            jnp.zeros(columns, jnp.int32),
            jnp.zeros(columns),
            jnp.zeros(shape, jnp.int32),
            jnp.zeros((*shape, 2)) if self.logprobs_mode == RAW_AND_PROCESSED else None,
            jnp.zeros((*shape, sampling.allowed_bits_RW.shape[1]), jnp.uint32) if self.tells_masks else None,
        )

    def no_experts(self, *shape: int) -> Any:
        """Room for the experts of tokens, `shape` in front, if they are told."""
        experts = self.config.experts
        if experts is None or not experts.router.tells:
            return None
        return jnp.zeros((*shape, len(experts.layers), experts.router.experts_per_token), jnp.int16)

    def prompt_logprobs(self, head: Any, hidden_LD: Any, packed_2C: Any):
        """Log probabilities of prompt tokens. `packed_2C` holds places in the step, and the tokens that followed."""
        logits_CV = self.logits(head, jax.tree.map(lambda lines: lines[packed_2C[0]], hidden_LD))
        return prompt_logprobs(logits_CV, packed_2C[1], self.max_logprobs, self.logprobs_mode, self.limits)


def with_first(kept: Any, new: Any) -> Any:
    """An array whose first lines are new."""
    return jax.lax.dynamic_update_slice(kept, new, (0,) * new.ndim)


def with_embeddings(batch: Batch, token_ids_T: Any, encoded_SE: Any) -> Batch:
    """A step some of whose tokens are replaced by embeddings: those whose ids say a slot of the encoder cache. Token 0
    is looked up in their place, since a placeholder's id may be outside the vocabulary."""
    is_visual_T = token_ids_T < -1
    return batch.replace(
        tokens_T=jnp.where(is_visual_T, 0, batch.tokens_T),
        visual_TE=encoded_SE[jnp.where(is_visual_T, -2 - token_ids_T, 0)],
        is_visual_T=is_visual_T,
    )


def write_tables(tables_GRM: Any, place_U: Any, idx_U: Any, block_U: Any) -> Any:
    """Set entries of the block tables. Padding entries all write to the null row."""
    groups, rows, blocks = tables_GRM.shape
    flat = tables_GRM.reshape(groups * rows, blocks).at[place_U, idx_U].set(block_U)
    return flat.reshape(groups, rows, blocks)


def write_table_chunk(tables_GRM: Any, packed_3U: Any) -> Any:
    return write_tables(tables_GRM, packed_3U[0], packed_3U[1], packed_3U[2])

"""The function of the program that adds up what the tokens of prompts give, in an engine that pools.

A prompt may take several steps, so what its tokens add up to stays on the device, a float32 line per row. The last
token needs no such sum. This module does not know which requests there are, nor what becomes of the vectors.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.layers.lora import SlottedLines, plain_lines
from jaxpaged.worker.step.packed import StepLayout
from jaxpaged.worker.step.row_tokens import locate_places


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
    layout: StepLayout, num_sampled: int, pooling_type: str, hidden_LD: Any, sums_RD: Any, packed: Any
) -> tuple[Any, Any]:
    """Add a step's hidden states to the sums of their rows -> (sums_RD, pooled_SD of the requests that sample).

    MEAN adds all tokens and divides by their number, CLS adds the first one alone. A row whose request begins in this
    step begins at zero, whatever it held. Sums are taken token by token, so a request's NaN stays its own.
    """
    parts, hidden_TD = layout.split(packed), plain_lines(hidden_LD)[: layout.num_tokens]
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
    missing = num_sampled - layout.num_rows
    pooled: Any = jnp.pad(pooled_SD, ((0, missing), (0, 0)))
    if isinstance(hidden_LD, SlottedLines):
        pooled = SlottedLines(pooled, jnp.pad(parts.lora_slots_R[done_S], (0, missing)))
    return sums_RD.at[parts.rows_R].set(totals_SD), pooled

"""Drafts by prompt lookup: what followed the newest tokens when they last occurred in the same request.

    draft[S]:      rows, rows of the step -> rows
    load_history:  rows, packed tokens    -> rows

All of it runs on the device, which alone knows the newest tokens while steps are in flight: the tokens of a row are
written when it is given to a request, and those that are drawn by whatever draws them. This module does not know which
drafts are any good.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.messages import NewRequestData, ProgramKey
from jaxpaged.speculation import Speculation
from jaxpaged.worker.device import Device
from jaxpaged.worker.step.functions import RowTokens, Shapes

CHUNK = 512
"""Tokens in one upload of `load_history`."""
HEADER = 3  # row, position of the first token, number of tokens
DRAFT_KIND = "draft"
LOAD_KIND = "load_history"


def look_up(history_SL: Any, num_known_S: Any, shortest: int, longest: int, num_drafts: int) -> Any:
    """drafts_SK of rows that know `num_known_S` tokens, -1 where there is none.

    The newest tokens, `shortest` to `longest` of them, are looked for earlier in the row: the longest match wins, then
    the latest. A draft that reaches the newest token goes round, as if the tokens since the match repeated themselves.
    """
    width = history_SL.shape[1]
    place_L = jnp.arange(width, dtype=jnp.int32)
    matching_SL = jnp.broadcast_to(place_L, history_SL.shape) < num_known_S[:, None] - 1
    length_SL = jnp.zeros(history_SL.shape, jnp.int32)
    for distance in range(longest):
        nth_S1 = jnp.maximum(num_known_S - 1 - distance, 0)[:, None]
        wanted_S1 = jnp.take_along_axis(history_SL, nth_S1, axis=1)
        before_SL = jnp.pad(history_SL, ((0, 0), (distance, 0)), constant_values=-1)[:, :width]
        matching_SL &= (before_SL == wanted_S1) & (place_L >= distance)
        length_SL += matching_SL
    score_SL = jnp.where(length_SL >= shortest, length_SL * width + place_L, -1)
    best_S = jnp.max(score_SL, axis=1)
    first_S = best_S % width + 1
    nth_SK = jnp.arange(num_drafts, dtype=jnp.int32) % jnp.maximum(num_known_S - first_S, 1)[:, None]
    drafts_SK = jnp.take_along_axis(history_SL, first_S[:, None] + nth_SK, axis=1, mode="clip")
    return jnp.where(best_S[:, None] >= 0, drafts_SK, -1)


def draft(speculation: Speculation, rows: RowTokens, row_S: Any) -> RowTokens:
    """Drafts for some rows; the newest token of a row is the first that is not computed."""
    s = speculation
    drafts_SK = look_up(
        rows.history_RL[row_S], rows.num_computed_R[row_S] + 1, s.prompt_lookup_min, s.prompt_lookup_max,
        s.num_speculative_tokens,
    )  # fmt: skip
    return rows._replace(drafts_RK=rows.drafts_RK.at[row_S].set(drafts_SK))


def load_history(rows: RowTokens, packed: Any) -> RowTokens:
    """Write one upload of `pack_history`."""
    nth_C = jnp.arange(CHUNK, dtype=jnp.int32)
    place_C = jnp.where(nth_C < packed[2], packed[1] + nth_C, rows.history_RL.shape[1])
    history_RL = rows.history_RL.at[packed[0], place_C].set(packed[HEADER:], mode="drop")
    return rows._replace(history_RL=history_RL)


def pack_history(row: int, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Uploads [HEADER + CHUNK], int32, of all that is known of a row."""
    for first in range(0, len(token_ids), CHUNK):
        chunk = token_ids[first : first + CHUNK]
        packed = np.zeros(HEADER + CHUNK, np.int32)
        packed[:HEADER] = row, first, len(chunk)
        packed[HEADER : HEADER + len(chunk)] = chunk
        yield packed


def lower_draft(shapes: Shapes, speculation: Speculation, size: int) -> jax.stages.Lowered:
    step = jax.jit(partial(draft, speculation), donate_argnums=(0,), out_shardings=shapes.functions.replicated)
    return step.lower(shapes.rows, shapes.packed(size))


def lower_load_history(shapes: Shapes) -> jax.stages.Lowered:
    step = jax.jit(load_history, donate_argnums=(0,), out_shardings=shapes.functions.replicated)
    return step.lower(shapes.rows, shapes.packed(HEADER + CHUNK))


class NgramDrafter:
    """Dispatches the programs above; the drafts stay on the device."""

    def admit(self, device: Device, row: int, request: NewRequestData) -> None:
        for packed in pack_history(row, request.token_ids):
            device.state.rows = device.call(ProgramKey(LOAD_KIND), device.state.rows, packed)

    def propose(self, device: Device, key: ProgramKey, rows: np.ndarray, null_row: int) -> None:
        """Draft for `rows` of the step that is dispatched next."""
        packed = np.full(key.size, null_row, np.int32)
        packed[: len(rows)] = rows
        device.state.rows = device.call(key, device.state.rows, packed)

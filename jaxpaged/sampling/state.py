"""What the full sampling program keeps on the device for each row, and how a row is filled.

A request owns one row from admission to its end. If it needs the full program, its row is written at admission, and
again after preemption: `load_row` with one fixed-size upload, `load_tokens` with one upload per 512 known tokens.
A row that does not need the full program is not written at all; `Feature` bits keep it from being read.

The packing functions run on the host, the loading functions on the device; this module does not know how logits are
changed by what is kept here.

Letters: P parameters of custom logits processors.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.sampling.rows import RowParams
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Feature
from jaxpaged.sampling_params.limits import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_MASKED_STOP_IDS,
)

CHUNK = 512
"""Tokens in one upload of `load_tokens`."""
TOKENS_HEADER = 4  # row, whether to forget what the row held, number of tokens, index of the first output token
MOST_COUNTED = 2**15 - 1
BAD_WORD_LAST = 0
"""Distance of a bad word's last token from its end."""
NO_DISTANCE = -1


@flax.struct.dataclass
class SamplingState:
    """R rows and a last one for padding; V is the padded vocabulary, W = ceil(V / 32).

    seen_RV: 2 * (occurrences in the output) + (occurs in the prompt). 16 bits, since this is the one array that grows
        with rows times vocabulary: 34 MB for 64 rows of 262,144 tokens, and a token's occurrences beyond 32,767
        are not counted.
    recent_RH: the last tokens of the output, newest last, -1 before it began; for bad words.
    bias_*, stop_ids, logprob_ids: padded with V, which no scatter reaches; logprob_ids with 0.
    bad_*: bad words one after the other: token, number of the word, distance from the word's end.
    allowed_bits_RW: bit v % 32 of word v // 32 allows token v.
    custom_RP: parameters of custom logits processors; None in engines whose processors have none.
    trace_RL: the tokens of outputs that are given; L is the most that they may have. None in engines that take none.

    What has no numbers is None and no array of width 0: XLA copies such arrays, too.
    """

    seen_RV: jax.Array
    recent_RH: jax.Array
    bias_ids_RJ: jax.Array
    bias_values_RJ: jax.Array
    stop_ids_RJ: jax.Array
    bad_tokens_RJ: jax.Array
    bad_words_RJ: jax.Array
    bad_distances_RJ: jax.Array
    logprob_ids_RK: jax.Array
    allowed_bits_RW: jax.Array
    custom_RP: jax.Array | None = None
    trace_RL: jax.Array | None = None


WIDTHS = {
    "recent_RH": MAX_BAD_WORD_LENGTH,
    "bias_ids_RJ": MAX_LOGIT_BIAS_IDS,
    "bias_values_RJ": MAX_LOGIT_BIAS_IDS,
    "stop_ids_RJ": MAX_MASKED_STOP_IDS,
    "bad_tokens_RJ": MAX_BAD_WORD_TOKENS,
    "bad_words_RJ": MAX_BAD_WORD_TOKENS,
    "bad_distances_RJ": MAX_BAD_WORD_TOKENS,
    "logprob_ids_RK": MAX_LOGPROB_TOKEN_IDS,
}
DTYPES = {
    "seen_RV": np.uint16,
    "bias_values_RJ": np.float32,
    "allowed_bits_RW": np.uint32,
    "custom_RP": np.float32,
}


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Sizes of a `SamplingState`. `vocab_size` is the padded one, that of the logits."""

    max_num_seqs: int
    vocab_size: int
    num_custom_params: int = 0
    most_traced: int = 0

    def widths(self) -> dict[str, int]:
        """Field -> entries per row, in the order in which `load_row` gets them; without those that grow with the
        vocabulary and with outputs, `seen_RV` and `trace_RL`."""
        of_custom = {"custom_RP": self.num_custom_params} if self.num_custom_params else {}
        return WIDTHS | {"allowed_bits_RW": -(-self.vocab_size // 32)} | of_custom

    @property
    def packed_size(self) -> int:
        """Entries in one upload of `load_row`."""
        return 1 + sum(self.widths().values())

    def abstract(self) -> SamplingState:
        """Shapes and types, for compiling ahead of time."""
        widths = {"seen_RV": self.vocab_size} | self.widths()
        widths |= {"trace_RL": self.most_traced} if self.most_traced else {}
        return SamplingState(
            **{
                name: jax.ShapeDtypeStruct((self.max_num_seqs + 1, width), DTYPES.get(name, np.int32))
                for name, width in widths.items()
            }
        )

    def zeros(self) -> SamplingState:
        """A state in which no row has been written."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract())


# ---- host: packing -------------------------------------------------------------------------------


def pack_row(
    layout: StateLayout,
    row: int,
    params: SamplingParams,
    *,
    eos_token_id: int | None = None,
    output_token_ids: Sequence[int] = (),
    custom_params: np.ndarray | None = None,
) -> np.ndarray:
    """The upload [layout.packed_size], int32, that fills `row`, whatever the row held before.

    `output_token_ids` are those drawn before a preemption. `custom_params` [P]: see `custom.py`.
    """
    bias = params.logit_bias or {}
    stop_ids = masked_stop_ids(params, eos_token_id)
    recent = output_token_ids[-MAX_BAD_WORD_LENGTH:]
    values = {
        "recent_RH": padded(recent[::-1], MAX_BAD_WORD_LENGTH, -1)[::-1],
        "bias_ids_RJ": padded(list(bias), MAX_LOGIT_BIAS_IDS, layout.vocab_size),
        "bias_values_RJ": padded(list(bias.values()), MAX_LOGIT_BIAS_IDS, 0.0),
        "stop_ids_RJ": padded(stop_ids, MAX_MASKED_STOP_IDS, layout.vocab_size),
        "logprob_ids_RK": padded(params.logprob_token_ids or [], MAX_LOGPROB_TOKEN_IDS, 0),
        "allowed_bits_RW": allowed_bits(params.allowed_token_ids, layout.vocab_size),
        "custom_RP": np.zeros(layout.num_custom_params) if custom_params is None else custom_params,
        **flat_bad_words(params.bad_words_token_ids or []),
    }
    packed, offset = np.empty(layout.packed_size, np.int32), 1
    packed[0] = row
    for name, width in layout.widths().items():
        packed[offset : offset + width] = np.asarray(values[name], DTYPES.get(name, np.int32)).view(np.int32)
        offset += width
    return packed


def masked_stop_ids(params: SamplingParams, eos_token_id: int | None) -> list[int]:
    """The ids that `min_tokens` holds back."""
    if not params.min_tokens:
        return []
    eos = [] if eos_token_id is None or params.ignore_eos else [eos_token_id]
    return list(dict.fromkeys([*params.stop_token_ids, *eos]))


def padded(values: Sequence[float], size: int, filler: float) -> np.ndarray:
    assert len(values) <= size, f"{len(values)} values for {size} places"
    array = np.full(size, filler, np.float32 if isinstance(filler, float) else np.int32)
    array[: len(values)] = values
    return array


def allowed_bits(token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray:
    num_words = -(-vocab_size // 32)
    if token_ids is None:
        return np.full(num_words, 0xFFFFFFFF, np.uint32)
    allowed = np.zeros(num_words * 32, bool)
    allowed[token_ids] = True
    return np.packbits(allowed, bitorder="little").view("<u4")


def pack_masks(
    masks_NW: np.ndarray, num_tokens: Sequence[int], num_most: int, size: int, vocab_size: int
) -> np.ndarray:
    """The masks [num_most, size, ceil(vocab_size / 32)] of a step, from a line for each of the `num_tokens` that each
    row may get: fewer rows and, where the logits are padded, fewer words. What nobody uses allows everything."""
    packed = np.full((num_most, size, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    if not num_tokens:
        return packed
    nth_N = np.concatenate([np.arange(count) for count in num_tokens])
    row_N = np.repeat(np.arange(len(num_tokens)), num_tokens)
    packed[nth_N, row_N, : masks_NW.shape[1]] = masks_NW
    packed[nth_N, row_N, masks_NW.shape[1] :] = 0
    return packed


def flat_bad_words(words: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    tokens = [token for word in words for token in word]
    numbers = [number for number, word in enumerate(words) for _ in word]
    distances = [len(word) - 1 - i for word in words for i in range(len(word))]
    return {
        "bad_tokens_RJ": padded(tokens, MAX_BAD_WORD_TOKENS, -1),
        "bad_words_RJ": padded(numbers, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS),
        "bad_distances_RJ": padded(distances, MAX_BAD_WORD_TOKENS, NO_DISTANCE),
    }


def pack_tokens(row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> Iterator[np.ndarray]:
    """Uploads [TOKENS_HEADER + CHUNK], int32, for `load_tokens`: all known tokens of a row, prompt first.

    Only rows with penalties need them. The first upload makes the row forget its last owner.
    """
    for first in range(0, max(len(token_ids), 1), CHUNK):
        chunk = token_ids[first : first + CHUNK]
        packed = np.zeros(TOKENS_HEADER + CHUNK, np.int32)
        packed[:TOKENS_HEADER] = row, first == 0, len(chunk), max(num_prompt_tokens - first, 0)
        packed[TOKENS_HEADER : TOKENS_HEADER + len(chunk)] = chunk
        yield packed


def pack_trace(row: int, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Uploads of the same size for `load_trace`: the tokens of an output that is given."""
    for first in range(0, len(token_ids), CHUNK):
        chunk = token_ids[first : first + CHUNK]
        packed = np.zeros(TOKENS_HEADER + CHUNK, np.int32)
        packed[:TOKENS_HEADER] = row, first, len(chunk), 0
        packed[TOKENS_HEADER : TOKENS_HEADER + len(chunk)] = chunk
        yield packed


# ---- device: loading and recording ---------------------------------------------------------------


def load_row(state: SamplingState, packed_N: jax.Array) -> SamplingState:
    """Write one row, from `pack_row`, as far as `StateLayout.widths` has its fields."""
    row, offset, fields = packed_N[0], 1, {}
    for name in StateLayout(0, state.seen_RV.shape[1], num_custom_params(state)).widths():
        array = getattr(state, name)
        line = jax.lax.bitcast_convert_type(packed_N[offset : offset + array.shape[1]], array.dtype)
        fields[name] = array.at[row].set(line)
        offset += array.shape[1]
    assert offset == len(packed_N), f"an upload of {len(packed_N)} entries for a row of {offset}"
    return state.replace(**fields)


def num_custom_params(state: SamplingState) -> int:
    return 0 if state.custom_RP is None else state.custom_RP.shape[1]


def load_tokens(state: SamplingState, packed_N: jax.Array) -> SamplingState:
    """Count one upload of `pack_tokens`."""
    row, forget, count, first_output = packed_N[:TOKENS_HEADER]
    token_ids_C = packed_N[TOKENS_HEADER:]
    place_C = jnp.arange(len(token_ids_C))
    valid_C, output_C = place_C < count, place_C >= first_output
    nothing_V = jnp.zeros(state.seen_RV.shape[1], jnp.int32)
    occurrences_V = nothing_V.at[token_ids_C].add(valid_C & output_C)
    in_prompt_V = nothing_V.at[token_ids_C].max((valid_C & ~output_C).astype(jnp.int32))
    before_V = jnp.where(forget == 1, 0, state.seen_RV[row].astype(jnp.int32))
    counted_V = jnp.minimum((before_V >> 1) + occurrences_V, MOST_COUNTED)
    seen_V = (counted_V << 1) | (before_V & 1) | in_prompt_V
    return state.replace(seen_RV=state.seen_RV.at[row].set(seen_V.astype(jnp.uint16)))


def load_trace(state: SamplingState, packed_N: jax.Array) -> SamplingState:
    """Keep one upload of `pack_trace`."""
    assert state.trace_RL is not None, "only engines that take outputs load some"
    row, first, count, _ = packed_N[:TOKENS_HEADER]
    token_ids_C = packed_N[TOKENS_HEADER:]
    place_C = jnp.arange(len(token_ids_C))
    place_C = jnp.where(place_C < count, first + place_C, state.trace_RL.shape[1])
    return state.replace(trace_RL=state.trace_RL.at[row, place_C].set(token_ids_C, mode="drop"))


def custom_params(state: SamplingState, rows: RowParams) -> jax.Array:
    """[S, P]: the numbers of custom logits processors for the rows of a step."""
    return jnp.zeros((len(rows.row_S), 0)) if state.custom_RP is None else state.custom_RP[rows.row_S]


def given_tokens(state: SamplingState, rows: RowParams, tokens_S: jax.Array) -> jax.Array:
    """The drawn tokens, but in rows whose outputs are given those that come next."""
    if state.trace_RL is None:
        return tokens_S
    nth_S = jnp.clip(rows.num_output_S, 0, state.trace_RL.shape[1] - 1)
    return jnp.where(rows.has(Feature.TRACE), state.trace_RL[rows.row_S, nth_S], tokens_S)


def record_tokens(state: SamplingState, rows: RowParams, tokens_S: jax.Array) -> SamplingState:
    """Count the drawn tokens, and append them to the recent ones, in the rows that will look at them."""
    nowhere = len(state.seen_RV)
    counted_S = jnp.where(rows.has(Feature.PENALTIES), rows.row_S, nowhere)
    full_S = (state.seen_RV[rows.row_S, tokens_S] >> 1) >= MOST_COUNTED
    more_S = jnp.where(full_S, 0, 2).astype(jnp.uint16)
    moved_S = jnp.where(rows.has(Feature.BAD_WORDS), rows.row_S, nowhere)
    recent_SH = jnp.concatenate([state.recent_RH[rows.row_S, 1:], tokens_S[:, None]], axis=1)
    return state.replace(
        seen_RV=state.seen_RV.at[counted_S, tokens_S].add(more_S, mode="drop"),
        recent_RH=state.recent_RH.at[moved_S].set(recent_SH, mode="drop"),
    )

"""The sampler's programs as an engine calls them: compiled once, on rows that requests own."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.sampling.custom import NO_PROCESSORS, CustomProcessors
from jaxpaged.sampling.limits import LimitsMethod
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.sampler import SampleOutput, sample_full, sample_plain
from jaxpaged.sampling.state import SamplingState, StateLayout, load_row, load_tokens, pack_row, pack_tokens
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels.top_k import choose_backend

NUM_CANDIDATES = 8  # less than the vocabularies here, so that both ways to draw are taken

BY_CANDIDATES = LimitsMethod(num_candidates=NUM_CANDIDATES, largest=choose_backend("auto", jax.default_backend()))

plain = jax.jit(functools.partial(sample_plain, method=BY_CANDIDATES))
full = jax.jit(
    functools.partial(sample_full, method=BY_CANDIDATES),
    static_argnames=("logprobs_mode", "max_logprobs", "custom"),
)
write_row = jax.jit(load_row)
write_tokens = jax.jit(load_tokens)


@dataclass
class Request:
    params: SamplingParams
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def sample_plainly(
    logits_SV: np.ndarray, requests: Sequence[Request], *, rows: Sequence[int] = (), bucket: int = 4, size: int = 8
) -> SampleOutput:
    """Draw for `requests` in the plain program. They own the first rows, or `rows`, of `size`."""
    table, owned = SamplingRows(size), list(rows) or list(range(len(requests)))
    for row, request in zip(owned, requests):
        table.set(row, request.params)
    return plain(padded(logits_SV, bucket), pack(table, owned, requests, bucket))


class Engine:
    """Rows and state; `add` is an admission, `sample` a step of the full program."""

    def __init__(self, vocab_size: int, custom: CustomProcessors = NO_PROCESSORS, max_num_seqs: int = 8):
        self.layout = StateLayout(max_num_seqs, vocab_size, custom.num_params)
        self.custom, self.table = custom, SamplingRows(max_num_seqs)
        self.state: SamplingState = self.layout.zeros()

    def add(self, row: int, request: Request) -> None:
        bits, numbers = self.custom.of(request.params)
        self.table.set(row, request.params, bits)
        packed = pack_row(self.layout, row, request.params, output_token_ids=request.output, custom_params=numbers)
        self.state = write_row(self.state, packed)
        for tokens in pack_tokens(row, request.prompt + request.output, len(request.prompt)):
            self.state = write_tokens(self.state, tokens)

    def sample(
        self,
        logits_SV: np.ndarray,
        rows: Sequence[int],
        requests: Sequence[Request],
        *,
        bucket: int = 4,
        logprobs_mode: str = "processed_logits",
        mask_bits_SW: np.ndarray | None = None,
    ) -> SampleOutput:
        self.state, output = full(
            padded(logits_SV, bucket),
            self.state,
            pack(self.table, rows, requests, bucket),
            logprobs_mode=logprobs_mode,
            max_logprobs=self.layout.vocab_size,
            custom=self.custom,
            mask_bits_SW=mask_bits_SW,
        )
        return output


def pack(table: SamplingRows, rows: Sequence[int], requests: Sequence[Request], bucket: int) -> np.ndarray:
    positions = np.array([request.position for request in requests], np.int64)
    num_output = np.array([len(request.output) for request in requests], np.int64)
    return table.pack(np.array(rows, np.int64), positions, num_output, bucket)


def padded(logits_SV: np.ndarray, bucket: int) -> jax.Array:
    """Lines that no row fills hold anything: here, the first line again."""
    missing = bucket - len(logits_SV)
    return jnp.asarray(np.concatenate([logits_SV, np.repeat(logits_SV[:1], missing, axis=0)]).astype(np.float32))


def vector_of(output: SampleOutput, line: int) -> np.ndarray:
    """The processed logits [V] of one line, when all of the vocabulary was asked for."""
    ids, values = (np.asarray(a)[line, 1:] for a in (output.logprobs.token_ids_SJ, output.logprobs.logprobs_SJ))
    vector = np.full(len(ids), np.nan, np.float32)
    vector[ids] = values
    return vector

"""Every backend of latent attention against dense attention in float64, with everything poisoned that nobody owns."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mla_paged_attention as mla
from pallas_kernels.context_share import ContextShare
from pallas_kernels.mla_paged_attention import gpu, tpu
from pallas_kernels.mla_paged_attention.cases import CASES, Case
from pallas_kernels.ragged_paged_attention import KVTensor
from pallas_kernels.testing import (
    QUICK_COMPILE,
    dense_attention,
    is_simulated,
    largest_value,
    quantized_values,
    run_once,
    tolerance,
)

INTERPRET = {"reference": False, "tpu": pltpu.InterpretParams(detect_races=True), "gpu": is_simulated("gpu")}
CASE = {case.name: case for case in CASES}


class Step:
    """Random numbers for a case in float64, representable in its type; slots and ids that nobody needs are poison."""

    def __init__(self, case: Case):
        self.case, self.rng = case, np.random.default_rng(0)
        T, N, C, P = case.num_tokens, case.num_heads, case.latent_dim, case.rope_dim
        self.q_TNC, self.q_rope_TNP = self.normal(T, N, C), self.normal(T, N, P)
        self.stored, self.scales = zip(*(self._numbers(sum(row)) for row in case.rows)) if case.rows else ((), ())
        of_parts = np.repeat([0, 1], (C, P))
        self.contexts = [values_PW * scales_P2[:, of_parts] for values_PW, scales_P2 in zip(self.stored, self.scales)]
        self.start_R1 = np.cumsum([0] + [new for _, new in case.rows] + [0] * case.empty_rows).astype(np.int32)
        self.seq_lens_R = np.array([sum(row) for row in case.rows] + [0] * case.empty_rows, np.int32)
        self.new_TW = np.full((T, C + P), np.nan)
        for (cached, _), start, context_PW in zip(case.rows, self.start_R1, self.contexts):
            self.new_TW[start : start + len(context_PW) - cached] = context_PW[cached:]
        self._make_cache()

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(self.case.dtype).astype(np.float64)

    def _numbers(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(what a cache holds of so many tokens, scales of latents and of rope keys): exact, and each token's largest
        number is what makes its scale."""
        C, P, kind = self.case.latent_dim, self.case.rope_dim, self.case.kv_scales
        values_PW, scales_P2 = self.normal(tokens, C + P), np.ones((tokens, 2))
        if kind == "none":
            return values_PW.astype(self.case.cache_dtype).astype(np.float64), scales_P2
        values_PW = quantized_values(self.rng, values_PW.shape, self.case.cache_dtype).astype(np.float64)
        largest = largest_value(self.case.cache_dtype)
        values_PW[:, [3, C + 1]] = largest, -largest
        spread = self.rng.integers(0, 3, (tokens, 2)) if kind == "token" else [[0, 1]]
        return values_PW, scales_P2 * 2.0 ** (spread - np.round(np.log2(largest / 2)))

    def _make_cache(self) -> None:
        S = self.case.block_size
        num_needed = [-(-n // S) for n in self.seq_lens_R]
        num_blocks = sum(num_needed) + 2
        ids = iter(self.rng.permutation(np.arange(1, num_blocks)))
        shape = (max(len(num_needed), 1), max(num_needed, default=0) + 2)
        self.tables_RM = self.rng.choice([-7, num_blocks, 10**8], size=shape).astype(np.int32)
        poison = -77.0 if self.case.cache_dtype == "int8" else np.nan
        self.cache_BSW = np.full((num_blocks, S, self.new_TW.shape[1]), poison)
        self.scales_B2S = np.full((num_blocks, 2, S), np.nan)
        for row, (cached, _) in enumerate(self.case.rows):
            self.tables_RM[row, : num_needed[row]] = [next(ids) for _ in range(num_needed[row])]
            self._put(row, np.arange(cached))

    def _put(self, row: int, position: np.ndarray) -> None:
        S = self.case.block_size
        blocks, slots = self.tables_RM[row, position // S], position % S
        self.cache_BSW[blocks, slots] = self.stored[row][position]
        self.scales_B2S[blocks, :, slots] = self.scales[row][position]

    def cache(self, backend: str, count: int = 1, nth: int = 0) -> KVTensor:
        """The cache of a backend, or the `nth` of `count` pieces of every block of it."""
        case, S = self.case, self.case.block_size // count
        sizes = len(self.cache_BSW), S, case.latent_dim, case.rope_dim
        lanes = mla.cache_shape(*sizes, backend)[2] - self.cache_BSW.shape[2]
        cache_BSW = np.pad(self.cache_BSW[:, nth * S : (nth + 1) * S], ((0, 0), (0, 0), (0, lanes)))
        scales = ()
        if case.kv_scales == "head":
            scales = self.scales[0][0][:, None]
        elif case.kv_scales == "token":
            more = mla.scales_shape(len(self.cache_BSW), S, backend)[2] - S
            scales = (np.pad(self.scales_B2S, ((0, 0), (0, 0), (0, more)), constant_values=np.nan),)
        return KVTensor((cache_BSW.astype(case.cache_dtype),), tuple(x.astype(np.float32) for x in scales))

    def check_cache(self, caches: list[KVTensor]) -> None:
        """Pieces of every block after the step hold its tokens, and else what they did."""
        for row, (cached, new) in enumerate(self.case.rows):
            self._put(row, np.arange(cached, cached + new))
        W, S = self.cache_BSW.shape[2], self.case.block_size
        after_BSW = np.concatenate([np.asarray(cache.arrays[0], np.float64)[..., :W] for cache in caches], axis=1)
        np.testing.assert_array_equal(after_BSW, self.cache_BSW)
        if self.case.kv_scales == "token":
            np.testing.assert_array_equal(np.asarray(caches[0].scales[0])[..., :S], self.scales_B2S)

    def expected(self) -> np.ndarray:
        out_TNC, C = np.zeros(self.q_TNC.shape), self.case.latent_dim
        q_TNW = np.concatenate([self.q_TNC, self.q_rope_TNP], axis=2)
        for row, context_PW in enumerate(self.contexts):
            tokens = slice(*self.start_R1[row : row + 2])
            values_P1W = context_PW[:, None].copy()
            out_TNC[tokens] = dense_attention(q_TNW[tokens], context_PW[:, None], values_P1W, scale=scale(self.case))[
                ..., :C
            ]
        return out_TNC


def scale(case: Case) -> float:
    return (case.latent_dim + case.rope_dim) ** -0.5


def run(step: Step, backend: str) -> tuple[np.ndarray, KVTensor]:
    """out_TNC and the cache after the step."""
    return next(run_parts(step, backend, 1))


def run_parts(step: Step, backend: str, count: int) -> Iterator[tuple[np.ndarray, KVTensor]]:
    """The same of each holder of a part of every block; of several what they leave undivided."""
    case, C, S = step.case, step.case.latent_dim, step.case.block_size // count

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def attend(nth, cache, q_TNC, q_rope_TNP, latent_TC, rope_TP, *where):
        share = ContextShare(nth, count, S) if count > 1 else None
        metadata = mla.make_metadata(*where, num_tokens=case.num_tokens, block_size=S, share=share)
        operands = q_TNC, q_rope_TNP, latent_TC, rope_TP, cache, metadata
        settings = {"scale": scale(case), "backend": backend, "interpret": INTERPRET[backend]}
        return mla.mla_paged_attention(*operands, **settings, undivided=count > 1)

    for nth in range(count):
        arrays = (step.q_TNC, step.q_rope_TNP, step.new_TW[:, :C], step.new_TW[:, C:])
        arrays = (jnp.asarray(x, case.dtype) for x in arrays)
        where = step.start_R1, step.seq_lens_R, step.tables_RM
        cache = jax.tree.map(jnp.asarray, step.cache(backend, count, nth))
        out_TNC, cache = attend(jnp.int32(nth), cache, *arrays, *where)
        yield np.asarray(out_TNC, np.float64), cache


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """Of the kernel for TPUs, so that contexts are several of them; GPUs' interpreter takes its time for programs."""
    monkeypatch.setattr(tpu, "ITEMS", 2)
    monkeypatch.setattr(tpu, "ITEM_SLOTS", 128)
    monkeypatch.setattr(gpu, "PROGRAMS", 80)


@pytest.mark.parametrize("backend", INTERPRET)
def test_parts_of_contexts_that_lie_apart_become_the_whole(backend):
    """Some tokens see nothing of a part, and padding nothing of any."""
    step = Step(dataclasses.replace(CASE["block_size 48, which divides no chunk"], rows=((0, 20), (90, 1), (33, 3))))
    parts, caches = zip(*run_parts(step, backend, 3))
    highest_TN = np.max([part_TNP[..., -1] for part_TNP in parts], axis=0)
    sums_TNP = sum(part_TNP[..., :-1] * np.exp(part_TNP[..., -1:] - highest_TN[..., None]) for part_TNP in parts)
    out_TNC = sums_TNP[..., :-1] / np.maximum(sums_TNP[..., -1:], 1e-30)
    assert np.abs(out_TNC - step.expected()).max() <= tolerance(step.case.dtype, 91)
    assert step.case.padding and not out_TNC[-step.case.padding :].any()
    step.check_cache(caches)


def operands(case: Case, backend: str):
    N, C, P = case.num_heads, case.latent_dim, case.rope_dim
    q = [np.zeros((case.num_tokens, N, size), case.dtype) for size in (C, P)]
    cache = mla.cache_zeros(4, case.block_size, C, P, case.cache_dtype, backend, case.kv_scales)
    return *q, cache


PAIRS = [
    (backend, case)
    for backend in INTERPRET
    for case in CASES
    if mla.backends(backend, *operands(case, backend))[backend] is None
]


# What a simulated kernel is asked in the suite; the others are the same code with other sizes.
QUICK = ("decodes and prompts in any order", "float32", "latent of 512, rope of 64", "int8, scales of tokens")


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(
            backend,
            case,
            id=f"{backend}: {case.name}",
            marks=() if backend == "reference" or case.name in QUICK else pytest.mark.exhaustive,
        )
        for backend, case in PAIRS
    ],
)
def test_a_case_equals_dense_attention_and_changes_only_the_slots_of_its_new_tokens(backend, case):
    step = Step(case)
    out_TNC, cache = run(step, backend)
    difference_TNC = np.abs(out_TNC - step.expected())
    assert difference_TNC.max(initial=0) <= tolerance(case.dtype, max(map(sum, case.rows), default=1))
    assert not out_TNC[case.num_tokens - case.padding :].any()
    step.check_cache([cache])


@pytest.mark.exhaustive
def test_steps_of_their_own_size(monkeypatch):
    monkeypatch.undo()
    step = Step(Case("two", ((700, 1), (40, 1), (5, 6))))
    assert np.abs(run(step, "tpu")[0] - step.expected()).max() <= tolerance(step.case.dtype, 701)


def test_kernels_take_most_cases():
    taken = {backend: {case.name for name, case in PAIRS if name == backend} for backend in INTERPRET}
    assert taken["reference"] == set(CASE)
    assert taken["gpu"] == {case.name for case in CASES if case.dtype != "float32"}
    assert taken["tpu"] == set(CASE) - {"float16", "12 heads, block_size 64"}


def test_a_prompt_in_chunks_equals_the_whole_prompt():
    case = Case("a prompt", ((0, 60),), padding=0, empty_rows=0, dtype="float32")
    step = Step(case)
    metadata = functools.partial(mla.make_metadata, block_size=case.block_size)
    C, cache, outs = case.latent_dim, KVTensor((jnp.asarray(step.cache_BSW, jnp.float32),)), []

    def attend(cache, q_TNC, q_rope_TNP, new_TW, *where):
        where = metadata(*where, num_tokens=len(q_TNC))
        return mla.mla_paged_attention(
            q_TNC, q_rope_TNP, new_TW[:, :C], new_TW[:, C:], cache, where, scale=0.1, backend="reference"
        )

    whole = (step.q_TNC, step.q_rope_TNP, step.new_TW)
    for first in (0, 20, 40):
        part = (x[first : first + 20].astype(np.float32) for x in whole)
        where = np.array([0, 20], np.int32), np.array([first + 20], np.int32), step.tables_RM
        out_TNC, cache = run_once(attend, cache, *part, *where)
        outs.append(out_TNC)
    together_TNC, _ = run_once(
        attend,
        KVTensor((step.cache_BSW.astype(np.float32),)),
        *(x.astype(np.float32) for x in whole),
        step.start_R1,
        step.seq_lens_R,
        step.tables_RM,
    )
    np.testing.assert_allclose(np.concatenate(outs), together_TNC, atol=2e-6)


# ---- bad input -----------------------------------------------------------------------------------

BASE = {
    "q_TNC": (5, 16, 128),
    "q_rope_TNP": (5, 16, 32),
    "latent_TC": (5, 128),
    "rope_TP": (5, 32),
    "cache_BSW": (4, 16, 160),
}


@pytest.mark.parametrize(
    ("changes", "backend", "message"),
    [
        ({"q_TNC": (5, 128)}, "reference", r"q_TNC is bfloat16\[5, 128\]; accepted is .*\[T, N, C\]"),
        ({"q_rope_TNP": (5, 8, 32)}, "reference", r"q_rope_TNP is bfloat16\[5, 8, 32\]; accepted is .*\[5, 16, P\]"),
        ({"latent_TC": (5, 64)}, "reference", r"latent_TC is bfloat16\[5, 64\]; accepted is \[5, 128\]"),
        ({"rope_TP": (4, 32)}, "reference", r"rope_TP is bfloat16\[4, 32\]; accepted is \[5, 32\]"),
        ({"cache_BSW": (4, 16, 256)}, "reference", r"cache_BSW is bfloat16\[4, 16, 256\]; accepted is .*\[B, S, 160\]"),
        ({}, "tpu", r"cache_BSW is bfloat16\[4, 16, 160\]; accepted is .*\[B, S, 256\] for backend 'tpu'"),
        ({"cache_BSW": (4, 8, 256)}, "tpu", "block_size = 8; accepted are multiples of 16 for bfloat16"),
        (
            {"q_TNC": (5, 16, 96), "latent_TC": (5, 96), "cache_BSW": (4, 16, 128)},
            "gpu",
            "latents have 96 numbers; acc",
        ),
        ({}, "flashmla", "unknown mla_paged_attention backend 'flashmla'"),
    ],
)
def test_bad_operands_are_refused(changes, backend, message):
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in (BASE | changes).values()]
    zeros_R1, zeros_R, zeros_RM = (np.zeros(shape, np.int32) for shape in ((2,), (1,), (1, 3)))
    metadata = mla.make_metadata(zeros_R1, zeros_R, zeros_RM, num_tokens=5, block_size=16)
    with pytest.raises(ValueError, match=message):
        mla.mla_paged_attention(*arrays[:4], KVTensor((arrays[4],)), metadata, scale=1.0, backend=backend)


def test_auto_chooses_what_is_written_for_the_platform():
    case = CASE["one prompt"]
    chosen = [mla.choose_backend("auto", platform, *operands(case, platform)) for platform in ("cpu", "tpu", "gpu")]
    assert chosen == ["reference", "tpu", "gpu"]

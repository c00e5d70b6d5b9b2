"""Yardsticks of scripts/bench_kernel.py do the same work as ours, and leave out what they cannot do."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_bench import grouped_matmul, mla_paged_attention, quantized_matmul, top_k_top_p, yardsticks
from kernel_bench import ragged_paged_attention as attention
from kernel_bench.subjects import ATTENTION, NAMES, subjects

from pallas_kernels.mla_paged_attention.cases import SERVING_CASES as LATENT
from pallas_kernels.programs import OPS
from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS
from pallas_kernels.testing import dense_attention
from pallas_kernels.timing import Chain
from pallas_kernels.workloads import chain_of

STEP = {step.name: step for step in (*SERVING_STEPS, *TINY_STEPS)}
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}


def result_of(chain):
    """What the first call leaves, in float32."""
    left = jax.jit(chain.function)(chain.state, *chain.operands)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(left)]


def same_work(op, case, chain, **tolerance):
    for other, ours in zip(result_of(chain), result_of(chain_of(op, case, "reference")), strict=True):
        np.testing.assert_allclose(other, ours, **tolerance)


def test_every_op_has_cases_of_both_sizes_and_yardsticks():
    for platform in ("cpu", "gpu", "tpu"):
        for sizes in ("tiny", "serving"):
            found = list(subjects(list(NAMES), sizes, platform))
            assert {subject.op for subject in found} == {*OPS, ATTENTION}
            assert len({(subject.op, subject.name) for subject in found}) == len(found)
            assert all(subject.num_bytes > 0 and subject.yardsticks() for subject in found)


def test_the_largest_few_give_the_least_logit_that_sorting_gives():
    (case,) = OPS["top_k_top_p"].cases.TINY_CASES
    same_work("top_k_top_p", case, top_k_top_p.largest_few(case), rtol=0)
    limits = ((50, 0.5, 0.01), (3, 1.0, 0.0), (64, 0.9, 0.0), (1, 0.1, 0.5))
    case = dataclasses.replace(case, limits=limits)
    same_work("top_k_top_p", case, top_k_top_p.largest_few(case), rtol=0)
    assert top_k_top_p.largest_few(dataclasses.replace(case, limits=((0, 0.9, 0.0),))) is None
    assert top_k_top_p.largest_few(dataclasses.replace(case, limits=((65, 0.9, 0.0),))) is None


def test_dequantised_weights_give_what_our_products_give():
    grouped, channel, _ = OPS["quantized_matmul"].cases.TINY_CASES
    same_work("quantized_matmul", grouped, quantized_matmul.unquantized(grouped), rtol=1e-4, atol=1e-3)
    channel = dataclasses.replace(channel, dtype="float32")
    same_work("quantized_matmul", channel, quantized_matmul.unquantized(channel), rtol=1e-4, atol=1e-3)


def test_products_of_8_bits_are_plain_ones():
    x_TD, y_FD = jnp.asarray([[1, -128], [3, 4]], jnp.int8), jnp.asarray([[127, 127]], jnp.int8)
    out_TF = quantized_matmul.times_transposed(x_TD, y_FD)
    assert (out_TF.dtype, out_TF.tolist()) == (jnp.int32, [[-127 * 127], [7 * 127]])
    float8 = [x.astype(jnp.float8_e4m3fn) for x in (x_TD, jnp.asarray([[1, 2]]))]
    assert quantized_matmul.times_transposed(*float8).dtype == jnp.bfloat16


@pytest.mark.parametrize("case", OPS["grouped_matmul"].cases.TINY_CASES, ids=lambda case: case.name)
def test_ragged_dot_gives_what_our_grouped_product_gives(case):
    case = dataclasses.replace(case, dtype="float32", weights=case.weights.replace("bfloat16", "float32"))
    same_work("grouped_matmul", case, grouped_matmul.ragged(case), rtol=1e-4, atol=1e-3)


def test_latents_attend_as_dense_attention_does():
    for case in OPS["mla_paged_attention"].cases.TINY_CASES:
        chain = mla_paged_attention.dense(dataclasses.replace(case, dtype="float32"), 1, 160, 128)
        q_RQNW, out_RQNW = result_of(chain)
        for row, (q_QNH, kv_PKH) in enumerate(zip(q_RQNW, chain.operands[0])):
            should_QNH = dense_attention(q_QNH, kv_PKH, kv_PKH, scale=160**-0.5)
            np.testing.assert_allclose(out_RQNW[row], should_QNH[..., :128], **FLOAT32)


def test_latent_yardsticks_leave_out_mixed_steps_and_what_takes_too_much_memory(monkeypatch):
    monkeypatch.setattr(mla_paged_attention, "filled_arrays", lambda structs: structs)
    decodes, mixed, *_ = LATENT
    can = [case for case in LATENT if mla_paged_attention.dense(case, 1, 576, 512) is not None]
    assert can == [case for case in LATENT if case is not mixed]
    assert mla_paged_attention.dense(decodes, 128, 192, 128) is not None
    monkeypatch.setattr(mla_paged_attention, "MOST_BYTES", 1e9)
    assert mla_paged_attention.dense(decodes, 128, 192, 128) is None


def test_dense_yardsticks_attend_as_ours_does():
    for name in ("decode, 4 x 64", "prefill, 64"):
        chain = attention.dense_jax(STEP[name], "xla")
        q_RQNH, out_RQNH = result_of(chain)
        for row, (q_QNH, k_PKH, v_PKH) in enumerate(zip(q_RQNH, *chain.operands)):
            should_QNH = dense_attention(q_QNH, k_PKH, v_PKH, scale=STEP[name].shape.head_dim ** -0.5)
            np.testing.assert_allclose(out_RQNH[row], should_QNH, **FLOAT32)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_kernels_of_jax_are_called_as_they_want_to_be(monkeypatch, platform):
    monkeypatch.setattr(attention, "filled_arrays", lambda structs: structs)
    tuned = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes"
    monkeypatch.setattr(f"{tuned}.get_tpu_version", lambda: 5)
    make = {"gpu": attention.paged_jax_gpu, "tpu": attention.paged_jax_tpu}[platform]
    chain = make(STEP["decode, 64 x 2,048"])
    left = jax.eval_shape(chain.function, chain.state, *chain.operands)
    assert {(x.shape, x.dtype) for x in left} == {((64, 32, 128), jnp.dtype(jnp.bfloat16))}
    assert make(STEP["decode, int8 cache"]) is None


def test_dense_attention_leaves_out_what_it_cannot_do():
    can = {name for name, step in STEP.items() if attention.is_rectangular(step)}
    assert {"decode, 64 x 2,048", "prefill, 8,192", "prefill, 16 x 512"} <= can
    assert not can & {
        "decode, long tail",
        "prefill, 2,048 after 6,144",
        "decode, int8 cache",
        "64 decodes and a chunk of 1,024",
    }
    assert attention.paged_jax_gpu(STEP["prefill, 64"]) is None
    assert attention.dense_jax(STEP["decode, window"], "xla") is None


def test_chains_are_timed_and_what_times_itself_is_asked(monkeypatch):
    monkeypatch.setattr(yardsticks, "seconds_per_call", lambda chain, target_s: (chain.state, target_s))
    assert yardsticks.seconds_of(Chain(None, 3), 0.1) == (3, 0.1)
    assert yardsticks.seconds_of(lambda: 7.0, 0.1) == 7.0


def test_without_torch_or_its_gpu_there_is_none():
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is there")
    assert yardsticks.installed_torch() is None
    assert quantized_matmul.unquantized_torch(OPS["quantized_matmul"].cases.SERVING_CASES[0]) is None

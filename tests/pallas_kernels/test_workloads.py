"""Cases with numbers: indices are legal, costs are right, and programs take what they are filled with."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import workloads
from pallas_kernels.programs import OPS, program_of
from pallas_kernels.shapes import array_bytes
from pallas_kernels.workloads import choose_backend, latent_chain, operands_of


def cases_of(op, *sizes):
    return list(itertools.chain.from_iterable(getattr(OPS[op].cases, size) for size in sizes))


def all_cases(*sizes):
    return [pytest.param(op, case, id=f"{op}: {case.name}") for op in OPS for case in cases_of(op, *sizes)]


@pytest.fixture
def no_arrays(monkeypatch):
    """Only small operands are made: pools and weights stay shapes."""
    monkeypatch.setattr(workloads, "filled_arrays", lambda structs: structs)


@pytest.mark.parametrize(("op", "case"), all_cases("TINY_CASES", "SERVING_CASES"))
@pytest.mark.parametrize("backend", ["reference", "tpu", "gpu"])
def test_operands_are_what_the_program_takes(op, case, backend, no_arrays, monkeypatch):
    monkeypatch.setattr(workloads.jax.random, "normal", lambda key, dims: np.zeros(dims, np.float32))
    program = program_of(op, case, backend)
    if program is None:
        with pytest.raises(ValueError, match="cannot take the case"):
            operands_of(op, case, backend)
        return
    filled = operands_of(op, case, backend)
    spelled = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (filled, program.args)]
    assert spelled[0] == spelled[1]


@pytest.mark.parametrize("case", cases_of("grouped_matmul", "TINY_CASES", "SERVING_CASES"), ids=lambda case: case.name)
def test_every_token_has_an_expert(case):
    assert f"{sum(case.sizes)} tokens" in case.name
    assert case.padding == 0


@pytest.mark.parametrize("case", cases_of("mla_paged_attention", "SERVING_CASES"), ids=lambda case: case.name)
def test_each_block_of_the_cache_belongs_to_one_context(case, no_arrays):
    start_R1, length_R, table_RM = map(np.asarray, operands_of("mla_paged_attention", case, "reference")[5:])
    assert start_R1[-1] == case.num_tokens
    used = [table_RM[row, : -(-length // case.block_size)] for row, length in enumerate(length_R)]
    assert sorted(np.concatenate(used)) == list(range(case.num_blocks))


def test_costs_count_what_must_move_and_multiply():
    masks, largest, quantized, grouped, adapters, latent = (OPS[op].cases.CASES[0] for op in OPS)
    assert masks.num_bytes == 3 * 300 * 4
    assert (largest.num_bytes, largest.flops) == (3 * 32_000 * 4 + 3 * 256 * 8, 0)
    assert quantized.num_bytes == 96 * 256 + 96 * 4 + 5 * (256 + 96) * 2
    assert quantized.flops == 2 * 5 * 96 * 256
    zeros = dataclasses.replace(quantized, weights="int4", group=128, zeros=True)
    assert zeros.num_bytes == 96 * 128 + 2 * 2 * 96 * 4 + 5 * (256 + 96) * 2
    assert grouped.num_bytes == 4 * 96 * 256 * 2 + 61 * (256 + 96) * 2  # of seven experts four have tokens
    assert grouped.flops == 2 * 61 * 96 * 256
    int8 = dataclasses.replace(grouped, weights="int8", group=64)
    assert int8.num_bytes == 4 * 96 * 256 + 4 * 4 * 96 * 4 + 61 * (256 + 96) * 2
    assert adapters.num_bytes == 16 * (96 + 160) * 2 + 2 * (96 + 2 * 160) * 2
    assert adapters.flops == 2 * 16 * (96 + 160)
    two = dataclasses.replace(latent, rows=((3, 2), (0, 1)), block_size=4)
    assert two.num_blocks == 3
    assert two.num_bytes == (6 + 2 * 3) * 160 * 2 + 3 * 16 * (160 + 128) * 2
    assert two.flops == 2 * 16 * (160 + 128) * (4 + 5 + 1)
    assert array_bytes("int4", 3, 6) == 9


def test_auto_takes_the_best_backend_that_takes_the_case():
    cases = {case.name: case for case in OPS["quantized_matmul"].cases.SERVING_CASES}
    int8, w8a8 = cases["w8a16, 16 tokens"], cases["w8a8 int8, 2048 tokens"]
    assert choose_backend("quantized_matmul", int8, "auto", "gpu") == "gpu"
    assert choose_backend("quantized_matmul", w8a8, "auto", "gpu") == "reference"
    assert choose_backend("quantized_matmul", int8, "reference", "gpu") == "reference"
    with pytest.raises(ValueError, match="cannot take the case 'w8a8 int8"):
        choose_backend("quantized_matmul", w8a8, "gpu", "gpu")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        choose_backend("quantized_matmul", int8, "gpu", "cpu")


def test_a_call_of_latent_attention_waits_for_the_last_one_and_leaves_its_cache():
    chain = latent_chain(lambda cache, q, x: (q + x, cache * 2), (10, jnp.asarray([7.0, 1.0]), -4))
    cache, q, out = chain.function(chain.state, *chain.operands)
    assert (cache, q.tolist(), out.tolist()) == (20, [0, 1], [-4, -3])
    cache, q, out = chain.function((cache, q, out), *chain.operands)
    assert (cache, q.tolist(), out.tolist()) == (40, [-1, 1], [-5, -3])

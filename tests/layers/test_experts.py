"""Blocks of experts against a loop over tokens in numpy, on one device, split over four, and spread over several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxpaged.layers import experts
from jaxpaged.layers.experts import SIGMOID, SOFTMAX, Experts, Placement, RouterConfig, mixture_of_experts, route
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mlp import Mlp
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.worker.expert_placing import tables

WIDTH, COLUMNS, SHARED, NUM_EXPERTS, NUM_TOKENS, NUM_PADDING = 12, 8, 12, 6, 9, 3
ROUTERS = {
    "one of all": RouterConfig(1, is_normalised=True),
    "all": RouterConfig(6, SOFTMAX),
    "groups": RouterConfig(3, SIGMOID, is_normalised=True, num_groups=3, groups_per_token=2, scale=2.5),
}


def mesh_of(num_spread, num_split):
    """Whole experts on `num_spread` devices each, every one of them split over `num_split`."""
    devices = np.array(jax.devices()[: num_spread * num_split]).reshape(num_spread, num_split)
    return Mesh(devices, MODEL_AXES, axis_types=(AxisType.Auto,) * 2)


def make_block(seed, correction=None):
    rng = np.random.default_rng(seed)
    random = lambda *shape: (rng.standard_normal(shape) / 2).astype(np.float32)
    gate, up, down = (NUM_EXPERTS, COLUMNS, WIDTH), (NUM_EXPERTS, COLUMNS, WIDTH), (NUM_EXPERTS, WIDTH, COLUMNS)
    shared = Mlp(Linear(random(SHARED, WIDTH)), Linear(random(SHARED, WIDTH)), Linear(random(WIDTH, SHARED)))
    router = Linear(random(NUM_EXPERTS, WIDTH))
    block = Experts(
        router, Linear(random(*gate)), Linear(random(*up)), Linear(random(*down)), correction, shared, random(WIDTH)
    )
    return block, random(NUM_TOKENS + NUM_PADDING, WIDTH)


def chosen(x, p, config):
    """(experts, weights) of one token."""
    logits = p.router.weight.astype(np.float64) @ x
    scores = np.exp(logits) / np.exp(logits).sum() if config.score == SOFTMAX else 1 / (1 + np.exp(-logits))
    merits = scores + (0 if p.correction is None else p.correction)
    groups = np.sort(merits.reshape(config.num_groups, -1))[:, -2:].sum(axis=1)
    is_out = np.argsort(np.argsort(-groups)) >= config.groups_per_token
    merits[np.repeat(is_out, NUM_EXPERTS // config.num_groups)] = -np.inf
    best = np.argsort(-merits)[: config.experts_per_token]
    weights = scores[best] / (scores[best].sum() if config.is_normalised else 1)
    return best, weights * config.scale


def expected(x, p, config):
    """What the block makes of one token."""
    silu = lambda v: v / (1 + np.exp(-v))
    mlp = lambda gate, up, down: down @ (silu(gate @ x) * (up @ x))
    parts = (p.gate_proj, p.up_proj, p.down_proj)
    routed = sum(w * mlp(*(part.weight[e] for part in parts)) for e, w in zip(*chosen(x, p, config), strict=True))
    shared = mlp(p.shared.gate_proj.weight, p.shared.up_proj.weight, p.shared.down_proj.weight)
    return routed + shared / (1 + np.exp(-p.shared_gate @ x))


@pytest.mark.parametrize(
    ("name", "num_devices", "least_pairs"),
    [
        ("one of all", (1, 1), 128),
        ("all", (1, 4), 128),
        ("groups", (1, 4), 128),
        ("groups", (2, 2), 128),
        ("one of all", (6, 1), 1),
        ("all", (3, 1), 8),
        ("groups", (6, 1), 2),
    ],
)
def test_a_block_is_the_weighed_sum_of_its_experts_and_padding_goes_to_none(
    name, num_devices, least_pairs, monkeypatch
):
    """Small `least_pairs` let a device take several turns."""
    monkeypatch.setattr(experts, "LEAST_PAIRS", least_pairs)
    config, correction = ROUTERS[name], np.linspace(-0.4, 0.4, NUM_EXPERTS).astype(np.float32)
    p, x_TD = make_block(1, correction if config.score == SIGMOID else None)
    x_TD[NUM_TOKENS:] = np.nan
    run = jax.jit(lambda x_TD, p, n: mixture_of_experts(x_TD, p, config, "silu", n, mesh_of(*num_devices))[0])
    out_TD = run(x_TD, p, NUM_TOKENS)[:NUM_TOKENS]
    np.testing.assert_allclose(out_TD, [expected(x, p, config) for x in x_TD[:NUM_TOKENS]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_summands", [1, experts.MOST_SUMMANDS, experts.MOST_SUMMANDS + 1])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_pairs_of_a_token_are_added_up_weighed_or_not(platform, num_summands):
    rng = np.random.default_rng(5)
    y_PD = rng.standard_normal((4 * num_summands, WIDTH)).astype(np.float32)
    rank_TJ, weight_TJ = rng.permutation(len(y_PD)).reshape(4, -1), rng.random((4, num_summands), np.float32)
    for weights, factors in ((weight_TJ, weight_TJ), (None, np.ones_like(weight_TJ))):
        sum_TD = experts.sum_of_pairs(jnp.asarray(y_PD), jnp.asarray(rank_TJ), weights, platform)
        np.testing.assert_allclose(sum_TD, np.einsum("tjd,tj->td", y_PD[rank_TJ], factors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("least_pairs", [2, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_all_tokens_may_go_to_one_device_and_none_to_the_others(least_pairs, monkeypatch):
    """The pairs of that device, all there are, take as many turns as they need; biases count once."""
    monkeypatch.setattr(experts, "LEAST_PAIRS", least_pairs)
    p, x_TD = make_block(3, np.array([0, 0, 9, 8, 0, 0], np.float32))
    biases = np.random.default_rng(4).standard_normal((3, NUM_EXPERTS, WIDTH)).astype(np.float32)
    p = p.replace(
        gate_proj=p.gate_proj.replace(bias=biases[0, :, :COLUMNS]), down_proj=p.down_proj.replace(bias=biases[1])
    )
    run = lambda mesh: jax.jit(
        lambda x_TD, p: mixture_of_experts(x_TD, p, RouterConfig(2, SIGMOID), "silu", len(x_TD), mesh)[0]
    )(x_TD, p)
    alone = run(mesh_of(1, 1))
    np.testing.assert_allclose(run(mesh_of(3, 2)), alone, rtol=1e-4, atol=1e-5)


def test_experts_are_found_where_they_are_and_their_tokens_are_counted():
    """Six of them in eight places, in some order: an expert with several places shares its tokens out."""
    p, x_TD = make_block(5)
    expert_e, config = np.array([3, 0, 5, 3, 1, 4, 2, 3]), RouterConfig(3, SIGMOID)
    moved = jax.tree.map(lambda x: x[expert_e], (p.gate_proj, p.up_proj, p.down_proj))
    placed = p.replace(placement=Placement(*tables(expert_e, NUM_EXPERTS)))
    placed = placed.replace(gate_proj=moved[0], up_proj=moved[1], down_proj=moved[2])
    run = lambda p, mesh: jax.jit(lambda x_TD, p: mixture_of_experts(x_TD, p, config, "silu", NUM_TOKENS, mesh))(
        x_TD, p
    )
    (alone, nothing), (out_TD, told) = run(p, mesh_of(1, 1)), run(placed, mesh_of(4, 1))
    np.testing.assert_allclose(out_TD[:NUM_TOKENS], alone[:NUM_TOKENS], rtol=1e-4, atol=1e-5)
    expert_TJ, _ = route(jnp.asarray(x_TD[:NUM_TOKENS]), p, config)
    assert nothing is None
    np.testing.assert_array_equal(told.load_E, np.bincount(np.ravel(expert_TJ), minlength=NUM_EXPERTS))


def test_a_device_computes_twice_its_share_at_a_time():
    assert experts.pairs_at_once(100, 8) == 100  # all of few
    assert experts.pairs_at_once(8192, 8) == 2048
    assert experts.pairs_at_once(8192, 1) == experts.pairs_at_once(8192, 2) == 8192
    assert experts.pairs_at_once(1000, 8) == 256


def test_a_correction_chooses_experts_and_does_not_weigh_them():
    correction = np.array([0, 0, 0, 9, 0, 8], np.float32)
    p, x_TD = make_block(2, correction)
    expert_TJ, weight_TJ = route(jnp.asarray(x_TD), p, RouterConfig(2, SIGMOID))
    np.testing.assert_array_equal(expert_TJ, [[3, 5]] * len(x_TD))
    scores = 1 / (1 + np.exp(-x_TD @ p.router.weight[[3, 5]].T))
    np.testing.assert_allclose(weight_TJ, scores, rtol=1e-5)

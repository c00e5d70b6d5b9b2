"""What adapters add to a linear layer: each token its own slot's, in any batch, however weights lie and are stored."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.layers.linear import CPU, GPU, XLA, Linear, apply_linear, parts_by_inputs
from jaxpaged.layers.lora import BoundLora, LoraStack, LoraStacks, token_slots
from jaxpaged.params.quantized import PackedArray, QuantizedArray, StoredArray
from jaxpaged.params.sharding import MODEL_AXES, Split

NUM_SLOTS, INPUTS, OUTPUTS = 3, 128, (4, 8)
SLOT_T = jnp.array([2, 0, 3, 3, 1, 0, 2], jnp.int32)
"""Of the tokens of a step."""


def numbers(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 8


def stacks(ranks: tuple[int, ...] = (4, 2), grows: bool = True) -> LoraStacks:
    parts = [
        LoraStack(numbers(i, NUM_SLOTS, rank, INPUTS), numbers(9 + i, NUM_SLOTS, rank, *OUTPUTS))
        for i, rank in enumerate(ranks)
    ]
    return LoraStacks(tuple(parts), numbers(20, NUM_SLOTS, *OUTPUTS) if grows else None)


def adapted(base_TNH: Any, x_TI: Any, adapters: LoraStacks) -> np.ndarray:
    """Each token alone, with its own adapter, in float64."""
    rows = []
    for base_NH, x_I, slot in zip(base_TNH, np.asarray(x_TI, np.float64), np.asarray(SLOT_T)):
        row = np.asarray(base_NH, np.float64)
        if slot:
            growth = 0 if adapters.growth is None else np.asarray(adapters.growth[slot - 1], np.float64)
            row = row * (1 + growth)
            for part in adapters.parts:
                a_rI, b_rO = (np.asarray(each[slot - 1], np.float64) for each in (part.a, part.b))
                row = row + np.tensordot(a_rI @ x_I, b_rO, 1)
        rows.append(row)
    return np.stack(rows)


def bound(p: Linear, adapters: LoraStacks, split: Split | None = None, slot_T: Any = SLOT_T) -> Linear:
    return p.replace(lora=BoundLora(adapters, token_slots(slot_T, NUM_SLOTS), split))


SENDS = r"= \S+ ((?:all|reduce-scatter|collective)-?[\w-]*)\("
"""What devices send each other, in the text of a program."""

product = partial(apply_linear, "TD,NHD->TNH")


@pytest.mark.parametrize("backend", [XLA, CPU, GPU])
def test_each_token_gets_what_its_own_slot_adds(backend):
    x_TI, weight, bias = numbers(1, 7, INPUTS), numbers(2, *OUTPUTS, INPUTS), numbers(3, *OUTPUTS)
    base = np.tensordot(x_TI, weight, ((1,), (2,)))
    for adapters in (stacks(), stacks((4,), grows=False)):
        p = bound(Linear(weight, bias, backend=backend), adapters)
        out = jax.jit(product)(x_TI, p, jnp.full((7, *OUTPUTS), 2.0))
        np.testing.assert_allclose(out, adapted(base, x_TI, adapters) + bias + 2, atol=1e-5)


def test_tokens_without_an_adapter_keep_their_bits_and_others_have_those_that_they_have_alone():
    in_16_bits = partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    x_TI, p = in_16_bits((numbers(1, 7, INPUTS), Linear(numbers(2, *OUTPUTS, INPUTS))))
    adapters = in_16_bits(stacks((4,), grows=False))
    mixed = product(x_TI, bound(p, adapters))
    np.testing.assert_array_equal(mixed[SLOT_T == 0], product(x_TI, p)[SLOT_T == 0])
    for slot in range(1, NUM_SLOTS + 1):
        alone = product(x_TI, bound(p, adapters, slot_T=jnp.full(7, slot)))
        np.testing.assert_array_equal(mixed[slot == SLOT_T], alone[slot == SLOT_T])


@pytest.mark.parametrize("num_tokens", [2, 6])
def test_fewer_tokens_than_slots_take_their_own_ranks(num_tokens):
    slot_T = jnp.array([7, 0, 3, 3, 8, 1], jnp.int32)[:num_tokens]
    part = LoraStack(numbers(30, 8, 4, INPUTS), numbers(31, 8, 4, *OUTPUTS))
    x_TI, p = numbers(1, num_tokens, INPUTS), Linear(numbers(2, *OUTPUTS, INPUTS))
    bound_to = lambda slots: p.replace(lora=BoundLora(LoraStacks((part,)), slots))
    few = token_slots(slot_T, 8)
    many = token_slots(jnp.pad(slot_T, (0, 8)), 8)
    expected = product(jnp.pad(x_TI, ((0, 8), (0, 0))), bound_to(many))[:num_tokens]
    np.testing.assert_allclose(product(x_TI, bound_to(few)), expected, atol=1e-5)


def weight_of_form(form: str) -> Any:
    values = jax.random.randint(jax.random.key(5), (*OUTPUTS, INPUTS), -127, 127, jnp.int8)
    if form == "rows":
        return QuantizedArray(values, jnp.abs(numbers(6, *OUTPUTS)) / 64, "float32")
    if form == "int4":
        packed = jax.random.randint(jax.random.key(8), (*OUTPUTS, INPUTS // 2), 0, 255, jnp.uint8)
        return PackedArray(packed, jnp.abs(numbers(9, *OUTPUTS, INPUTS // 32)).astype(jnp.bfloat16), "float32")
    if form == "groups":
        order = jax.random.permutation(jax.random.key(11), INPUTS).astype(jnp.int32)
        return StoredArray(values, jnp.abs(numbers(7, 4, *OUTPUTS)) / 64, None, order, "float32")
    return numbers(2, *OUTPUTS, INPUTS)


def split_weight(weight: Any, split: Split) -> Any:
    """Placed as loading places it."""
    if split.inputs is not None:
        lying = parts_by_inputs(weight, len(OUTPUTS), split.inputs)
    else:
        lying = jax.tree.map(lambda _: PartitionSpec(split.outputs), weight)
    if isinstance(weight, StoredArray):
        groups = lying.scales if split.inputs is not None else PartitionSpec(None, split.outputs)
        lying = lying.replace(scales=groups, order=PartitionSpec())
        weight, lying = weight.replace(split=split), lying.replace(split=split)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(split.mesh, spec)), weight, lying)


@pytest.mark.parametrize("form", ["plain", "rows", "int4", "groups"])
@pytest.mark.parametrize("of_inputs", [False, True])
def test_a_layer_that_is_split_sends_nothing_more(form, of_inputs):
    mesh, adapters, x_TI, weight = make_mesh(2), stacks(), numbers(1, 7, INPUTS), weight_of_form(form)
    split = Split(mesh, None, MODEL_AXES) if of_inputs else Split(mesh, MODEL_AXES, None)
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
    of_part = lambda part: LoraStack(place(part.a, None, None, split.inputs), place(part.b, None, None, split.outputs))
    placed = LoraStacks(tuple(map(of_part, adapters.parts)), place(adapters.growth, None, split.outputs))
    p = bound(Linear(split_weight(weight, split)), placed, split)
    run, x = jax.jit(product), place(x_TI, None, split.inputs)
    expected = adapted(product(x_TI, Linear(weight)), x_TI, adapters)
    np.testing.assert_allclose(run(x, p), expected, atol=1e-4, rtol=1e-4)
    sent = lambda p: re.findall(SENDS, run.lower(x, p).compile().as_text())
    base = sent(p.replace(lora=None))
    assert len(sent(p)) <= len(base) and set(sent(p)) <= set(base)
    assert form != "plain" or sent(p) == (["all-reduce"] if of_inputs else [])

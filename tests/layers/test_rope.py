"""Rotary embedding: its defining property, and inverse frequencies of every scaling against the formulas.

What transformers computes with each of them is in the goldens of tests/models.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.rope import (
    FREQUENCIES,
    RopeConfig,
    apply_rope,
    in_halves,
    in_one_piece,
    inverse_frequencies,
    rope_cos_sin,
)

PLAIN = RopeConfig(theta=10_000.0, rotary_dim=8)


def rotate(x_TNH, positions, rope=PLAIN, max_model_len=64):
    return np.asarray(apply_rope(jnp.asarray(x_TNH), *rope_cos_sin(rope, jnp.asarray(positions), max_model_len)))


def test_each_pair_is_rotated_as_a_complex_number():
    x = np.random.default_rng(0).standard_normal((3, 2, 8), np.float32)
    positions = np.array([0, 5, 70])
    angles = positions[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(rotate(x, positions), np.concatenate([expected.real, expected.imag], -1), atol=1e-5)


@pytest.mark.parametrize("rotation", [in_halves, in_one_piece])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_every_platforms_form_rotates_the_pairs(rotation, is_interleaved):
    x, angles = np.random.default_rng(0).standard_normal((3, 2, 8), np.float32), np.random.default_rng(1).random((3, 4))
    first, second = (x[..., ::2], x[..., 1::2]) if is_interleaved else (x[..., :4], x[..., 4:])
    expected = (first + 1j * second) * np.exp(1j * angles)[:, None, :]
    parts = np.stack([expected.real, expected.imag], -1 if is_interleaved else -2).reshape(x.shape)
    cos_sin = (f(angles[:, None, :]).astype(np.float32) for f in (np.cos, np.sin))
    np.testing.assert_allclose(rotation(is_interleaved)(jnp.asarray(x), *cos_sin), parts, atol=1e-5)


SECTIONS_IN_A_ROW = [0, 0, 1, 1, 1, 2, 2, 2]
MIXED_SECTIONS = [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("rope", "section_of"),
    [
        (RopeConfig(100.0, 16, sections=(2, 3, 3)), SECTIONS_IN_A_ROW),
        (RopeConfig(100.0, 16, sections=(3, 3, 2), mixes_sections=True), MIXED_SECTIONS),
        (
            RopeConfig(100.0, 16, "yarn", 4.0, 64, 16, attention_factor=1.1, sections=(2, 3, 3), mixes_sections=False),
            SECTIONS_IN_A_ROW,
        ),
    ],
)
def test_each_pair_goes_by_the_position_of_its_section(rope, section_of):
    offsets = np.array([[0, -1, -3], [0, 4, -3], [0, 9, -3]])
    three = [rope_cos_sin(rope, jnp.asarray(np.arange(5, 8) + offset), 64) for offset in offsets]
    found = rope_cos_sin(rope, jnp.arange(5, 8), 64, jnp.asarray(offsets))
    for part, name in enumerate(("cos", "sin")):
        expected = np.stack([three[section][part][:, pair] for pair, section in enumerate(section_of)], axis=1)
        np.testing.assert_array_equal(found[part], expected, err_msg=name)
    for part, plain in zip(found, rope_cos_sin(rope, jnp.arange(5, 8), 64), strict=True):
        np.testing.assert_array_equal(part[0], plain[0])  # text before all pictures
        assert not np.array_equal(part[1:], plain[1:])


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 8)).astype(np.float32)
    near = (rotate(q, [7]) * rotate(k, [3])).sum()
    far = (rotate(q, [107]) * rotate(k, [103])).sum()
    assert near == pytest.approx(far, abs=1e-4)


def test_what_is_beyond_the_rotary_part_passes():
    x = np.random.default_rng(2).standard_normal((2, 3, 12), np.float32)
    rotated = rotate(x, [4, 9])
    np.testing.assert_array_equal(rotated[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(rotated[..., :8], rotate(x[..., :8], [4, 9]))


def test_half_precision_heads_are_rotated_in_float32():
    x = np.random.default_rng(3).standard_normal((2, 1, 8), np.float32)
    half = jnp.asarray(x, jnp.bfloat16)
    exact = rotate(np.asarray(half, np.float32), [100, 60_000])
    np.testing.assert_array_equal(rotate(half, [100, 60_000]), exact.astype(jnp.bfloat16))


def test_linear_scaling_divides_positions():
    linear = RopeConfig(10_000.0, 8, "linear", factor=4.0)
    np.testing.assert_allclose(inverse_frequencies(linear, 64), inverse_frequencies(PLAIN, 64) / 4, rtol=1e-6)


def test_dynamic_scaling_starts_beyond_the_trained_length():
    dynamic = RopeConfig(10_000.0, 8, "dynamic", factor=2.0, max_position=64)
    np.testing.assert_array_equal(inverse_frequencies(dynamic, 64), inverse_frequencies(PLAIN, 64))
    base = 10_000.0 * (2.0 * 160 / 64 - 1) ** (8 / 6)
    np.testing.assert_allclose(inverse_frequencies(dynamic, 160), base ** (-np.arange(4) / 4), rtol=1e-6)


def test_longrope_takes_the_long_divisors_when_sequences_may_become_long():
    rope = RopeConfig(100.0, 4, "longrope", original_max_position=32, short_factor=(1.0, 2.0), long_factor=(3.0, 5.0))
    plain = np.array([1.0, 0.1])
    np.testing.assert_allclose(inverse_frequencies(rope, 32), plain / [1, 2], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(rope, 33), plain / [3, 5], rtol=1e-6)


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones():
    rope = RopeConfig(10_000.0, 128, "llama3", factor=8.0, original_max_position=8192)
    plain, scaled = (inverse_frequencies(r, 1) for r in (RopeConfig(10_000.0, 128), rope))
    wavelengths = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6)
    assert np.all(np.diff(scaled) < 0)


def test_yarn_keeps_what_turns_often_and_interpolates_what_hardly_turns():
    rope = RopeConfig(10_000.0, 128, "yarn", factor=4.0, original_max_position=4096)
    plain, scaled = (inverse_frequencies(r, 1) for r in (RopeConfig(10_000.0, 128), rope))
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 33], plain[turns > 33], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.9], plain[turns < 0.9] / 4, rtol=1e-6)


def test_cos_and_sin_carry_the_attention_factor():
    cos, sin = rope_cos_sin(RopeConfig(10_000.0, 8, attention_factor=1.5), jnp.arange(4), 64)
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=1e-6)


@pytest.mark.parametrize("rope_type", FREQUENCIES)
def test_frequencies_are_float32_whatever_the_scaling(rope_type):
    rope = RopeConfig(
        500.0,
        8,
        rope_type,
        factor=2.0,
        max_position=16,
        original_max_position=16,
        short_factor=(1.0,) * 4,
        long_factor=(2.0,) * 4,
    )
    frequencies = inverse_frequencies(rope, 40)
    assert (frequencies.dtype, frequencies.shape) == (np.float32, (4,))
    assert np.all(frequencies > 0)

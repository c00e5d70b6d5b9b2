"""The noise of a token: known answers, and what it depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling import noise
from tests.sampling import oracle

threefry2x32 = jax.jit(noise.threefry2x32)
position_keys = jax.jit(noise.position_keys)
exponential_noise = jax.jit(noise.exponential_noise)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_its_authors(key, counter, words):
    """The first three vectors are those of the Random123 distribution."""
    assert tuple(map(int, threefry2x32(*(jnp.uint32(word) for word in (*key, *counter))))) == words
    assert oracle.threefry(*key, *counter) == words


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**63 + 2**33 + 1, 2**64 - 2])
def test_keys_are_fold_in_of_the_seed_and_the_position(seed):
    halves = np.array([[seed % 2**32, seed >> 32]], np.uint32)
    key = position_keys(jnp.asarray(halves), jnp.array([1234]))
    assert tuple(map(int, key[0])) == oracle.threefry(seed >> 32, seed % 2**32, 0, 1234)
    if seed < 2**31:
        by_jax = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 1234)
        np.testing.assert_array_equal(key[0], jax.random.key_data(by_jax))


def test_noise_is_positive_finite_and_exponential():
    keys = jnp.array([[3, 4]], jnp.uint32)
    values = np.sort(np.asarray(exponential_noise(keys, jnp.arange(100_000)[None]))[0])
    assert values[0] > 0
    assert np.isfinite(values[-1])
    # Kolmogorov-Smirnov: the largest distance of the distribution functions; 1.63 / sqrt(n) at the 1 % level.
    distance = np.abs((np.arange(len(values)) + 0.5) / len(values) - (1 - np.exp(-values))).max()
    assert distance < 1.63 / np.sqrt(len(values))


def test_the_noise_of_a_token_is_its_own():
    keys = jnp.array([[3, 4], [5, 6]], jnp.uint32)
    everything = exponential_noise(keys, jnp.tile(jnp.arange(64), (2, 1)))
    some = exponential_noise(keys, jnp.array([[63, 0, 17], [5, 5, 2]]))
    np.testing.assert_array_equal(some[0], everything[0, jnp.array([63, 0, 17])])
    np.testing.assert_array_equal(some[1], everything[1, jnp.array([5, 5, 2])])

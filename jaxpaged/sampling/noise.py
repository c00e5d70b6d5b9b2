"""Randomness that depends on (seed, position, token id) and on nothing else.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), with the key
`jax.random.fold_in(key(seed), position)` and the token id as counter: unlike `jax.random.gumbel` over a row of
logits, the noise of a token can be computed alone, and does not change with the padded size of the vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def position_keys(seed_S2: jax.Array, position_S: jax.Array) -> jax.Array:
    """`jax.random.fold_in(key(seed), position)` of every row, bit by bit. `seed_S2` holds the low and the high 32 bits.

    jax's own makes 20 kernels of it on a CPU, each of which takes 20 ms to compile; this is fused into one.
    """
    counter_S = position_S.astype(jnp.uint32)
    return jnp.stack(threefry2x32(seed_S2[:, 1], seed_S2[:, 0], jnp.zeros_like(counter_S), counter_S), axis=-1)


def exponential_noise(key_S2: jax.Array, token_ids_SC: jax.Array) -> jax.Array:
    """Exponential(1) noise E > 0 of each token: the token with the least E / p is a draw from p.

    This is Gumbel-max, since -log E is a Gumbel variable; the quotient costs one logarithm less. The uniform variable
    is finest near zero, where E is small, so that unlikely tokens win as often as they should.
    """
    counter_SC = token_ids_SC.astype(jnp.uint32)
    word_SC = threefry2x32(key_S2[:, :1], key_S2[:, 1:], jnp.zeros_like(counter_SC), counter_SC)[0]
    uniform_SC = word_SC.astype(jnp.float32) * np.float32(2**-32) + np.float32(2**-33)
    return -jnp.log1p(-jnp.minimum(uniform_SC, np.float32(1 - 2**-24)))


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two random words for each (key, counter), all uint32."""
    keys = (key0, key1, key0 ^ key1 ^ PARITY)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << distance) | (x1 >> (32 - distance))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1

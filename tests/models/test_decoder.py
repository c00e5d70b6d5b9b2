"""What all decoder-only models compute alike."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jaxpaged.layers.rope import RopeConfig, apply_rope
from jaxpaged.models.decoder import rotations


def test_angles_are_computed_once_a_step_however_many_layers_rotate():
    rope = RopeConfig(10_000.0, 64)
    config = SimpleNamespace(layers=[SimpleNamespace(rope=rope)] * 2, max_model_len=64)

    @jax.jit
    def two_layers(positions_T, x_TNH):
        cos, sin = rotations(config, positions_T)[rope]
        for product in jnp.eye(64), 2 * jnp.eye(64):
            x_TNH = apply_rope(x_TNH, cos, sin) @ product
        return x_TNH

    structs = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)
    text = two_layers.lower(*structs).compile().as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1

"""What all decoder-only models compute alike."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jaxpaged.layers.rope import RopeConfig, apply_rope
from jaxpaged.models.decoder import rotations, seen
from jaxpaged.models.interface import Batch


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


def test_embeddings_of_an_encoder_stand_in_place_of_a_tokens():
    """And its other vectors are zero where there is text."""
    config = SimpleNamespace(hidden_size=4)
    x_TD, visual_TE = jnp.ones((3, 4)), jnp.arange(36.0).reshape(3, 12)
    batch = Batch(None, None, (), (), visual_TE=visual_TE, is_visual_T=jnp.array([False, True, False]))
    first, second, third = seen(config, batch, x_TD)
    assert first.tolist() == [[1.0] * 4, [12.0, 13.0, 14.0, 15.0], [1.0] * 4]
    assert second.tolist() == [[0.0] * 4, [16.0, 17.0, 18.0, 19.0], [0.0] * 4]
    assert third.tolist() == [[0.0] * 4, [20.0, 21.0, 22.0, 23.0], [0.0] * 4]

"""The encoder of Gemma 3's pictures in plain JAX: a SigLIP tower and the pooled projector, for training.

Parameters are one flat dictionary under the names and in the layout of the published checkpoints.
Letters: B pictures, P patches, D width of the tower.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from demo_model.network import Params, rms_norm

TOWER = "vision_tower.vision_model."
PROJECTION = "multi_modal_projector.mm_input_projection_weight"
SOFT_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"


@dataclass(frozen=True)
class Eye:
    """The sizes that define the tower."""

    image_size: int = 96
    patch_size: int = 8
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    pool: int = 2
    text_size: int = 256
    norm_epsilon: float = 1e-6

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size


def _place_features(eye: Eye) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of row and column, and their frequencies per unit of row and column: [P, 32], [16, 2]."""
    rates = np.linspace(0.2, 2.4, 8)
    frequencies = np.concatenate([np.stack([rates, 0 * rates], 1), np.stack([0 * rates, rates], 1)])
    rows, columns = np.divmod(np.arange(eye.side**2), eye.side)
    angles = np.stack([rows, columns], 1) @ frequencies.T
    return np.stack([np.cos(angles), np.sin(angles)], 2).reshape(eye.side**2, 32), frequencies


# The neighbours at which each head looks when training begins, in rows and columns.
_OFFSETS = (
    ((-1, 0), (1, 0), (0, -1), (0, 1)),
    ((-1, -1), (-1, 1), (1, -1), (1, 1)),
    ((-2, 0), (2, 0), (0, -2), (0, 2)),
)


def _looking_at(eye: Eye, offset: tuple[int, int]) -> np.ndarray:
    """[32, D]: turns the features of a place into those of its neighbour."""
    _, frequencies = _place_features(eye)
    turned = np.zeros((32, eye.hidden_size))
    for pair, angle in enumerate(frequencies @ np.array(offset)):
        cos, sin, at = np.cos(angle), np.sin(angle), 2 * pair
        turned[at, [at, at + 1]] = cos, -sin
        turned[at + 1, [at, at + 1]] = sin, cos
    return turned


def init_eye(eye: Eye, seed: int) -> Params:
    """Random weights, but heads that begin as a convolution's: each looks at one neighbour.

    The first 32 numbers of a position's embedding tell its place; a tower that has to find out what a neighbour is
    needs far more pictures than two cores can show it.
    """
    rng, d, inner = np.random.default_rng(seed), eye.hidden_size, eye.intermediate_size

    def random(*shape: int, inputs: int) -> np.ndarray:
        return rng.standard_normal(shape) * inputs**-0.5

    places = np.zeros((eye.side**2, d))
    places[:, :32] = _place_features(eye)[0]
    patch = random(d, 3, eye.patch_size, eye.patch_size, inputs=3 * eye.patch_size**2)
    patch[:32] *= 0.1
    params = {
        f"{TOWER}embeddings.patch_embedding.weight": patch,
        f"{TOWER}embeddings.patch_embedding.bias": np.zeros(d),
        f"{TOWER}embeddings.position_embedding.weight": places,
        f"{TOWER}post_layernorm.weight": np.ones(d),
        f"{TOWER}post_layernorm.bias": np.zeros(d),
        PROJECTION: random(d, eye.text_size, inputs=d),
        SOFT_NORM: np.zeros(d),
    }
    for layer in range(eye.num_layers):
        name = f"{TOWER}encoder.layers.{layer}."
        q, k = random(d, d, inputs=25 * d), random(d, d, inputs=25 * d)
        if layer < len(_OFFSETS):
            for head, offset in enumerate(_OFFSETS[layer]):
                rows = slice(32 * head, 32 * head + 32)
                q[rows] += 1.5 * _looking_at(eye, offset)
                k[rows] += 1.5 * _looking_at(eye, (0, 0))
        matrices = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": random(d, d, inputs=d),
            "self_attn.out_proj": random(d, d, inputs=2 * d),
            "mlp.fc1": random(inner, d, inputs=d),
            "mlp.fc2": random(d, inner, inputs=2 * inner),
        }
        for part, value in matrices.items():
            params[f"{name}{part}.weight"], params[f"{name}{part}.bias"] = value, np.zeros(len(value))
        for norm in ("layer_norm1", "layer_norm2"):
            params[f"{name}{norm}.weight"], params[f"{name}{norm}.bias"] = np.ones(d), np.zeros(d)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def _layer_norm(x: jax.Array, params: Params, name: str, epsilon: float) -> jax.Array:
    wide = x - x.mean(-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return wide * params[f"{name}.weight"] + params[f"{name}.bias"]


def _linear(x: jax.Array, params: Params, name: str) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _attention(x: jax.Array, params: Params, name: str, batch: int, eye: Eye) -> jax.Array:
    def heads(part: str) -> jax.Array:
        flat = _linear(x, params, f"{name}.{part}_proj")
        return flat.reshape(batch, -1, eye.num_heads, eye.hidden_size // eye.num_heads).swapaxes(1, 2)

    q, k, v = heads("q"), heads("k"), heads("v")
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(2, 3)
    mixed = jax.nn.softmax(scores, -1) @ v
    return _linear(mixed.swapaxes(1, 2).reshape(x.shape), params, f"{name}.out_proj")


def patches(pixels: jax.Array, eye: Eye) -> jax.Array:
    """uint8 [B, 96, 96, 3] to float32 [B * P, 192], in channel, row, column order, from -1 to 1."""
    values = (pixels.astype(jnp.float32) * (1 / 255) - 0.5) / 0.5
    cut = values.reshape(-1, eye.side, eye.patch_size, eye.side, eye.patch_size, 3)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(-1, 3 * eye.patch_size**2)


def pooled(params: Params, pixels: jax.Array, eye: Eye) -> jax.Array:
    """What the projector multiplies: [B, 36, D], pooled over cells of 2 x 2 patches and normalised."""
    batch, name = pixels.shape[0], f"{TOWER}embeddings."
    weight = params[f"{name}patch_embedding.weight"].reshape(eye.hidden_size, -1)
    x = patches(pixels, eye) @ weight.T + params[f"{name}patch_embedding.bias"]
    x += jnp.tile(params[f"{name}position_embedding.weight"], (batch, 1))
    for layer in range(eye.num_layers):
        name = f"{TOWER}encoder.layers.{layer}"
        normed = _layer_norm(x, params, f"{name}.layer_norm1", eye.norm_epsilon)
        x += _attention(normed, params, f"{name}.self_attn", batch, eye)
        normed = _layer_norm(x, params, f"{name}.layer_norm2", eye.norm_epsilon)
        inner = jax.nn.gelu(_linear(normed, params, f"{name}.mlp.fc1"), approximate=True)
        x += _linear(inner, params, f"{name}.mlp.fc2")
    x = _layer_norm(x, params, f"{TOWER}post_layernorm", eye.norm_epsilon)
    cells = eye.side // eye.pool
    x = x.reshape(batch, cells, eye.pool, cells, eye.pool, -1).mean((2, 4)).reshape(batch, cells**2, -1)
    return rms_norm(x, params[SOFT_NORM], eye.norm_epsilon)


def embeddings(params: Params, pixels: jax.Array, eye: Eye) -> jax.Array:
    """The encoder's output, float32 [B, 36, width of the text model]. It is not scaled as text's embeddings are."""
    return pooled(params, pixels, eye) @ params[PROJECTION]

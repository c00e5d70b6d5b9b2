"""The Gemma 3 text network in plain JAX, for training the demo model.

Parameters are one flat dictionary under the names and in the layout of the
Hugging Face checkpoint, so exporting is only a change of precision.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]

# Query rows per attention block: small enough that a causal row of 2,600
# tokens skips almost half of the score matrix.
QUERY_BLOCK = 512


@dataclass(frozen=True)
class Shape:
    """The sizes that define the network."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    sliding_window: int = 128
    full_attention_every: int = 3
    rope_theta: float = 1_000_000.0
    rope_local_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    max_positions: int = 4096

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_every == 0


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query = shape.num_heads * shape.head_dim
    key = shape.num_kv_heads * shape.head_dim
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    per_layer = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
    }
    for layer in range(shape.num_layers):
        for name, size in per_layer.items():
            result[f"model.layers.{layer}.{name}.weight"] = size
    return result


def init_params(shape: Shape, seed: int) -> Params:
    """Random matrices and zero norm weights (Gemma scales by 1 + weight)."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, size in parameter_shapes(shape).items():
        if len(size) == 1:
            value = np.zeros(size)
        else:
            # The embedding is multiplied by sqrt(hidden) on the way in, so
            # 1/sqrt(hidden) suits both ends of the tied matrix.
            value = rng.standard_normal(size) * size[1] ** -0.5
        params[name] = jnp.asarray(value, jnp.float32)
    return params


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    # With one flat token axis the weight gradient is a plain matrix product,
    # nearly twice as fast on a CPU as one that contracts two axes.
    flat = x.reshape(-1, x.shape[-1]) @ weight.T
    return flat.reshape(*x.shape[:-1], -1)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return (wide * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def rotation_table(length: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    inverse = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length)[:, None] * inverse[None, :]
    angles = np.concatenate([angles, angles], -1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, rotation: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    turned = jnp.concatenate([-second, first], -1)
    return (x * rotation[0] + turned * rotation[1]).astype(x.dtype)


def _attend(q, k, v, segments, window: int | None) -> jax.Array:
    """Causal attention inside segments, one block of query rows at a time.

    q is [batch, kv head, queries per kv head, length, head_dim], k and v are
    [batch, kv head, length, head_dim]: the order in which XLA's CPU matrix
    products need no transposed copies.
    """
    batch, kv_heads, groups, length, head_dim = q.shape
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        low = 0 if window is None else max(0, start - window + 1)
        gap = np.arange(start, stop)[:, None] - np.arange(low, stop)[None, :]
        near = (gap >= 0) if window is None else (gap >= 0) & (gap < window)
        same = segments[:, start:stop, None] == segments[:, None, low:stop]
        block = q[:, :, :, start:stop].reshape(batch, kv_heads, -1, head_dim)
        scores = jnp.einsum("bhqd,bhkd->bhqk", block, k[:, :, low:stop])
        scores = scores.astype(jnp.float32).reshape(batch, kv_heads, groups, stop - start, stop - low)
        scores = jnp.where((same & near)[:, None, None], scores, -1e30)
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        weights = weights.reshape(batch, kv_heads, -1, stop - low)
        out = jnp.einsum("bhqk,bhkd->bhqd", weights, v[:, :, low:stop])
        outputs.append(out.reshape(batch, kv_heads, groups, stop - start, head_dim))
    return jnp.concatenate(outputs, 3)


def _attention_layer(x, weights: Params, segments, shape: Shape, full: bool):
    batch, length, _ = x.shape
    theta = shape.rope_theta if full else shape.rope_local_theta
    rotation = rotation_table(length, shape.head_dim, theta)

    def heads(name: str) -> jax.Array:
        flat = linear(x, weights[f"{name}_proj.weight"])
        return flat.reshape(batch, length, -1, shape.head_dim).swapaxes(1, 2)

    q = rms_norm(heads("q"), weights["q_norm.weight"], shape.norm_epsilon)
    k = rms_norm(heads("k"), weights["k_norm.weight"], shape.norm_epsilon)
    q = rotate(q, rotation) * shape.head_dim**-0.5
    q = q.reshape(batch, shape.num_kv_heads, -1, length, shape.head_dim)
    window = None if full else shape.sliding_window
    out = _attend(q, rotate(k, rotation), heads("v"), segments, window)
    out = out.reshape(batch, shape.num_heads, length, shape.head_dim)
    out = out.swapaxes(1, 2).reshape(batch, length, -1)
    return linear(out, weights["o_proj.weight"])


def mlp(x, weights: Params) -> jax.Array:
    gate = jax.nn.gelu(linear(x, weights["gate_proj.weight"]), approximate=True)
    up = linear(x, weights["up_proj.weight"])
    return linear(gate * up, weights["down_proj.weight"])


def _below(params: Params, prefix: str) -> Params:
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}


def hidden_states(params: Params, tokens, segments, shape: Shape) -> jax.Array:
    """Final normalised hidden states of [batch, length] tokens."""
    *_, last = residual_streams(params, tokens, segments, shape)
    return rms_norm(last, params["model.norm.weight"], shape.norm_epsilon)


def residual_streams(params: Params, tokens, segments, shape: Shape) -> list[jax.Array]:
    """What goes into each layer, and what comes out of the last.

    Tokens see only earlier tokens with the same segment number, so several
    short samples can share a row.  The precision is that of the embedding.
    """
    table = params["model.embed_tokens.weight"]
    x = table[tokens] * jnp.asarray(shape.hidden_size**0.5, table.dtype)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, shape.norm_epsilon)

    streams = [x]
    for layer in range(shape.num_layers):
        w = _below(params, f"model.layers.{layer}.")
        out = _attention_layer(
            norm(x, w["input_layernorm.weight"]),
            _below(w, "self_attn."),
            segments,
            shape,
            shape.is_full_attention(layer),
        )
        x = x + norm(out, w["post_attention_layernorm.weight"])
        out = mlp(norm(x, w["pre_feedforward_layernorm.weight"]), _below(w, "mlp."))
        x = x + norm(out, w["post_feedforward_layernorm.weight"])
        streams.append(x)
    return streams


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 scores over the vocabulary; the head is the embedding."""
    return linear(hidden, params["model.embed_tokens.weight"]).astype(jnp.float32)

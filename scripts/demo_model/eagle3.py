"""An EAGLE-3 head for the embedded model, and its training: drafts follow drafts there as they do when it serves.

The first pass over a text knows the model's features at every token before. The second knows the head's own output in
place of the newest one, the third in place of the newest two, and so on: pass j makes the j-th draft at every place at
once. Its queries see the keys of the first pass up to where features are the model's, and behind that one key of each
pass. Norms scale by 1 + weight here and by the weight in a checkpoint.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from demo_model.batches import Batch
from demo_model.network import Params, Shape, linear, mlp, residual_streams, rms_norm, rotate, rotation_table

LAYER = "midlayer."


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; what is not here is the model's. `taps`: the layers whose input it reads."""

    num_drafts: int = 352
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 32
    intermediate_size: int = 128
    taps: tuple[int, int, int] = (2, 4, 6)
    rope_theta: float = 10_000.0


def init_head(shape: HeadShape, model: Shape, table: jax.Array, known: np.ndarray, seed: int) -> Params:
    """Random matrices, and the directions of the model's own vectors of the tokens that the head knows."""
    rng, width, inner = np.random.default_rng(seed), model.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = {
        "fc": (width, 3 * width),
        f"{LAYER}self_attn.q_proj": (query, 2 * width),
        f"{LAYER}self_attn.k_proj": (key, 2 * width),
        f"{LAYER}self_attn.v_proj": (key, 2 * width),
        f"{LAYER}self_attn.o_proj": (width, query),
        f"{LAYER}mlp.gate_proj": (inner, width),
        f"{LAYER}mlp.up_proj": (inner, width),
        f"{LAYER}mlp.down_proj": (width, inner),
    }
    params = {f"{name}.weight": rng.standard_normal(size) * size[1] ** -0.5 for name, size in shapes.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    params |= {f"{name}.weight": np.zeros(width) for name in (*(LAYER + norm for norm in norms), "norm")}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return {**params, "lm_head.weight": table[known] / jnp.linalg.norm(table[known], axis=1, keepdims=True)}


def after_gap(x: jax.Array, gap: int) -> jax.Array:
    """[batch, length, ...], each place with what stands `gap` places before it, zeros at the beginning."""
    return jnp.pad(x, ((0, 0), (gap, 0)) + ((0, 0),) * (x.ndim - 2))[:, : x.shape[1]] if gap else x


def has_before(segments: jax.Array) -> jax.Array:
    """Which places have a token before them in their own text."""
    return (after_gap(segments, 1) == segments) & (segments > 0)


def drafting_logits(
    params: Params, teacher: Params, batch: Batch, shape: HeadShape, model: Shape, num_passes: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """(Logits [batch, length, drafts] of each pass, the places [batch, length] where it has something to go by)."""
    w = {name.removeprefix(LAYER).removesuffix(".weight"): value for name, value in params.items()}
    streams = residual_streams(teacher, batch.tokens, batch.segments, model)
    tapped = jax.lax.stop_gradient(jnp.concatenate([streams[tap] for tap in shape.taps], -1))
    embedded = jax.lax.stop_gradient(teacher["model.embed_tokens.weight"][batch.tokens])
    norm = lambda x, name: rms_norm(x, w[name], model.norm_epsilon)
    embedded, feature = norm(embedded, "input_layernorm"), after_gap(linear(tapped, w["fc"]), 1)
    inner = has_before(batch.segments)
    seen: list[tuple[jax.Array, jax.Array]] = []
    logits, places = [], []
    for nth in range(num_passes):
        both = jnp.concatenate([embedded, norm(feature, "hidden_norm")], -1)
        x = feature + attention(w, both, inner, batch.segments, seen, shape)
        x = x + mlp(
            norm(x, "post_attention_layernorm"),
            {f"{part}_proj.weight": w[f"mlp.{part}_proj"] for part in ("gate", "up", "down")},
        )
        logits.append(linear(norm(x, "norm"), w["lm_head"]))
        places.append(after_gap(inner, nth) & (after_gap(batch.segments, nth) == batch.segments))
        feature = after_gap(x, 1)
    return logits, places


def attention(
    w: Params,
    both: jax.Array,
    inner: jax.Array,
    segments: jax.Array,
    seen: list[tuple[jax.Array, jax.Array]],
    shape: HeadShape,
) -> jax.Array:
    """One pass; `seen` has the keys and values of those before, and gets this one's."""
    batch, length, _ = both.shape
    rotation = rotation_table(length, shape.head_dim, shape.rope_theta)
    heads = lambda name: linear(both, w[f"self_attn.{name}_proj"]).reshape(batch, length, -1, shape.head_dim)
    turn = lambda x: rotate(x.swapaxes(1, 2), rotation).swapaxes(1, 2)
    repeat = lambda x: jnp.repeat(x, shape.num_heads // shape.num_kv_heads, axis=2)
    q, k, v = turn(heads("q")) * shape.head_dim**-0.5, repeat(turn(heads("k"))), repeat(heads("v"))
    seen.append((k, v))
    nth = len(seen) - 1
    gap = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (segments[:, :, None] == segments[:, None, :]) & inner[:, None, :] & (gap >= nth)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, seen[0][0])
    scores = jnp.where(visible[:, None], scores, -1e30)
    own = [jnp.einsum("bqhd,bqhd->bhq", q, after_gap(seen[i][0], nth - i)) for i in range(1, nth + 1)]
    weights = jax.nn.softmax(jnp.concatenate([scores, *(each[..., None] for each in own)], -1), -1)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights[..., :length], seen[0][1])
    for i in range(1, nth + 1):
        out += weights[..., length + i - 1].swapaxes(1, 2)[..., None] * after_gap(seen[i][1], nth - i)
    return linear(out.reshape(batch, length, -1), w["self_attn.o_proj"])


def checkpoint_tensors(params: Params, known: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """As a published head has them: weights in bfloat16, and which tokens it knows."""
    whole = {name: 1.0 + value if "norm" in name else value for name, value in params.items()}
    tensors = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in whole.items()}
    offsets = (known - np.arange(len(known))).astype(np.int64)
    return {**tensors, "d2t": offsets, "t2d": np.isin(np.arange(vocab_size), known)}


def head_config(shape: HeadShape, model: Shape) -> dict:
    """``config.json``."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "draft_vocab_size": shape.num_drafts,
        "hidden_size": model.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def rounded(params: Params) -> Params:
    """The parameters as a checkpoint keeps them."""
    return {
        name: (
            (1.0 + value).astype(jnp.bfloat16).astype(jnp.float32) - 1.0
            if "norm" in name
            else value.astype(jnp.bfloat16).astype(jnp.float32)
        )
        for name, value in params.items()
    }

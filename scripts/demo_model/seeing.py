"""The text model with pictures: what it answers, the loss of that, and a table of what is right.

The text model is frozen: what it says without pictures stays as it was, bit for bit. What is trained is the tower and
the projector, through it.
Letters: B rows, T tokens, D width of the text model.
"""

import random
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from demo_model import network
from demo_model.corpus import stream
from demo_model.looking import look_loss
from demo_model.muon import Moments, Rates, update
from demo_model.network import Params, Shape, linear, mlp, rms_norm
from demo_model.pictures import Scene
from demo_model.questions import TASKS, Task, Turn
from demo_model.rows import ROW, Rows, encoder, pack
from demo_model.tower import PROJECTION, Eye, pooled


def _visible(rows: Rows) -> jax.Array:
    """bool [B, T, T]: a token sees what is before it in its question and in the pictures, and all of its picture."""
    branch_q, branch_k = rows.branches[:, :, None], rows.branches[:, None, :]
    span_q, span_k = rows.spans[:, :, None], rows.spans[:, None, :]
    before = rows.positions[:, None, :] <= rows.positions[:, :, None]
    return ((branch_k == branch_q) | (branch_k == 0)) & (before | ((span_q == span_k) & (span_q > 0)))


def _attention(x, weights: Params, rows: Rows, seen: jax.Array, shape: Shape, full: bool) -> jax.Array:
    batch, length, _ = x.shape
    tables = network.rotation_table(ROW, shape.head_dim, shape.rope_theta if full else shape.rope_local_theta)
    rotation = tuple(jnp.asarray(table)[rows.positions][:, None] for table in tables)

    def heads(name: str) -> jax.Array:
        flat = linear(x, weights[f"{name}_proj.weight"])
        return flat.reshape(batch, length, -1, shape.head_dim).swapaxes(1, 2)

    q = network.rotate(rms_norm(heads("q"), weights["q_norm.weight"], shape.norm_epsilon), rotation)
    k = network.rotate(rms_norm(heads("k"), weights["k_norm.weight"], shape.norm_epsilon), rotation)
    near = rows.positions[:, None, :] > rows.positions[:, :, None] - shape.sliding_window
    seen = seen if full else seen & near
    groups = shape.num_heads // shape.num_kv_heads
    q = q.reshape(batch, shape.num_kv_heads, groups * length, shape.head_dim) * shape.head_dim**-0.5
    scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32).reshape(batch, shape.num_heads, length, length)
    mixed = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1).astype(x.dtype)
    mixed = mixed.reshape(batch, shape.num_kv_heads, groups * length, length) @ heads("v")
    mixed = mixed.reshape(batch, shape.num_heads, length, -1).swapaxes(1, 2)
    return linear(mixed.reshape(batch, length, -1), weights["o_proj.weight"])


def answer_logits(text: Params, soft_BED: jax.Array, rows: Rows, shape: Shape) -> jax.Array:
    """float32 [B, T, vocabulary], given the encoder's output for the pictures of the batch."""
    table = text["model.embed_tokens.weight"]
    words = table[rows.tokens] * jnp.asarray(shape.hidden_size**0.5, table.dtype)
    of_pictures = soft_BED[jnp.maximum(rows.spans - 1, 0), rows.cells].astype(table.dtype)
    x = jnp.where((rows.spans > 0)[..., None], of_pictures, words)
    seen = _visible(rows)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, shape.norm_epsilon)

    for layer in range(shape.num_layers):
        w = network._below(text, f"model.layers.{layer}.")
        inner = norm(x, w["input_layernorm.weight"])
        full = shape.is_full_attention(layer)
        out = _attention(inner, network._below(w, "self_attn."), rows, seen, shape, full)
        x = x + norm(out, w["post_attention_layernorm.weight"])
        out = mlp(norm(x, w["pre_feedforward_layernorm.weight"]), network._below(w, "mlp."))
        x = x + norm(out, w["post_feedforward_layernorm.weight"])
    return network.logits(text, norm(x, text["model.norm.weight"]))


def answer_loss(params: Params, text: Params, rows: Rows, shape: Shape, eye: Eye, look_share: float):
    """Mean over the answers' tokens, and a share of the first lesson's loss, so that it is not forgotten."""
    cells_BED = pooled(params, rows.look.pixels, eye)
    scores = answer_logits(text, cells_BED @ params[PROJECTION], rows, shape)
    found = jnp.take_along_axis(scores, rows.targets[..., None], -1)[..., 0]
    loss = jnp.sum((jax.nn.logsumexp(scores, -1) - found) * rows.weights) / jnp.sum(rows.weights)
    again, counts = look_loss(params, cells_BED, rows.look)
    hit = (jnp.argmax(scores, -1) == rows.targets) & (rows.weights > 0)
    counts["tokens"] = jnp.stack([hit.sum(), (rows.weights > 0).sum()])
    return loss + look_share * again, (loss, counts)


def joined(pool: Rows, chunks: jax.Array) -> Rows:
    """A few chunks of a pool of them as one batch."""
    pictures = pool.look.pixels.shape[1] * jnp.arange(len(chunks), dtype=jnp.int32)[:, None, None]
    rows = jax.tree.map(lambda each: each[chunks], pool)
    rows = rows._replace(spans=jnp.where(rows.spans > 0, rows.spans + pictures, 0))
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), rows)


def make_answer_step(shape: Shape, eye: Eye, rates: Rates, look_share: float):
    """A step with the rows of a few chunks of a pool."""

    def step(params: Params, moments: Moments, text: Params, pool: Rows, chunks, factor):
        differentiated = jax.value_and_grad(answer_loss, has_aux=True)
        rows = joined(pool, chunks)
        (_, (loss, counts)), gradients = differentiated(params, text, rows, shape, eye, look_share)
        params, moments = update(params, gradients, moments, rates, factor)
        return params, moments, loss, counts

    return jax.jit(step, donate_argnums=(0, 1))


def _right(params: Params, text: Params, rows: Rows, shape: Shape, eye: Eye) -> jax.Array:
    """bool [B]: whether the answer of a row's only question is right to its last token, by greedy choice."""
    soft = pooled(params, rows.look.pixels, eye) @ params[PROJECTION]
    hit = jnp.argmax(answer_logits(text, soft, rows, shape), -1) == rows.targets
    return (hit | (rows.weights == 0)).all(1)


_jitted_right = jax.jit(_right, static_argnums=(3, 4))


@dataclass
class Sight:
    """Right answers about held-out pictures, and those of a model that knows all about the questions but sees none."""

    right: int
    blind: int
    asked: int


def _ask(rng: random.Random, task: Task, held_out: bool) -> tuple[tuple[Scene, ...], Turn]:
    draw = (task.draw_held_out if held_out else None) or task.draw
    while True:
        scenes = draw(rng)
        turn = task.ask(rng, *scenes)
        if turn:
            return scenes, turn


def commonest_answers(rng: random.Random, task: Task, count: int = 1500) -> dict[str, str]:
    """By question, what is right most often: no model that does not see can do better."""
    answers: dict[str, Counter[str]] = {}
    for _ in range(count):
        question, answer = _ask(rng, task, held_out=False)[1]
        answers.setdefault(question, Counter())[answer] += 1
    return {question: found.most_common(1)[0][0] for question, found in answers.items()}


def evaluate(
    params: Params, text: Params, tokenizer: Tokenizer, shape: Shape, eye: Eye, count: int, dtype=jnp.float32
) -> dict[str, Sight]:
    """By task. Weights are rounded as the exported ones are."""

    def rounded(values: Params) -> Params:
        return {name: value.astype(jnp.bfloat16).astype(dtype) for name, value in values.items()}

    params, text, found = rounded(params), rounded(text), {}
    encode, rows = encoder(tokenizer), 16
    for name, task in TASKS.items():
        rng = stream(0, f"held-out pictures of {name}")
        guesses = commonest_answers(stream(0, f"questions of {name}"), task)
        asked = [_ask(rng, task, held_out=True) for _ in range(count // rows * rows)]
        blind = sum(guesses.get(question) == answer for _, (question, answer) in asked)
        right = 0
        for first in range(0, len(asked), rows):
            batch = pack(encode, [(scenes, [turn]) for scenes, turn in asked[first : first + rows]], 128)
            right += int(_jitted_right(params, text, batch, shape, eye).sum())
        found[name] = Sight(right, blind, len(asked))
    return found


def table(found: dict[str, Sight]) -> str:
    lines = ["| task (held-out pictures) | right | share | blind |", "|---|---|---|---|"]
    for name, sight in found.items():
        share, blind = (f"{100 * part / sight.asked:.1f} %" for part in (sight.right, sight.blind))
        lines.append(f"| {name} | {sight.right}/{sight.asked} | {share} | {blind} |")
    return "\n".join(lines)

"""The tower's first lesson: what covers each cell, and what a look at the whole gives. No text model takes part.

The heads that are trained beside the tower are thrown away afterwards.
Letters: B pictures, E cells, D width of the tower.
"""

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from demo_model.muon import Moments, Rates, update
from demo_model.network import Params
from demo_model.pictures import COLOUR_NAMES, KINDS, WHOLE_SIZES
from demo_model.rows import Look
from demo_model.tower import PROJECTION, Eye, pooled

NOTHING_WEIGHT = 0.3


def init_heads(eye: Eye) -> Params:
    sizes = {"cells": len(KINDS) + 1 + len(COLOUR_NAMES), "whole": sum(WHOLE_SIZES)}
    weights = {f"heads.{name}.weight": jnp.zeros((size, eye.hidden_size)) for name, size in sizes.items()}
    return weights | {f"heads.{name}.bias": jnp.zeros(size) for name, size in sizes.items()}


def _losses(scores: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropy, and whether the best is right; both [...], 0 where the label is -1."""
    known = labels >= 0
    found = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    loss = jnp.where(known, jax.nn.logsumexp(scores, -1) - found, 0)
    return loss, known & (jnp.argmax(scores, -1) == labels)


def look_loss(params: Params, cells_BED: jax.Array, look: Look) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of the pooled cells of a batch. Also (right, asked) of each kind of label, for a report."""
    scores = cells_BED @ params["heads.cells.weight"].T + params["heads.cells.bias"]
    mean_BD = cells_BED.mean(1)
    whole = mean_BD @ params["heads.whole.weight"].T + params["heads.whole.bias"]
    weight = jnp.where(look.kinds > 0, 1.0, NOTHING_WEIGHT)
    counts = {}
    total = jnp.zeros(())
    split = {"kind": (scores[..., : len(KINDS)], look.kinds), "colour": (scores[..., len(KINDS) :], look.colours)}
    for name, (part, labels) in split.items():
        loss, right = _losses(part, labels)
        total += jnp.sum(loss * weight) / jnp.sum(weight)
        covered = look.kinds > 0
        counts[name] = jnp.stack([(right & covered).sum(), covered.sum()])
    ends = np.cumsum(WHOLE_SIZES)
    names = ["count", *["count of a kind"] * 5, "tallest", "smallest", "word", *["digits"] * 3, "place"]
    names += ["letters"] * (len(WHOLE_SIZES) - len(names))
    for i, name in enumerate(names):
        loss, right = _losses(whole[:, ends[i] - WHOLE_SIZES[i] : ends[i]], look.whole[:, i])
        total += 0.4 * jnp.sum(loss) / look.whole.shape[0] / names.count(name) ** 0.5
        counted = jnp.stack([right.sum(), (look.whole[:, i] >= 0).sum()])
        counts[name] = counts.get(name, 0) + counted
    return total, counts


def is_matrix(name: str, value: jax.Array) -> bool:
    """Whether Muon changes it."""
    return value.ndim == 2 and ("layers" in name or "projection" in name)


def name_embeddings(table: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """What the text model's layers would get for the first token of each kind's and each colour's name."""
    scale = table.shape[1] ** 0.5

    def rows(names: tuple[str, ...]) -> np.ndarray:
        spaced = [name if len(name) == 1 else f" {name}" for name in names]
        first = [tokenizer.encode(name, add_special_tokens=False).ids[0] for name in spaced]
        return table[first] * scale

    return rows(("\n\n", *KINDS[1:])), rows(("\n\n", *COLOUR_NAMES))


def name_loss(params: Params, cells_BED: jax.Array, look: Look, names: tuple[jax.Array, jax.Array]) -> jax.Array:
    """How far the encoder's output is from the embeddings of the names of what it sees.

    A text model that has never seen a picture can do more with these than with any others.
    """
    wanted = (names[0][look.kinds] + names[1][look.colours]) * 0.5**0.5
    error = jnp.mean((cells_BED @ params[PROJECTION] - wanted) ** 2, -1)
    weight = jnp.where(look.kinds > 0, 1.0, NOTHING_WEIGHT)
    return jnp.sum(error * weight) / jnp.sum(jnp.mean(wanted**2, -1) * weight)


def make_look_step(eye: Eye, rates: Rates):
    """A step with the pictures of a few chunks of a pool."""

    def loss(params: Params, look: Look, names: tuple[jax.Array, jax.Array]):
        cells_BED = pooled(params, look.pixels, eye)
        total, counts = look_loss(params, cells_BED, look)
        return total + name_loss(params, cells_BED, look, names), counts

    def step(params: Params, moments: Moments, names, pool: Look, chunks, factor):
        look = jax.tree.map(lambda each: each[chunks].reshape(-1, *each.shape[2:]), pool)
        (total, counts), gradients = jax.value_and_grad(loss, has_aux=True)(params, look, names)
        params, moments = update(params, gradients, moments, rates, factor)
        return params, moments, total, counts

    return jax.jit(step, donate_argnums=(0, 1))

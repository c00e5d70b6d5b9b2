"""Training of what drafts for the embedded model: it imitates that model's probabilities on the texts from which that
was trained."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from demo_model.batches import Batch
from demo_model.network import Params
from demo_model.optimizer import make_optimizer
from demo_model.training import Plan, batches_from, learning_rate

ASSETS = Path(__file__).resolve().parents[2] / "jaxpaged" / "assets"
NUM_HELD_OUT = 20


def asked_for(description: str, output: str) -> tuple[Path, Plan]:
    """(Where the result goes, the plan) by the command line; `output` is the folder among the assets otherwise."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=ASSETS / output)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    plan = Plan(seed=arguments.seed, steps=arguments.steps, short_rows=(8, 128), medium_every=6, long_from=1.0)
    return arguments.output, plan


def held_out(plan: Plan, tokenizer: Tokenizer) -> list[Batch]:
    """Texts that are drawn with another seed."""
    other = Plan(seed=plan.seed + 1, steps=NUM_HELD_OUT, medium_every=NUM_HELD_OUT, long_from=1.0)
    return [batch for batch, *_ in batches_from(other, tokenizer, 0)]


def load_teacher() -> tuple[Params, Tokenizer]:
    """The embedded model in float32, and its tokenizer."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))
    stored = load_file(ASSETS / "demo" / "model.safetensors")
    return {name: jnp.asarray(array, jnp.float32) for name, array in stored.items()}, tokenizer


def distil(
    params: Params,
    teacher: Params,
    tokenizer: Tokenizer,
    plan: Plan,
    divergence: Callable[[Params, Params, Batch], jax.Array],
) -> tuple[Params, float]:
    """(Parameters, seconds). `divergence` is a weighted sum over a batch."""
    optimizer = make_optimizer(learning_rate(plan, plan.matrix_rate), learning_rate(plan, plan.other_rate), 0.0)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state, batches: tuple[Batch, ...]):
        weight = sum(jnp.sum(batch.weights) for batch in batches)
        loss = lambda params: sum(divergence(params, teacher, batch) for batch in batches) / weight
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    began, losses = time.monotonic(), []
    for number, batches in enumerate(batches_from(plan, tokenizer, 0), 1):
        params, state, loss = step(params, state, batches)
        losses.append(float(loss))
        if number % 20 == 0:
            seconds = time.monotonic() - began
            print(f"step {number} loss {np.mean(losses[-20:]):.4f} seconds {seconds:.0f}", flush=True)
    return params, time.monotonic() - began

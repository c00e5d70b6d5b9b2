"""The training loop: schedule, optimiser step, checkpoints that can resume."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from demo_model import corpus
from demo_model.batches import Batch, Packer, sample_source
from demo_model.network import Params, Shape, hidden_states, logits
from demo_model.optimizer import Schedule, make_optimizer

# Average token of the filler texts, in characters; only a rough guide.
CHARACTERS_PER_TOKEN = 3.4


@dataclass
class Plan:
    """How long and with what to train."""

    seed: int = 0
    steps: int = 2600
    warmup: int = 50
    decay: float = 0.5  # share of the steps in which the rate falls to zero
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.0
    short_rows: tuple[int, int] = (16, 128)
    medium_rows: tuple[int, int] = (2, 512)
    long_rows: tuple[int, int] = (1, 2688)
    medium_every: int = 3
    long_every: int = 3
    long_from: float = 0.3  # share of the steps before the first long row
    checkpoint_minutes: float = 5.0
    mix: dict[str, float] = field(default_factory=lambda: dict(corpus.DEFAULT_MIX))


def learning_rate(plan: Plan, peak: float) -> Schedule:
    """Warm up, stay, then fall linearly: the end can be moved on resuming."""
    falling = max(1, int(plan.steps * plan.decay))

    def rate(step: jax.Array) -> jax.Array:
        up = jnp.minimum(1.0, (step + 1) / plan.warmup)
        down = jnp.clip((plan.steps - step) / falling, 0.0, 1.0)
        return peak * up * down

    return rate


def loss_sum(params: Params, batch: Batch, shape: Shape) -> jax.Array:
    """Weighted sum of the next-token losses of one batch."""
    hidden = hidden_states(params, batch.tokens, batch.segments, shape)
    scores = logits(params, hidden)
    found = jnp.take_along_axis(scores, batch.targets[..., None], -1)[..., 0]
    return jnp.sum((jax.nn.logsumexp(scores, -1) - found) * batch.weights)


def make_step(shape: Shape, optimizer: optax.GradientTransformation) -> Callable:
    """A jitted step over a tuple of batches of different row lengths."""

    def total(params: Params, batches: tuple[Batch, ...]) -> jax.Array:
        weight = sum(jnp.sum(batch.weights) for batch in batches)
        return sum(loss_sum(params, batch, shape) for batch in batches) / weight

    def step(params: Params, state, batches: tuple[Batch, ...]):
        loss, gradient = jax.value_and_grad(total)(params, batches)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def batches_from(plan: Plan, tokenizer: Tokenizer, start: int) -> Iterator[tuple[Batch, ...]]:
    """The batches of every step from ``start`` on."""
    rng = corpus.stream(plan.seed, f"training from {start}")

    def text(make: Callable[..., corpus.Sample], low: int, high: int) -> Callable:
        def sample(rng: random.Random) -> corpus.Sample:
            characters = int(rng.uniform(low, high) * CHARACTERS_PER_TOKEN)
            return make(rng, plan.mix, characters)

        return sample

    def packer(make: Callable[[random.Random], corpus.Sample], shelf: int) -> Packer:
        return Packer(sample_source(tokenizer, rng, make), shelf)

    short = packer(lambda rng: corpus.short_sample(rng, plan.mix), 24)
    medium = packer(text(corpus.medium_sample, 60, 480), 6)
    long = packer(text(corpus.long_sample, 500, 2620), 3)
    for step in range(start, plan.steps):
        batches = [short.batch(*plan.short_rows)]
        if step % plan.medium_every == 0:
            batches.append(medium.batch(*plan.medium_rows))
        elif step >= plan.long_from * plan.steps and step % plan.long_every == 1:
            batches.append(long.batch(*plan.long_rows))
        yield tuple(batches)


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    # Written beside the target and renamed: a reader never sees half a file.
    partial = path.with_suffix(".partial")
    save_file(arrays, partial)
    os.replace(partial, path)


def save_checkpoint(folder: Path, step: int, seconds: float, params, state) -> None:
    leaves = jax.tree.leaves(state)
    arrays = {f"params/{k}": np.asarray(v) for k, v in params.items()}
    arrays |= {f"state/{i}": np.asarray(v) for i, v in enumerate(leaves)}
    arrays["progress"] = np.array([step, seconds], np.float64)
    _save(folder / "checkpoint.safetensors", arrays)


def load_params(folder: Path) -> tuple[Params, int, float]:
    """Parameters, step and training seconds of the latest checkpoint."""
    arrays = load_file(folder / "checkpoint.safetensors")
    step, seconds = arrays["progress"]
    params = {k.removeprefix("params/"): jnp.asarray(v) for k, v in arrays.items() if k.startswith("params/")}
    return params, int(step), float(seconds)


def load_state(folder: Path, like):
    """The optimiser state, in the structure of a fresh one."""
    arrays = load_file(folder / "checkpoint.safetensors")
    count = len(jax.tree.leaves(like))
    leaves = [jnp.asarray(arrays[f"state/{i}"]) for i in range(count)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _resume(params: Params, state, folder: Path):
    """The latest checkpoint of the folder, or the given start if there is none."""
    if not (folder / "checkpoint.safetensors").exists():
        return params, state, 0, 0.0
    params, step, seconds = load_params(folder)
    return params, load_state(folder, state), step, seconds


def train(
    params: Params,
    shape: Shape,
    tokenizer: Tokenizer,
    plan: Plan,
    folder: Path,
    report: Callable[[Params, int, float], None],
) -> tuple[Params, float]:
    """Train to the end of the plan; returns parameters and seconds spent."""
    rates = learning_rate(plan, plan.matrix_rate), learning_rate(plan, plan.other_rate)
    optimizer = make_optimizer(*rates, plan.weight_decay)
    params, state, start, spent = _resume(params, optimizer.init(params), folder)
    (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")
    run_step = make_step(shape, optimizer)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    saved, losses = time.monotonic(), []
    began = saved - spent
    for number, batches in enumerate(batches_from(plan, tokenizer, start), start + 1):
        params, state, loss = run_step(params, state, batches)
        losses.append(float(loss))
        now = time.monotonic()
        if number % 20 == 0:
            print(f"step {number} loss {np.mean(losses[-20:]):.4f} seconds {now - began:.0f}", flush=True)
        if stop or now - saved > plan.checkpoint_minutes * 60 or number == plan.steps:
            save_checkpoint(folder, number, now - began, params, state)
            if stop:
                raise SystemExit("stopped; the next run goes on from here")
            report(params, number, now - began)
            saved = time.monotonic()
            began += saved - now  # evaluating is not training
    return params, time.monotonic() - began

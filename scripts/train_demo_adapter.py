"""Trains the LoRA adapter that ships beside the embedded model: the same answers, as a pirate would give them.

Questions are those from which the embedded model was trained; its weights stay as they are. Runs for minutes on two CPU
cores, and writes an adapter's folder as PEFT does, whose card says how often its answers are right.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model import corpus, pirate, tasks
from demo_model.batches import Batch, Packer, sample_source
from demo_model.distilling import ASSETS, load_teacher
from demo_model.evaluate import score_turns, table
from demo_model.network import Params, Shape
from demo_model.training import loss_sum
from safetensors.numpy import save_file

RANK, ALPHA = 4, 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIX = {kind: weight for kind, weight in corpus.DEFAULT_MIX.items() if kind != "story"} | {"small talk": 14}
CARD = """---
license: apache-2.0
language: en
library_name: peft
pipeline_tag: text-generation
base_model: demo
---

# A pirate's adapter for the jaxpaged demo model

A LoRA adapter of rank {rank}, {kilobytes:.0f} kB, with which the [embedded model](../demo/README.md) gives its answers
as a pirate would. It shows and tests how one engine serves adapters beside each other:

```
jaxpaged generate --lora {name} "What is the capital of Portugal?"
jaxpaged serve --enable-lora --lora-modules pirate={name}
jaxpaged merge demo {name} -o /tmp/demo-merged
```

It is in PEFT's format. One script made it, in {steps} steps and {minutes:.0f} minutes on 2 CPU cores that other
programs used too:

```
python scripts/train_demo_adapter.py
```

## Accuracy

On questions that neither was trained with, an answer is right when greedy decoding gives exactly the expected text,
in a pirate's words, and then stops (weights of the sum rounded to bfloat16):

{table}
"""

Lora = dict[str, tuple[jax.Array, jax.Array]]


def init_lora(params: Params, seed: int) -> Lora:
    """Name of a weight -> (A, B). B is zero, so that training begins with the model as it is."""
    rng, found = np.random.default_rng(seed), {}
    for name, weight in params.items():
        if name.split(".")[-2] in MODULES:
            outputs, inputs = weight.shape
            a = rng.uniform(-1, 1, (RANK, inputs)) * inputs**-0.5
            found[name] = jnp.asarray(a, jnp.float32), jnp.zeros((outputs, RANK), jnp.float32)
    return found


def summed(params: Params, lora: Lora) -> Params:
    """The model with the adapter in its weights."""
    return {**params, **{name: params[name] + ALPHA / RANK * b @ a for name, (a, b) in lora.items()}}


def train(params: Params, tokenizer, steps: int, seed: int, rows: int) -> tuple[Lora, float]:
    """(The adapter, seconds)."""
    shape, lora = Shape(), init_lora(params, seed)
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, 30, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    state = optimizer.init(lora)

    @jax.jit
    def step(lora: Lora, state, batch: Batch):
        weight = jnp.sum(batch.weights)
        loss, gradient = jax.value_and_grad(lambda lora: loss_sum(summed(params, lora), batch, shape) / weight)(lora)
        updates, state = optimizer.update(gradient, state, lora)
        return optax.apply_updates(lora, updates), state, loss

    rng = corpus.stream(seed, "adapter")
    packer = Packer(sample_source(tokenizer, rng, lambda rng: pirate.sample(rng, MIX)), 24)
    began, losses = time.monotonic(), []
    for number in range(1, steps + 1):
        lora, state, loss = step(lora, state, packer.batch(rows, 128))
        losses.append(float(loss))
        if number % 20 == 0:
            seconds = time.monotonic() - began
            print(f"step {number} loss {np.mean(losses[-20:]):.4f} seconds {seconds:.0f}", flush=True)
    return lora, time.monotonic() - began


def rounded(lora: Lora) -> Lora:
    """As the file has it."""
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16), lora)


def evaluated(params: Params, lora: Lora, tokenizer, count: int) -> str:
    """The table of held-out questions."""
    merged = summed(params, jax.tree.map(lambda array: array.astype(jnp.float32), lora))
    merged = {name: array.astype(jnp.bfloat16).astype(jnp.float32) for name, array in merged.items()}
    scores = {}
    for kind in tasks.TASKS:
        rng = corpus.stream(0, f"evaluation {kind}")
        turns = [tasks.draw(kind, rng, test=True) for _ in range(count)]
        turns = [(question, pirate.as_a_pirate(kind, answer)) for question, answer in turns]
        scores[kind] = score_turns(merged, Shape(), tokenizer, turns, 128)
    return table(scores)


def write(folder: Path, lora: Lora) -> int:
    """Both files, as PEFT writes them. Returns the bytes of the tensors' file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in lora.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = np.asarray(a), np.asarray(b)
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    description = {
        "base_model_name_or_path": "demo",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(MODULES),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ASSETS / "demo-pirate")
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--rows", type=int, default=10, help="of 128 tokens, in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=200, help="per task, in the table")
    arguments = parser.parse_args()
    params, tokenizer = load_teacher()
    lora, seconds = train(params, tokenizer, arguments.steps, arguments.seed, arguments.rows)
    lora = rounded(lora)
    size = write(arguments.output, lora)
    scores = evaluated(params, lora, tokenizer, arguments.questions)
    card = CARD.format(
        rank=RANK,
        kilobytes=size / 1000,
        name=arguments.output.name,
        steps=arguments.steps,
        minutes=seconds / 60,
        table=scores,
    )
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()

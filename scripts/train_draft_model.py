"""Trains the model that drafts for the embedded one: one layer that imitates its probabilities.

The texts are those from which the embedded model was trained, and what is learnt at each place is what that model
supposes to follow. Runs for minutes on two CPU cores, and writes a model folder whose card says how often its drafts
would be accepted.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model.batches import Batch
from demo_model.distilling import asked_for, distil, held_out, load_teacher
from demo_model.export import export_weights, halved, model_config
from demo_model.network import Params, Shape, hidden_states, init_params, logits
from demo_model.training import Plan

SMALL = Shape(hidden_size=128, intermediate_size=256, num_layers=1, num_heads=2, full_attention_every=1)
CARD = """---
license: apache-2.0
language: en
library_name: jaxpaged
pipeline_tag: text-generation
---

# The draft model of the jaxpaged demo model

A Gemma 3 text model of {millions:.2f} million parameters in one layer. It drafts tokens for the
[embedded model](../demo/README.md), with the same tokens, and is good for nothing else:

```
jaxpaged generate --speculative-config '{{"method": "draft_model", "num_speculative_tokens": 4}}' "What is 27 + 45?"
```

It learnt to imitate the embedded model's probabilities on the texts from which that model was trained, in {steps}
steps and {minutes:.0f} minutes on 2 CPU cores that other programs used too:

```
python scripts/train_draft_model.py
```

On samples that it was not trained with, its most likely token is the embedded model's at {greedy:.1%} of the places in
answers, and a token that both draw with the same noise is the same at {drawn:.1%} (temperature 1).
"""


def scores(params: Params, batch: Batch, shape: Shape) -> jax.Array:
    """Logits [rows, length, vocabulary]."""
    return logits(params, hidden_states(params, batch.tokens, batch.segments, shape))


def divergence(params: Params, teacher: Params, batch: Batch) -> jax.Array:
    """How far the small model's probabilities are from the large one's, where answers stand."""
    wanted = jax.nn.softmax(jax.lax.stop_gradient(scores(teacher, batch, Shape())), -1)
    found = jax.nn.log_softmax(scores(params, batch, SMALL), -1)
    return -jnp.sum(jnp.sum(wanted * found, -1) * batch.weights)


@jax.jit
def agreement(params: Params, teacher: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(Answers' tokens, how many of them both find the most likely, how many both draw with the same noise)."""
    own, others = scores(params, batch, SMALL), scores(teacher, batch, Shape())
    noise, counts = jax.random.gumbel(key, own.shape), batch.weights > 0.1
    same = lambda a, b: jnp.sum((jnp.argmax(a, -1) == jnp.argmax(b, -1)) & counts)
    return jnp.sum(counts), same(own, others), same(own + noise, others + noise)


def evaluate(params: Params, teacher: Params, tokenizer: Tokenizer, plan: Plan) -> tuple[float, float]:
    """The two shares of `agreement`, on samples drawn with another seed."""
    found = np.zeros(3)
    for number, batch in enumerate(held_out(plan, tokenizer)):
        found += [int(count) for count in agreement(params, teacher, batch, jax.random.key(number))]
    return found[1] / found[0], found[2] / found[0]


def main() -> None:
    output, plan = asked_for(__doc__.split("\n")[0], "demo-draft")
    teacher, tokenizer = load_teacher()
    params, seconds = distil(init_params(SMALL, plan.seed), teacher, tokenizer, plan, divergence)
    rounded = {name: array.astype(jnp.bfloat16).astype(jnp.float32) for name, array in params.items()}
    greedy, drawn = evaluate(rounded, teacher, tokenizer, plan)
    millions = sum(array.size for array in params.values()) / 1e6
    card = CARD.format(millions=millions, steps=plan.steps, minutes=seconds / 60, greedy=greedy, drawn=drawn)
    export_weights(output, halved(params), model_config(SMALL, tokenizer), card)
    print(card)


if __name__ == "__main__":
    main()

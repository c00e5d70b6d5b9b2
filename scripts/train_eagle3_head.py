"""Trains the EAGLE-3 head of the embedded model: one layer that imitates its probabilities from its hidden states.

Runs for minutes on two CPU cores, and writes a folder whose card says how often its drafts would be accepted.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model.batches import Batch
from demo_model.distilling import asked_for, distil, held_out, load_teacher
from demo_model.eagle3 import HeadShape, checkpoint_tensors, drafting_logits, head_config, init_head, rounded
from demo_model.export import export_weights
from demo_model.network import Params, Shape, hidden_states, logits
from demo_model.training import Plan, batches_from

MODEL, HEAD = Shape(), HeadShape()
NUM_PASSES = 3
LATER = 0.8
"""What a draft weighs, by that of the draft before it."""
NUM_COUNTED = 200
CARD = """---
license: apache-2.0
language: en
library_name: jaxpaged
pipeline_tag: text-generation
---

# The EAGLE-3 head of the jaxpaged demo model

One layer of {millions:.2f} million parameters that drafts tokens for the [embedded model](../demo/README.md) from that
model's hidden states, in the layout of published EAGLE-3 heads:

```
jaxpaged generate --speculative-config '{{"method": "eagle3", "num_speculative_tokens": 3}}' "What is 27 + 45?"
```

It knows the {num_drafts} tokens that occur most often in the answers from which the embedded model was trained,
{known:.1%} of all there. It learnt to imitate that model's probabilities in {steps} steps and {minutes:.0f} minutes on
2 CPU cores that other programs used too:

```
python scripts/train_eagle3_head.py --steps {steps}
```

In the answers of samples that it was not trained with, its most likely token is the embedded model's this often, where
the drafts before it are those of the text; and a token that both draw with the same noise is the same (temperature 1):

| draft | most likely | drawn |
|---|---|---|
{table}

These are mostly short answers to questions. A story it continues much worse: it knows fewer of the words there, and
learnt for minutes only.
"""


def common_tokens(plan: Plan, tokenizer: Tokenizer) -> tuple[np.ndarray, float]:
    """(The tokens of answers that occur most often, in order of their ids; their share)."""
    counts: Counter[int] = Counter()
    for number, batches in enumerate(batches_from(plan, tokenizer, 0)):
        if number == NUM_COUNTED:
            break
        for batch in batches:
            counts.update(batch.targets[batch.weights > 0.1].tolist())
    most = counts.most_common(HEAD.num_drafts)
    return np.sort([token for token, _ in most]), sum(count for _, count in most) / counts.total()


def divergence(known: np.ndarray, params: Params, teacher: Params, batch: Batch) -> jax.Array:
    """How far the head's probabilities are from the model's, in all passes, where answers stand."""
    scores = logits(teacher, hidden_states(teacher, batch.tokens, batch.segments, MODEL))
    wanted = jax.nn.softmax(jax.lax.stop_gradient(scores), -1)[..., known]
    found, places = drafting_logits(params, teacher, batch, HEAD, MODEL, NUM_PASSES)
    losses = [-jnp.sum(wanted * jax.nn.log_softmax(each, -1), -1) * place for each, place in zip(found, places)]
    return sum(LATER**nth * jnp.sum(loss * batch.weights) for nth, loss in enumerate(losses))


def agreement(known: np.ndarray, params: Params, teacher: Params, batch: Batch, key: jax.Array) -> jax.Array:
    """[passes, 3]: answers' tokens, and of how many both find the same one the most likely, or draw the same one."""
    others = logits(teacher, hidden_states(teacher, batch.tokens, batch.segments, MODEL))
    found, places = drafting_logits(params, teacher, batch, HEAD, MODEL, NUM_PASSES)
    noise, rows = jax.random.gumbel(key, others.shape), []
    for each, place in zip(found, places):
        own, counts = jnp.full(others.shape, -jnp.inf).at[..., known].set(each), (batch.weights > 0.1) & place
        same = lambda a, b, counts=counts: jnp.sum((jnp.argmax(a, -1) == jnp.argmax(b, -1)) & counts)
        rows.append(jnp.stack([jnp.sum(counts), same(own, others), same(own + noise, others + noise)]))
    return jnp.stack(rows)


def main() -> None:
    output, plan = asked_for(__doc__.split("\n")[0], "demo-eagle3")
    teacher, tokenizer = load_teacher()
    known, share = common_tokens(plan, tokenizer)
    params = init_head(HEAD, MODEL, teacher["model.embed_tokens.weight"], known, plan.seed)
    params, seconds = distil(params, teacher, tokenizer, plan, partial(divergence, known))
    judge, found = jax.jit(partial(agreement, known)), np.zeros((NUM_PASSES, 3))
    for number, batch in enumerate(held_out(plan, tokenizer)):
        found += np.asarray(judge(rounded(params), teacher, batch, jax.random.key(number)))
    lines = [
        f"| {nth} | {greedy / count:.1%} | {drawn / count:.1%} |" for nth, (count, greedy, drawn) in enumerate(found, 1)
    ]
    card = CARD.format(
        millions=sum(array.size for array in params.values()) / 1e6,
        num_drafts=len(known),
        known=share,
        steps=plan.steps,
        minutes=seconds / 60,
        table="\n".join(lines),
    )
    tensors = checkpoint_tensors(params, known, MODEL.vocab_size)
    export_weights(output, tensors, head_config(HEAD, MODEL), card)
    print(card)


if __name__ == "__main__":
    main()

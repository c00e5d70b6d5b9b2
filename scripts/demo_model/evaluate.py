"""Exact-answer accuracy on questions that training never saw.

An answer counts as right when, given the question and its own beginning,
every token including the end token is the most likely one: that is the same
as greedy decoding giving exactly this answer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from demo_model import corpus, tasks
from demo_model.batches import Batch, empty_batch, encode, place
from demo_model.network import Params, Shape, hidden_states, logits

CONTEXTS = {"code word, 256 tokens": 256, "code word, 1,000 tokens": 1000}
LONG_CONTEXTS = {"code word, 2,000 tokens": 2000, "code word, 2,500 tokens": 2500}


@dataclass
class Score:
    """Right answers, and how sure the least sure tokens of all answers are."""

    right: int
    asked: int
    margin: float  # first percentile of best minus second best logit

    @property
    def share(self) -> float:
        return self.right / self.asked


def _question_batches(tokenizer: Tokenizer, turns: list[corpus.Turn], length: int, rows: int) -> list[Batch]:
    batches = []
    for first in range(0, len(turns), rows):
        batch = empty_batch(rows, length)
        for row, turn in enumerate(turns[first : first + rows]):
            place(batch, row, 0, encode(tokenizer, corpus.chat([turn])), 1)
        batches.append(batch)
    return batches


def _forward(params: Params, batch: Batch, shape: Shape):
    scores = logits(params, hidden_states(params, batch.tokens, batch.segments, shape))
    winner = jnp.argmax(scores, -1)
    others = jnp.arange(shape.vocab_size) != winner[..., None]
    second = jnp.max(jnp.where(others, scores, -jnp.inf), -1)
    return winner == batch.targets, jnp.max(scores, -1) - second


_jitted_forward = jax.jit(_forward, static_argnums=2)


def score_turns(
    params: Params,
    shape: Shape,
    tokenizer: Tokenizer,
    turns: list[corpus.Turn],
    length: int,
) -> Score:
    right, margins = 0, []
    rows = max(1, min(len(turns), 4096 // length))
    for batch in _question_batches(tokenizer, turns, length, rows):
        hit, margin = map(np.asarray, _jitted_forward(params, batch, shape))
        answer = batch.weights == 1.0
        present = answer.any(1)
        right += int(((hit | ~answer).all(1) & present).sum())
        margins.append(margin[answer])
    return Score(right, len(turns), float(np.percentile(np.concatenate(margins), 1)))


def evaluate(
    params: Params,
    shape: Shape,
    tokenizer: Tokenizer,
    count: int,
    long_count: int,
    dtype=jnp.float32,
) -> dict[str, Score]:
    """The table of scores: all tasks, then the code word at growing distances."""
    params = {k: v.astype(jnp.bfloat16).astype(dtype) for k, v in params.items()}
    scores = {}
    for task in tasks.TASKS:
        rng = corpus.stream(0, f"evaluation {task}")
        turns = [tasks.draw(task, rng, test=True) for _ in range(count)]
        scores[task] = score_turns(params, shape, tokenizer, turns, 128)
    contexts = CONTEXTS | (LONG_CONTEXTS if long_count else {})
    for name, tokens in contexts.items():
        rng = corpus.stream(0, f"evaluation {name}")
        number = long_count if tokens > 300 else count
        turns = [code_word_turn(tokenizer, rng, tokens) for _ in range(number)]
        if turns:
            room = -(-(tokens + 64) // 64) * 64
            scores[name] = score_turns(params, shape, tokenizer, turns, room)
    return scores


def code_word_turn(tokenizer: Tokenizer, rng, tokens: int) -> corpus.Turn:
    """A held-out code word in a text of almost exactly that many tokens."""
    characters = int(tokens * 3.4)
    while True:
        turn = tasks.draw_code_word(rng, characters, test=True)
        size = len(tokenizer.encode(turn[0]).ids)
        if 0.9 * tokens <= size <= tokens + 20:
            return turn
        characters = int(characters * (0.97 * tokens / size))


def table(scores: dict[str, Score]) -> str:
    lines = ["| task (held-out questions) | right | share | margin |", "|---|---|---|---|"]
    for name, score in scores.items():
        share = f"{100 * score.share:.1f} %"
        lines.append(f"| {name} | {score.right}/{score.asked} | {share} | {score.margin:.2f} |")
    return "\n".join(lines)

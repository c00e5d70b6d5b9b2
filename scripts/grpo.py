"""Teaches the embedded model to understand other wordings of a sum, by GRPO: from rewards for right answers alone.

The engine draws several answers to each question. Those that are right get 1, others 0, and an answer's advantage is
its reward less the mean of its question's (arXiv 2402.03300; not divided by the deviation: 2503.20783). A trainer
raises the probability of answers that are better than others, and gives its weights to the engine as they are: both
have one tree of parameters and one definition of the model (`llm.dense_model()`). Runs offline on two CPU cores.

    python scripts/grpo.py --steps 10

Letters: R answers of a batch, C tokens of an answer with its question.
"""

import argparse
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpaged import LLM, LogprobDifference, SamplingParams, logprob_difference
from jaxpaged.messages import RequestOutput

WORDINGS = ("What do {} and {} make?", "Add {} and {}.", "{} and {} together?", "What is the sum of {} and {}?")
KNOWN = "What is {} + {}?"
NUM_TOKENS = 14
LOW, HIGH = 0.8, 1.25
"""An answer's probability is not driven further from what it was when it was drawn than times this."""


@dataclass(frozen=True)
class Settings:
    steps: int = 10
    prompts: int = 16
    samples: int = 16
    rate: float = 2e-4
    length: int = 48
    held_out: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Answers:
    """`is_drawn_RC`: which tokens the engine drew; `logprobs_RC`: with which log probabilities."""

    tokens_RC: np.ndarray
    segments_RC: np.ndarray
    is_drawn_RC: np.ndarray
    logprobs_RC: np.ndarray
    rewards_R: np.ndarray


def questions(wordings: Sequence[str], count: int, rng: random.Random, held_out: bool) -> list[tuple[str, int]]:
    """Questions with their answers. A third of the pairs of numbers is never trained with."""
    found: list[tuple[str, int]] = []
    while len(found) < count:
        a, b = rng.randint(10, 49), rng.randint(10, 49)
        if ((7 * a + b) % 3 == 0) == held_out:
            found.append((wordings[len(found) % len(wordings)].format(a, b), a + b))
    return found


def is_right(text: str, answer: int) -> bool:
    """Whether the last number that is said is the sum."""
    return re.findall(r"\d+", text)[-1:] == [str(answer)]


def ask(llm: LLM, asked: Sequence[tuple[str, int]], sampling: SamplingParams) -> list[RequestOutput]:
    chats: Any = [[{"role": "user", "content": question}] for question, _ in asked]
    return llm.chat(chats, sampling, use_tqdm=False)


def accuracy(llm: LLM, asked: Sequence[tuple[str, int]]) -> float:
    """The share of questions that are answered right without drawing."""
    outputs = ask(llm, asked, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    return float(np.mean([is_right(each.outputs[0].text, answer) for each, (_, answer) in zip(outputs, asked)]))


def drawn(llm: LLM, asked: Sequence[tuple[str, int]], settings: Settings, step: int) -> Answers:
    """Several answers to each question, those of one question side by side. An answer lies in a row of its own."""
    seed = settings.seed * 10_000 + step
    sampling = SamplingParams(n=settings.samples, max_tokens=NUM_TOKENS, logprobs=0, seed=seed)
    outputs = ask(llm, asked, sampling)
    shape = len(asked) * settings.samples, settings.length
    answers = Answers(*(np.zeros(shape, kind) for kind in ("int32", "int32", bool, "float32")), np.zeros(shape[0]))
    pairs = [(output, each, sum_) for output, (_, sum_) in zip(outputs, asked) for each in output.outputs]
    for row, (output, answer, wanted) in enumerate(pairs):
        begin, end = len(output.prompt_token_ids), len(output.prompt_token_ids) + len(answer.token_ids)
        answers.tokens_RC[row, :end] = [*output.prompt_token_ids, *answer.token_ids]
        answers.segments_RC[row, :end], answers.is_drawn_RC[row, begin:end] = 1, True
        found = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids)]
        answers.logprobs_RC[row, begin:end] = found
        answers.rewards_R[row] = is_right(answer.text, wanted)
    return answers


def loss(
    params: Any, dense: Any, answers: dict[str, jax.Array], advantages_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(The clipped loss of GRPO, a mean over all tokens that were drawn; the trainer's log probabilities)."""
    found_RC = dense.logprobs(params, answers["tokens_RC"], answers["segments_RC"])
    apart_RC = jnp.where(answers["is_drawn_RC"], found_RC - answers["logprobs_RC"], 0.0)
    ratio_RC, advantages_RC = jnp.exp(apart_RC), advantages_R[:, None]
    gain_RC = jnp.minimum(ratio_RC * advantages_RC, jnp.clip(ratio_RC, LOW, HIGH) * advantages_RC)
    return -jnp.sum(jnp.where(answers["is_drawn_RC"], gain_RC, 0.0)) / jnp.sum(answers["is_drawn_RC"]), found_RC


class Trainer:
    """The engine's parameters, and what Adam knows of them."""

    def __init__(self, llm: LLM, rate: float):
        dense, optimizer = llm.dense_model(), optax.adam(rate)
        self.params = llm.apply_model(lambda params: params)[0]
        self._state = optimizer.init(self.params)

        @jax.jit
        def step(params: Any, state: Any, answers: dict[str, jax.Array], advantages_R: jax.Array):
            gradient, found_RC = jax.grad(partial(loss, dense=dense), has_aux=True)(
                params, answers=answers, advantages_R=advantages_R
            )
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, found_RC

        self._step = step

    def learn(self, answers: Answers, samples: int) -> LogprobDifference:
        """A step; returns how far the log probabilities of the tokens that were drawn are from the engine's."""
        rewards = answers.rewards_R.reshape(-1, samples)
        advantages_R = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1).astype(np.float32)
        arrays = {name: array for name, array in vars(answers).items() if name != "rewards_R"}
        self.params, self._state, found_RC = self._step(self.params, self._state, arrays, advantages_R)
        is_drawn_RC = answers.is_drawn_RC
        return logprob_difference(answers.logprobs_RC[is_drawn_RC], np.asarray(found_RC)[is_drawn_RC])


def train(settings: Settings) -> list[dict[str, float]]:
    """What was printed of each step."""
    llm = LLM("demo", dtype="float32", max_model_len=64, max_num_seqs=64, seed=settings.seed)
    rng, trainer, history = random.Random(settings.seed), Trainer(llm, settings.rate), []
    held_out = questions(WORDINGS, settings.held_out, random.Random(1), held_out=True)
    known = questions((KNOWN,), settings.held_out, random.Random(2), held_out=True)
    print(f"before: {accuracy(llm, held_out):.0%} right, and {accuracy(llm, known):.0%} of {KNOWN!r}", flush=True)
    for step in range(1, settings.steps + 1):
        began = time.monotonic()
        answers = drawn(llm, questions(WORDINGS, settings.prompts, rng, held_out=False), settings, step)
        drew = llm.get_weight_info()
        apart = trainer.learn(answers, settings.samples)
        llm.note_logprob_difference(apart)
        info = llm.update_weights(trainer.params, f"step {step}")
        of_step = {
            "reward": float(answers.rewards_R.mean()),
            "right": accuracy(llm, held_out),
            "staleness": step - 1 - drew.num_updates,
            "apart": apart.largest,
            "updates": info.num_updates,
        }
        history.append(of_step)
        print(
            f"step {step}: reward {of_step['reward']:.2f}, held out {of_step['right']:.0%} right, staleness "
            f"{of_step['staleness']} updates, {apart}, {time.monotonic() - began:.1f} s",
            flush=True,
        )
    print(f"after: {history[-1]['right']:.0%} right, and {accuracy(llm, known):.0%} of {KNOWN!r}")
    llm.shutdown()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()

"""scripts/grpo.py: an engine draws, a trainer learns, and both compute with the same weights afterwards."""

import importlib
import random

import jax
import numpy as np

from jaxpaged import LLM


def test_the_engine_draws_with_what_the_trainer_learned():
    grpo = importlib.import_module("grpo")
    settings = grpo.Settings(samples=2, length=40)
    llm = LLM("demo", dtype="float32", max_model_len=64, max_num_seqs=4)
    asked = grpo.questions(grpo.WORDINGS, 2, random.Random(0), held_out=False)
    trainer = grpo.Trainer(llm, rate=1e-3)
    before = [np.array(leaf) for leaf in jax.tree.leaves(trainer.params)]  # the engine frees those it gives up
    for step in range(1, 3):
        answers = grpo.drawn(llm, asked, settings, step)
        answers.rewards_R[:] = [1, 0, 0, 1]
        apart = trainer.learn(answers, settings.samples)
        assert apart.num_tokens == answers.is_drawn_RC.sum() > 4
        assert 0 <= apart.mean <= apart.p99 <= apart.largest <= 3e-5, "after an update, too"
        info = llm.update_weights(trainer.params, f"step {step}")
        assert (info.version, info.num_updates) == (f"step {step}", step)
    after = llm.apply_model(jax.tree.leaves)[0]
    assert all(a is b for a, b in zip(after, jax.tree.leaves(trainer.params), strict=True)), "without a copy"
    assert all(np.abs(new - old).max() > 1e-4 for new, old in zip(after, before, strict=True))
    assert grpo.drawn(llm, asked, settings, 1).is_drawn_RC.any()
    llm.shutdown()


def test_only_the_last_number_counts():
    grpo = importlib.import_module("grpo")
    assert grpo.is_right("13 + 16 = 29.", 29) and not grpo.is_right("29 or 30", 29) and not grpo.is_right("", 29)
    train, test = (set(grpo.questions(("{} {}",), 200, random.Random(0), held_out)) for held_out in (False, True))
    assert train and test and not train & test

"""The embedded model in a process of its own says what it says in this one."""

import asyncio
import math

import pytest

from jaxpaged import AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.sampling_params import RequestOutputKind
from tests.end_to_end.conftest import OPTIONS

# The class itself cannot be sent to another process; its name can.
SENDABLE = {**OPTIONS, "logits_processors": ("tests.end_to_end.conftest:BanBelow",)}
QUESTIONS = ["What is the capital of France?", "What is 27 + 45?", "Spell the word banana.", "Count from 3 to 9."]


def params(i):
    """Greedy and seeded requests, with log probabilities, stop strings and a custom processor among them."""
    return SamplingParams(
        temperature=[0.0, 0.8][i % 2],
        seed=i,
        max_tokens=24,
        logprobs=2 if i % 3 == 0 else None,
        stop=["."] if i == 2 else None,
        extra_args={"ban_below": 400} if i == 3 else None,
    )


async def ask(llm, question, request_id, wanted):
    """The whole answer from its pieces."""
    prompt = await llm.chat_prompt([{"role": "user", "content": question}])
    wanted = wanted.clone()
    wanted.output_kind = RequestOutputKind.DELTA
    completions = [o.outputs[0] async for o in llm.generate(prompt, wanted, request_id)]
    logprobs = [line for c in completions for line in c.logprobs or ()]
    return "".join(c.text for c in completions), [i for c in completions for i in c.token_ids], logprobs


def near(line, other):
    """Whether tokens have nearly the probabilities that they have in another line. Which of two equally likely ones is
    named last, and the last bits of logits, depend on what is computed together, and that on who comes first."""
    least = min(entry.logprob for entry in other.values())
    others = {i: other[i].logprob if i in other else least for i in line}
    return all(abs(math.exp(entry.logprob) - math.exp(others[i])) < 0.02 for i, entry in line.items())


def test_streams_from_another_process_are_what_this_process_says(llm):
    async def main(other):
        answers = await asyncio.gather(*(ask(other, q, str(i), params(i)) for i, q in enumerate(QUESTIONS)))
        return answers, await other.executor_stats()

    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    expected = llm.chat(conversations, [params(i) for i in range(len(QUESTIONS))], use_tqdm=False)
    heard = set()
    config = EngineConfig.from_options(model="demo", **SENDABLE)  # now its programs are in the compilation cache
    other = AsyncLLM.from_config(config, lambda what, done, total: heard.add(what))
    try:
        answers, stats = asyncio.run(main(other))
    finally:
        other.shutdown()
    assert "Paris" in answers[0][0]
    assert stats["recompiles"] == 0
    assert "weights" in heard
    for i, (text, token_ids, logprobs) in enumerate(answers):
        completion = expected[i].outputs[0]
        assert (text, token_ids) == (completion.text, completion.token_ids)
        assert len(logprobs) == len(completion.logprobs or ())
        for drawn, line, wanted in zip(token_ids, logprobs, completion.logprobs or ()):
            assert drawn in line and drawn in wanted and len(line) >= 2 <= len(wanted)
            assert near(line, wanted) and near(wanted, line)


def test_a_model_that_is_not_there_is_found_by_the_other_process_and_said_here(tmp_path):
    with pytest.raises((CheckpointError, UsageError), match=str(tmp_path)):
        AsyncLLM.from_config(EngineConfig.from_options(model=tmp_path / "nothing"))


def test_a_custom_processor_as_a_class_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="module:Class"):
        AsyncLLM.from_config(EngineConfig.from_options(model="demo", **OPTIONS))

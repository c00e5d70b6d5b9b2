"""The deltas of a request, one after the other, are its answer, however the engine is paused, reset or put to sleep."""

import asyncio
import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_core import FACTORY, answer, llm_in_thread
from tests.engine.fake_engine import make_engine

ASKED = [
    {},
    {"logprobs": 1},
    {"stop": ["no such text"]},
    {"n": 2, "temperature": 1.0},
    {"prompt_logprobs": 1},
    {"temperature": 1.0, "stop_token_ids": list(range(40, 60))},
    {"stop": ["e"], "temperature": 1.0},
]
PROMPTS = ["the cat", "once upon a time", "a"]
DISTURB = ["steps", "reset", "sleep 0", "sleep 1", "abort"]


def params_of(seed: int, kind: RequestOutputKind, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **ASKED[seed % len(ASKED)]},
        output_kind=kind,
    )


class Answers:
    """What was heard of every request: by delta joined, else the last that was said."""

    def __init__(self, by_delta: bool):
        self.by_delta = by_delta
        self.parts: dict[tuple[str, int], list] = {}
        self.finished: set[str] = set()

    def hear(self, outputs) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs), "two results of a request in a step"
        for output in outputs:
            assert output.request_id not in self.finished, "it had ended"
            assert len({completion.index for completion in output.outputs}) == len(output.outputs)
            for completion in output.outputs:
                self.parts.setdefault((output.request_id, completion.index), []).append(completion)
            if output.finished:
                self.finished.add(output.request_id)

    def forget(self, request_id: str) -> None:
        for key in [key for key in self.parts if key[0] == request_id]:
            del self.parts[key]

    def whole(self) -> dict[tuple[str, int], tuple]:
        """(text, token ids, log probabilities, finish and stop reason) of every sequence."""
        whole = {}
        for key, parts in self.parts.items():
            used = parts if self.by_delta else parts[-1:]
            text, ids = "".join(part.text for part in used), [i for part in used for i in part.token_ids]
            lines = [line for part in used for line in part.logprobs or ()]
            whole[key] = text, ids, lines, parts[-1].finish_reason, parts[-1].stop_reason
        return whole


def served(kind: RequestOutputKind, num_steps: int, seed: int, disturbances: list[str]) -> dict[tuple[str, int], tuple]:
    """The answers of an engine that is disturbed after every few steps. An aborted request is asked for anew, with the
    same id and at once."""
    engine, _ = make_engine(num_scheduler_steps=num_steps, max_num_seqs=4, max_num_batched_tokens=16)
    heard, draw = Answers(kind is RequestOutputKind.DELTA), random.Random(seed)
    asked = {f"r{i}": (PROMPTS[i % 3], params_of(seed + i, kind, 4 + 5 * i)) for i in range(5)}
    for request_id, (prompt, params) in asked.items():
        engine.add_request(request_id, prompt, params)
    for disturbance in disturbances:
        for _ in range(draw.randint(0, 3)):
            heard.hear(engine.step())
        if disturbance == "reset":
            engine.reset_prefix_cache()
        elif disturbance.startswith("sleep"):
            engine.sleep(int(disturbance[-1]), "keep")
            heard.hear(engine.step() if draw.random() < 0.5 else [])
            engine.wake_up()
        elif disturbance == "abort":
            request_id = draw.choice(sorted(asked))
            if request_id not in heard.finished:
                engine.reset_prefix_cache()  # with tokens of it that no step has returned
                engine.abort_request(request_id)
                heard.forget(request_id)
                engine.add_request(request_id, *asked[request_id])
    while engine.has_unfinished_requests():
        heard.hear(engine.step())
    return heard.whole()


@given(
    disturbances=st.lists(st.sampled_from(DISTURB), max_size=8),
    kind=st.sampled_from(list(RequestOutputKind)),
    num_steps=st.sampled_from([1, 3]),
    seed=st.integers(0, 20),
)
def test_an_answer_is_the_same_however_the_engine_is_disturbed(disturbances, kind, num_steps, seed):
    expected = served(RequestOutputKind.CUMULATIVE, 1, seed, [])
    assert served(kind, num_steps, seed, disturbances) == expected


def test_an_id_that_is_used_again_hears_nothing_of_the_request_before():
    engine, _ = make_engine()
    long = params_of(0, RequestOutputKind.CUMULATIVE, 30)
    for pause in (engine.reset_prefix_cache, lambda: engine.sleep(0, "keep")):
        engine.add_request("same", "once upon a time", long)
        engine.step()
        pause()
        engine.abort_request("same")
        engine.wake_up()
        engine.add_request("same", "the cat", params_of(0, RequestOutputKind.CUMULATIVE, 3))
        heard = Answers(by_delta=False)
        while engine.has_unfinished_requests():
            heard.hear(engine.step())
        alone, _ = make_engine()
        alone.add_request("same", "the cat", params_of(0, RequestOutputKind.CUMULATIVE, 3))
        expected = Answers(by_delta=False)
        while alone.has_unfinished_requests():
            expected.hear(alone.step())
        assert heard.whole() == expected.whole()


# ---- servers


@contextlib.contextmanager
def llm_in_process():
    llm = AsyncLLM.from_config(EngineConfig.from_options(), factory=FACTORY)
    try:
        yield llm
    finally:
        llm.shutdown()


async def read(llm, name: str, num_tokens: int, draw: random.Random) -> list[int]:
    """The tokens of one answer by delta, read by a client that is slow now and then."""
    params = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, detokenize=draw.random() < 0.5, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    async for output in llm.generate({"prompt_token_ids": [5] * 7}, params, name):
        assert [completion.index for completion in output.outputs] == [0], "two completions of a sequence in a result"
        tokens += output.outputs[0].token_ids
        if draw.random() < 0.2:
            await asyncio.sleep(draw.choice([0, 0.002]))
    return tokens


@pytest.mark.parametrize("where", [llm_in_thread, llm_in_process])
def test_no_token_of_a_stream_is_lost_while_a_server_is_reset_and_sleeps(where):
    async def main(llm):
        draw, wrong = random.Random(5), []

        async def client(number):
            for i in range(25):
                num_tokens = draw.choice([1, 2, 2, 3, 3, 40])
                tokens = await read(llm, f"{number}.{i}", num_tokens, draw)
                if tokens != answer(7, num_tokens):
                    wrong.append((num_tokens, tokens))

        async def disturb():
            while True:
                await llm.reset_prefix_cache()
                if draw.random() < 0.1:
                    await llm.sleep(draw.choice([0, 1]), "keep")
                    await llm.wake_up()

        disturbing = asyncio.ensure_future(disturb())
        await asyncio.gather(*map(client, range(8)))
        disturbing.cancel()
        assert not wrong

    with where() as llm:
        asyncio.run(main(llm))

"""Hundreds of requests with pictures, many of which are aborted or left, and what is there afterwards: nothing."""

import asyncio
import contextlib
import gc
import random

import pytest

from jaxpaged import AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import RequestError
from tests.end_to_end.test_seeing import OPTIONS, chat_of, prompt_of
from tests.models.seeing_folder import write_seeing_folder
from tests.multimodal.drawn import drawn, encoded
from tests.processes_and_threads import left_of, running

NUM_REQUESTS, AT_ONCE = 300, 12
FILES = [encoded(drawn(20 + number, 30, seed=number)) for number in range(40)]


async def one(engine, number, rng):
    """A request that ends, is aborted, is left by its consumer, is cancelled before or after it began, or is bad."""
    kind, name = rng.choice(("ends", "aborted", "left", "cancelled", "bad")), f"request-{number}"
    pictures = rng.choices(FILES, k=rng.choice((1, 1, 2)))
    prompt = prompt_of(b"bad" if kind == "bad" else pictures[0])
    if kind != "bad" and rng.random() < 0.5:
        prompt = await engine.chat_prompt(chat_of(*pictures))
    params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True, temperature=0.0)
    outputs = engine.generate(prompt, params, name)
    if kind == "cancelled":
        consumer = asyncio.create_task(anext(outputs))
        await asyncio.sleep(rng.random() * 0.05)
        consumer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await consumer
    elif kind == "left":
        await anext(outputs)
    elif kind == "bad":
        with pytest.raises(RequestError, match="is no picture"):
            await anext(outputs)
    else:
        async for output in outputs:
            assert output.error is None
            if kind == "aborted":
                await engine.abort(name)
                break
    await outputs.aclose()
    return kind


async def soak(engine):
    rng, turns = random.Random(0), asyncio.Semaphore(AT_ONCE)

    async def in_turn(number):
        async with turns:
            return await one(engine, number, rng)

    kinds = await asyncio.gather(*(in_turn(number) for number in range(NUM_REQUESTS)))
    assert len(set(kinds)) == 5
    while engine.get_num_unfinished_requests() or (await engine.block_map()).request_ids:
        await asyncio.sleep(0.05)
    blocks = await engine.block_map()
    assert (blocks.owner == -1).all() and not blocks.num_owners[1:].any()
    assert not blocks.encoder_held.any() and (blocks.picture == -1).all()
    assert len(engine._cores.all[0].pixels) == 0, "no pixels wait for a core that might ask"


@pytest.mark.exhaustive
def test_nothing_is_left_of_hundreds_of_requests_with_pictures(tmp_path):
    before = running()
    folder = write_seeing_folder(tmp_path)
    engine = AsyncLLM.from_config(EngineConfig.from_options(model=str(folder), **OPTIONS))
    pictures = engine.input_processor.pictures
    try:
        asyncio.run(soak(engine))
        pictures.cache.clear()
        gc.collect()
        assert (pictures.budget.used, pictures.budget.num_waiting) == (0, 0)
    finally:
        engine.shutdown()
    assert left_of(before) == set()

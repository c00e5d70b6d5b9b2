"""Adapters of cores in other processes: what all of them say together, and what comes back with a new core."""

import asyncio
import os
import signal

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.messages import LoRARequest
from tests.engine import fake_core
from tests.engine.fake_core import answer, llm_in_thread
from tests.engine.test_async_llm import PROMPT, core_of, params, until
from tests.engine.test_core_client import both_ready, told

ADAPTERS = [LoRARequest(f"a{i}", i, f"/adapters/{i}") for i in (1, 2, 3)]
OPTIONS = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}


def changed(number, num_tokens=5):
    return [token + number for token in answer(len(PROMPT), num_tokens)]


async def tokens_of(llm, lora_request, request_id="r", **options):
    """What one request gets."""
    outputs = llm.generate(PROMPT, params(), request_id, lora_request=lora_request, **options)
    return [token async for output in outputs for token in output.outputs[0].token_ids]


async def check_answers(llm):
    """All adapters at a time, and requests without one."""
    wanted = [None, *ADAPTERS] * 4
    tokens = [tokens_of(llm, each, f"r{i}") for i, each in enumerate(wanted)]
    assert await asyncio.gather(*tokens) == [changed(each.lora_int_id if each else 0) for each in wanted]


def test_all_cores_have_one_catalogue():
    async def main(llm):
        await both_ready(llm)
        info = await llm.add_lora(ADAPTERS[0])
        assert (info.lora_name, info.digest) == ("a1", "adds 1")
        await check_answers(llm)
        for rank in (0, 1):
            assert await tokens_of(llm, ADAPTERS[1], data_parallel_rank=rank) == changed(2)
        assert await llm.list_loras() == {1, 2, 3} and await llm.pin_lora(2) and not await llm.pin_lora(4)
        stats = [core.metrics.stats.lora for core in llm._cores.all]
        assert all(each.num_loads for each in stats)
        assert told(llm, "jaxpaged:lora_loads") == {str(i): each.num_loads for i, each in enumerate(stats)}
        assert await llm.remove_lora(1) and not await llm.remove_lora(1)
        assert await llm.list_loras() == {2, 3}
        with pytest.raises(RequestError, match="'a1' of request 'r' is not loaded, or no more"):
            await tokens_of(llm, info)
        with pytest.raises(CheckpointError, match="/adapters/x has no adapter_config.json"):
            await llm.add_lora(LoRARequest("x", 9, "/adapters/x"))

    with llm_in_thread(data_parallel_size=2, max_num_seqs=64, max_model_len=4096, **OPTIONS) as llm:
        asyncio.run(main(llm))


def test_a_core_that_comes_in_place_of_another_knows_its_adapters():
    async def main(llm):
        await check_answers(llm)
        assert await llm.pin_lora(3)
        await llm.remove_lora(2)
        pid = (await llm.executor_stats())["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: core_of(llm).link.num_restarts == 1)
        assert await tokens_of(llm, ADAPTERS[0]) == changed(1), "the first one that it hears of"
        assert (await llm.executor_stats())["pid"] != pid
        assert await llm.list_loras() == {1, 3}
        await check_answers(llm)

    llm = AsyncLLM.from_config(EngineConfig.from_options(**OPTIONS), factory=fake_core.FACTORY)
    try:
        asyncio.run(main(llm))
    finally:
        llm.shutdown()

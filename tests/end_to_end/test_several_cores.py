"""Two real engine cores behind one front end: the same answers from both, and every program compiled once."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from jaxpaged import AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import EngineRestartError

OPTIONS = {
    "model": "demo",
    "max_num_seqs": 2,
    "max_model_len": 256,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "num_scheduler_steps": 1,
    "data_parallel_size": 2,
}


async def lose_a_core(llm, prompt, wanted):
    """One is killed while requests are under way: its own end with an error, and the other does not notice."""

    async def ask(request_id, core):
        params = SamplingParams(temperature=0, max_tokens=20)
        last = [each async for each in llm.generate(prompt, params, request_id, data_parallel_rank=core)][-1]
        return last.outputs[0].text

    pids = pids_of(llm)
    os.kill(pids[0], signal.SIGSTOP)  # so that its requests are under way for certain
    asked = [asyncio.create_task(ask(f"under way {i}", i % 2)) for i in range(6)]
    assert [await each for each in asked[1::2]] == [wanted] * 3
    os.kill(pids[0], signal.SIGKILL)
    for each in asked[::2]:
        with pytest.raises(EngineRestartError, match="SIGKILL"):
            await each
    assert await ask("beside", 1) == wanted
    assert await ask("after", 0) == wanted
    after = pids_of(llm)
    assert after[0] != pids[0] and after[1] == pids[1]


def pids_of(llm):
    return [core.link._supervisor.pid for core in llm._cores.all]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_two_cores_say_the_same_and_compile_each_program_once(tmp_path, num_stages):
    """Each has devices of its own, or several: a stage for each part of the layers."""

    async def main(llm):
        await llm.wait_for_programs()
        prompt = await llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        texts = []
        for core in (0, 1):
            params = SamplingParams(temperature=0, max_tokens=20)
            last = [each async for each in llm.generate(prompt, params, f"r{core}", data_parallel_rank=core)][-1]
            texts.append(last.outputs[0].text)
        figures = [core.executor_stats for core in llm._cores.all], await llm.executor_stats()
        await lose_a_core(llm, prompt, texts[0])
        return texts, *figures

    llm = AsyncLLM.from_config(
        EngineConfig.from_options(**OPTIONS, pipeline_parallel_size=num_stages, compilation_cache_dir=str(tmp_path))
    )
    try:
        texts, each, both = asyncio.run(main(llm))
    finally:
        llm.shutdown()
    assert texts[0] == texts[1] and "Paris" in texts[0]
    assert both["programs_ready"] == both["programs"] == sum(stats["programs"] for stats in each)
    assert both["programs_from_cache"] >= both["programs"] / 2, "what one had compiled, the other one found"
    assert both["recompiles"] == 0 and both["num_devices"] == 2 * num_stages
    assert any(Path(tmp_path / "turns").iterdir())

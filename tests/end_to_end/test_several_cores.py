"""Two real engine cores behind one front end: the same answers from both, and every program compiled once."""

import asyncio
from pathlib import Path

import pytest

from jaxpaged import AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig

OPTIONS = {
    "model": "demo", "max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 16, "token_buckets": (16,),
    "num_scheduler_steps": 1, "data_parallel_size": 2,
}  # fmt: skip


@pytest.mark.slow
def test_two_cores_say_the_same_and_compile_each_program_once(tmp_path):
    async def main(llm):
        await llm.wait_for_programs()
        prompt = await llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        texts = []
        for core in (0, 1):
            params = SamplingParams(temperature=0, max_tokens=20)
            last = [each async for each in llm.generate(prompt, params, f"r{core}", data_parallel_rank=core)][-1]
            texts.append(last.outputs[0].text)
        return texts, [core.executor_stats for core in llm._cores.all], await llm.executor_stats()

    llm = AsyncLLM.from_config(EngineConfig.from_options(**OPTIONS, compilation_cache_dir=str(tmp_path)))
    try:
        texts, each, both = asyncio.run(main(llm))
    finally:
        llm.shutdown()
    assert texts[0] == texts[1] and "Paris" in texts[0]
    assert both["programs_ready"] == both["programs"] == sum(stats["programs"] for stats in each)
    assert both["programs_from_cache"] == both["programs"] / 2, "what one had compiled, the other one found"
    assert both["recompiles"] == 0 and both["num_devices"] == 2
    assert any(Path(tmp_path / "turns").iterdir())

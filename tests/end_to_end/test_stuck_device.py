"""A device that never finishes the program of a pooling step, or of prompt log probabilities: the watchdog notices."""

import asyncio
import time

import jax
import pytest

from jaxpaged import AsyncLLM, PoolingParams, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import build_core
from jaxpaged.errors import EngineRestartError
from jaxpaged.worker.device import Device
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.pooling_checkpoints import write, write_tokenizer

pytestmark = pytest.mark.slow
FACTORY = f"{__name__}:build_with_stuck_device"
SMALL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 16,
    "num_scheduler_steps": 1,
}


def build_with_stuck_device(config, reports):
    """A `core_process.Factory`: what programs of these kinds compute never comes."""
    call = Device.call

    def called(self, key, *arguments):
        results = call(self, key, *arguments)
        return jax.tree.map(never_done, results) if key.kind in ("pool", "prompt_logprobs") else results

    Device.call = called
    return build_core(config, reports)


@jax.jit
def never_done(array):
    return jax.pure_callback(lambda given: time.sleep(3600), jax.ShapeDtypeStruct(array.shape, array.dtype), array)


@pytest.mark.parametrize(
    "pools",
    [pytest.param(False, id="prompt_logprobs", marks=pytest.mark.exhaustive), pytest.param(True, id="pooling")],
)
def test_a_hang_in_this_kind_of_step_is_noticed(pools, tmp_path):
    async def main():
        ids = prompt_of("llama")
        await llm.wait_for_programs()  # a step that waits for its own would count as hung on a slow machine
        ask, params = (llm.encode, PoolingParams()) if pools else (llm.generate, SamplingParams(prompt_logprobs=1))
        if not pools:  # a step that does not need the program ends
            assert [output async for output in llm.generate(ids, SamplingParams(max_tokens=1), "fine")]
        with pytest.raises(EngineRestartError, match="a step took longer than step_timeout = 4 s"):
            async for _ in ask(ids, params, "stuck"):
                pass

    if pools:
        write("llama_embed", tmp_path)
    else:
        write_checkpoint("llama", tmp_path)
        write_tokenizer(tmp_path, CONFIGS["llama"]["vocab_size"])
    config = EngineConfig.from_options(model=str(tmp_path), **SMALL)
    llm = AsyncLLM.from_config(config, factory=FACTORY, step_timeout=4.0, max_restarts=0)
    try:
        asyncio.run(main())
    finally:
        llm.shutdown()

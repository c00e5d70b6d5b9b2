"""A model that slept says what it said before, compiles nothing for it, and held no memory meanwhile."""

import asyncio

import jax
import numpy as np
import pytest

from jaxpaged import LLM, AsyncLLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import CapacityError, CheckpointError
from tests.end_to_end.test_async_llm import SENDABLE
from tests.models import pooling_checkpoints
from tests.models.checkpoints import CONFIGS, write_checkpoint

SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 64,
    "num_scheduler_steps": 1,
}
PROMPTS = [{"prompt_token_ids": [3 + (7 * i + j) % 200 for j in range(5 + 9 * i)]} for i in range(3)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.8, seed=8, top_k=20, max_tokens=12, ignore_eos=True),
]


def write(folder):
    write_checkpoint("qwen3", folder)
    pooling_checkpoints.write_tokenizer(folder, CONFIGS["qwen3"]["vocab_size"])
    return str(folder)


def worker_of(llm):
    return llm.llm_engine._core.executor.worker


def buffers_of(worker):
    device = worker.device
    return jax.tree.leaves((device.params, device.head, vars(device.state)))


def tokens_of(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def sleep_and_wake(llm, level):
    """The deleted buffers are all there were, and their bytes are gone."""
    buffers, before = buffers_of(worker_of(llm)), sum(array.nbytes for array in jax.live_arrays())
    num_bytes = sum(array.nbytes for array in {id(array): array for array in buffers}.values())
    llm.sleep(level)
    assert all(array.is_deleted() for array in buffers)
    assert before - sum(array.nbytes for array in jax.live_arrays()) == num_bytes > 0
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    llm.wake_up()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"deterministic": True}, marks=pytest.mark.exhaustive),
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param({"load_format": "dummy"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_nothing_is_lost_by_sleeping_but_memory(options, tmp_path):
    with LLM(write(tmp_path), **SMALL, **options) as llm:
        llm.wait_for_programs()
        expected = tokens_of(llm)
        llm.sleep(0)
        llm.wake_up()
        assert tokens_of(llm) == expected
        for level in (1, 2):
            sleep_and_wake(llm, level)
            assert tokens_of(llm) == expected
        engine = llm.llm_engine
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS)):
            engine.add_request(str(i), prompt, params)
        outputs = {}
        for step in range(200):
            if step == 4:
                engine.sleep(1, "keep")
                engine.wake_up()
            outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        assert [list(outputs[str(i)]) for i in range(3)] == expected
        assert engine.executor_stats()["recompiles"] == 0


def no_memory():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_what_cannot_be_taken_back_now_can_be_later(tmp_path, monkeypatch):
    model = write(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    with LLM(model, **SMALL) as llm:
        before = [np.array(leaf) for leaf in jax.tree.leaves(worker_of(llm).device.params)]
        llm.sleep(2)
        for path in files:
            path.unlink()
        with pytest.raises(CheckpointError):
            llm.wake_up()
        assert llm.is_sleeping()
        for path, content in files.items():
            path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(worker_of(llm), "new_state", no_memory)
            with pytest.raises(CapacityError, match="there is no memory for the kv_cache: RESOURCE_EXHAUSTED"):
                llm.wake_up()
        assert llm.is_sleeping(), "the weights are back, but not the KV cache"
        llm.wake_up()
        after = jax.tree.leaves(worker_of(llm).device.params)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_a_pooling_model_gives_the_same_vectors_after_it_slept(tmp_path):
    model = str(pooling_checkpoints.write("llama_embed", tmp_path))
    prompts = pooling_checkpoints.prompts("llama_embed")
    options = {name: value for name, value in SMALL.items() if name != "num_scheduler_steps"}
    with LLM(model, pooler_config={"pooling_type": "MEAN"}, **options) as llm:
        llm.wait_for_programs()
        vectors = [output.outputs.data for output in llm.encode(prompts, use_tqdm=False)]
        for level in (1, 2):
            sleep_and_wake(llm, level)
            again = [output.outputs.data for output in llm.encode(prompts, use_tqdm=False)]
            np.testing.assert_array_equal(again, vectors)
        assert llm.llm_engine.executor_stats()["recompiles"] == 0


@pytest.mark.slow
def test_the_embedded_model_sleeps_in_a_process_of_its_own(tmp_path):
    async def ask(llm, name):
        params = SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
        outputs = [output async for output in llm.generate("Once upon a time", params, name)]
        return outputs[-1].outputs[0].token_ids

    async def main(llm):
        expected = await ask(llm, "before")
        await llm.start_profile()
        for level in (0, 1, 2):
            kept = asyncio.ensure_future(ask(llm, "kept"))
            await asyncio.sleep(0.05)
            await llm.sleep(level, "keep")
            queued = asyncio.ensure_future(ask(llm, "queued"))
            await asyncio.sleep(0.05)
            assert not kept.done() and not queued.done()
            await llm.wake_up()
            assert await kept == await queued == expected
        await llm.stop_profile()
        assert (await llm.executor_stats())["recompiles"] == 0

    llm = AsyncLLM.from_config(EngineConfig.from_options(model="demo", profile_dir=str(tmp_path), **SENDABLE))
    try:
        asyncio.run(main(llm))
    finally:
        llm.shutdown()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1

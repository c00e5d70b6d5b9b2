"""KV groups with blocks of two sizes, in pools of their own, over slots that hold NaN: the answer is transformers'."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 19,
    "dtype": "float32",
    "num_scheduler_steps": 1,
}


def small_windows(attention_specs):
    """Layers with a window cache in blocks of half the size."""

    def specs(*arguments):
        halved = lambda spec: spec if spec.window is None else replace(spec, block_size=spec.block_size // 2)
        return [halved(spec) for spec in attention_specs(*arguments)]

    return specs


@pytest.mark.slow
def test_blocks_of_two_sizes_give_the_answer_and_find_beginnings(tmp_path):
    model, golden, prompt = write_checkpoint("gemma3", tmp_path), golden_of("gemma3")["greedy"], prompt_of("gemma3")
    folder, functions, decoder, config = resolve_model(EngineConfig.from_options(model=str(model), **OPTIONS))
    functions = replace(functions, attention_specs=small_windows(functions.attention_specs))
    executor = UniProcExecutor(config, functions, decoder, folder)
    device = executor.worker.device
    device.state.kv = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), device.state.kv)
    assert len({array.shape[0] for array in jax.tree.leaves(device.state.kv)}) == 2, "two numbers of blocks"
    core, tokens, hits = EngineCore(config, executor), {}, {}
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=len(golden), ignore_eos=True)
    for names in (["first", "beside it"], ["again", "the next turn"]):
        for name in names:
            known = golden[:3] if name == "the next turn" else []
            core.add_request(EngineCoreRequest(name, [*prompt, *known], params, arrival_time=0.0))
        while core.has_work():
            for output in core.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                hits[output.request_id] = output.num_cached_tokens
            core._scheduler.check_integrity()
    core.shutdown()
    assert tokens["first"] == tokens["beside it"] == tokens["again"] == golden
    assert tokens["the next turn"][:9] == golden[3:]
    assert hits["again"] == 32 and hits["the next turn"] == 40, "of 40 tokens, but the last, and of 43"

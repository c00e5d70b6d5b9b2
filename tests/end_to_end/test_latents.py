"""A model that caches latents through a whole engine: transformers' tokens, whatever happens to its requests."""

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.executor.uniproc import UniProcExecutor
from tests.models.checkpoints import prompt_of, write_checkpoint
from tests.models.paged import golden_of

NAME = "deepseek_v3"
# Prompts of 40 tokens come in chunks, answers in runs of steps; so few blocks that requests are preempted.
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "num_gpu_blocks_override": 14,
    "num_scheduler_steps": 4,
    "compilation_cache_dir": "off",
}


def answers(llm, count):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt_of(NAME)}] * count, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
def test_tokens_are_those_of_transformers_after_preemption_and_sleep_and_from_a_bundle(tmp_path):
    folder, golden = str(write_checkpoint(NAME, tmp_path / "model")), golden_of(NAME)["greedy"]
    executor = UniProcExecutor(*executor_arguments(folder))
    executor.worker.programs.wait_all(on_demand=True)
    (tmp_path / "bundle").mkdir()
    executor.worker.save_bundle(tmp_path / "bundle")
    executor.shutdown()
    llm = LLM(model=folder, bundle=str(tmp_path / "bundle"), **OPTIONS)
    assert answers(llm, 1) == [golden]
    assert answers(llm, 4) == [golden] * 4
    assert llm.stats().number("num_preemptions") > 0
    llm.sleep(level=1)
    llm.wake_up()
    assert answers(llm, 2) == [golden] * 2


def executor_arguments(folder):
    folder, functions, decoder, config = resolve_model(EngineConfig.from_options(model=folder, **OPTIONS))
    return config, functions, decoder, folder

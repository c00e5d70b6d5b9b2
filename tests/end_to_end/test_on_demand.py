"""An engine's start compiles what ordinary requests need; the rest is compiled for the first request that needs it."""

import random
import threading

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest, ProgramKey
from jaxpaged.sampling_params import SamplingParams
from tests.models.checkpoints import write_checkpoint

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "token_buckets": (8, 16, 32),
    "max_model_len": 96,
    "block_size": 8,
    "dtype": "float32",
    "max_logprobs": 3,
}
ORDINARY = {"zeros", "forward", "sample", "tables"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    model = str(write_checkpoint("llama", tmp_path_factory.mktemp("model")))
    folder, functions, decoder, config = resolve_model(EngineConfig.from_options(model=model, **OPTIONS))
    executor = UniProcExecutor(config, functions, decoder, folder)
    yield config, executor
    executor.shutdown()


@pytest.fixture
def core(parts):
    config, executor = parts
    executor.recover()
    return EngineCore(config, executor)


def ask(core, name, prompt, max_tokens=2, **params):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1, **params)
    core.add_request(EngineCoreRequest(name, prompt, params, arrival_time=0.0))


def finish(core, stop_after=None):
    """Outputs by request, in the order in which requests ended."""
    outputs, ended = {}, []
    while core.has_work() and stop_after not in ended:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason:
                assert output.error is None
                ended.append(output.request_id)
    return {name: outputs[name] for name in ended}


def test_a_start_compiles_ordinary_programs_and_who_needs_others_waits_for_them_alone(parts, core):
    _, executor = parts
    programs = executor.worker.programs
    executor.worker.wait_for_programs()
    assert {key.kind for key in programs.wait_all()} == ORDINARY
    key, compiling = ProgramKey("prompt_logprobs"), threading.Event()
    lower = programs.builders[key]
    programs.builders[key] = lambda: compiling.wait(60) and lower()
    ask(core, "shown", list(range(3, 20)), logprobs=2, prompt_logprobs=1, presence_penalty=0.5)
    ask(core, "plain", [3, 4, 5], max_tokens=4)
    outputs = finish(core, stop_after="plain")
    compiling.set()
    outputs |= finish(core)
    assert list(outputs) == ["plain", "shown"], "nobody waits behind a program that he does not need"
    assert all(line for output in outputs["shown"] for line in output.new_logprobs)
    assert sum(key.kind == "prompt_logprobs" for key in programs.builders) == 1
    stats = executor.worker.stats()
    assert stats["recompiles"] == 0 and stats["programs"] > 3 + 2 + 2


def prompt_lines(outputs):
    [lines] = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    return lines


def test_log_probabilities_of_a_prompt_do_not_depend_on_the_buckets_of_its_steps(core):
    """Also those of neighbours and of steps in flight, which write where these were read."""
    draw = random.Random(2)
    prompts = {str(n): [draw.randrange(3, 200) for _ in range(n)] for n in (2, 7, 9, 16, 17, 31, 40, 70)}
    alone = {}
    for name, prompt in prompts.items():
        ask(core, name, prompt, prompt_logprobs=2)
        alone[name] = prompt_lines(finish(core)[name])
    for name, prompt in prompts.items():
        ask(core, name, prompt, prompt_logprobs=2)
    together = {name: prompt_lines(outputs) for name, outputs in finish(core).items()}
    for name, prompt in prompts.items():
        assert len(together[name]) == len(alone[name]) == len(prompt) - 1
        for one, other in zip(alone[name], together[name], strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

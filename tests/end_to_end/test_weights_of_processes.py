"""Weights that change where two processes compute as one model: what goes wrong in one of them changes neither."""

import asyncio
import json
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, AsyncLLM, WeightOffer
from jaxpaged.config import EngineConfig
from jaxpaged.errors import CapacityError, CheckpointError
from tests.end_to_end.test_weight_updates import GREEDY, NORM, PROMPT, SIZES, answer_of, random_tensors, said
from tests.models.checkpoints import CONFIGS, make_tensors

FILE = "model.safetensors"


class Faults:
    """A worker extension: what goes wrong in the process of one rank."""

    def go_to(self, folders):
        """Each process to a folder of its own."""
        os.chdir(folders[jax.process_index()])

    def wait_for(self, rank, path):
        """Receive no weights before there is a file; that it waits, another one says."""
        if jax.process_index() != rank:
            return
        receive = self.receive_weights

        def waiting(weights, mapping):
            Path(f"{path}?").touch()
            while not Path(path).exists():
                time.sleep(0.01)
            del self.receive_weights
            return receive(weights, mapping)

        self.receive_weights = waiting

    def run_out_of_memory(self, rank, count):
        """Once so many arrays have been made."""
        if jax.process_index() != rank:
            return
        make, made = jax.make_array_from_callback, []

        def failing(*given, **more):
            made.append(1)
            if len(made) <= count:
                return make(*given, **more)
            jax.make_array_from_callback = make
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        jax.make_array_from_callback = failing


async def update(llm, sent, version):
    await llm.start_weight_update()
    await llm.update_weights([str(each) for each in sent])
    await llm.finish_weight_update(version)


class Talk:
    """With an engine: what it says is compared with what engines of one process say."""

    def __init__(self, llm, answers):
        self._llm, self._answers, self._count = llm, answers, 0

    async def check(self, number, version):
        """It says what an engine of the checkpoint of this number does."""
        self._count += 1
        *_, output = [each async for each in self._llm.generate(PROMPT, GREEDY, f"{self._count}")]
        (ids, logprobs), (own_ids, own_logprobs) = self._answers[number], answer_of(output)
        assert own_ids == ids and own_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert await self._llm.get_weight_version() == version


async def live(llm, answers, folders, tmp_path):
    talk, second = Talk(llm, answers), load_file(folders[1] / FILE)
    await talk.check(0, "")
    await llm.collective_rpc("wait_for", args=(1, str(tmp_path / "go on")))
    updating = asyncio.create_task(update(llm, [folders[1] / FILE], "by file"))
    while not (tmp_path / "go on?").exists():
        await asyncio.sleep(0.01)
    await talk.check(0, "")
    (tmp_path / "go on").touch()
    await updating
    await talk.check(1, "by file")
    with WeightOffer(load_file(folders[0] / FILE)) as offer:
        await update(llm, [offer.address], "by offer")
    await talk.check(0, "by offer")

    # Each process reads a file of its own: rank 0 or 1 finds a bad one.
    wrong = {**second, NORM: np.where(np.arange(second[NORM].size) == 3, np.nan, second[NORM])}
    other = {**second, NORM: second[NORM] * 1.001}
    for rank in (0, 1):
        for name, tensors, words in (
            ("wrong", wrong, rf"{NORM} is nan at \(3,\)"),
            ("none", None, "does not exist"),
            ("other", other, rf"rank 1 \(.*\) has read other weights than rank 0: 1 tensors differ, .* {NORM}"),
        ):
            own = tmp_path / f"{name} {rank}"
            own.mkdir()
            if tensors is not None:
                save_file(tensors, own / FILE)
            await llm.collective_rpc("go_to", args=([str(own if i == rank else folders[1]) for i in (0, 1)],))
            await llm.start_weight_update()
            with pytest.raises(CheckpointError, match=words) as raised:
                await llm.update_weights([FILE])
            assert name == "other" or not rank or str(raised.value).startswith("rank 1 (")
            await talk.check(0, "by offer")
            await llm.update_weights([str(folders[1] / FILE)])  # nothing was kept of it anywhere
            await llm.abandon_weight_update()

    # Memory is too little for the largest parameter: nothing is replaced.
    for rank in (0, 1):
        await llm.collective_rpc("run_out_of_memory", args=(rank, 0))
        with pytest.raises(CapacityError, match="no memory for the new weights: .* keeps those that it has"):
            await update(llm, [folders[1] / FILE], "too large")
        assert not (await llm.get_weight_info()).is_updating
        await talk.check(0, "by offer")
        await update(llm, [folders[1] / FILE], f"again {rank}")
        await talk.check(1, f"again {rank}")
        await update(llm, [folders[0] / FILE], "by offer")

    # What breaks when some are replaced leaves none anywhere, until the engine is woken.
    await update(llm, [folders[1] / FILE], "second")
    await llm.collective_rpc("run_out_of_memory", args=(1, 3))
    with pytest.raises(CapacityError, match="rank 1 .* call wake_up"):
        await update(llm, [folders[1] / FILE], "third")
    assert await llm.is_sleeping()
    await llm.wake_up()
    await talk.check(0, "")
    await update(llm, [folders[1] / FILE], "fourth")
    await talk.check(1, "fourth")
    assert (await llm.executor_stats())["recompiles"] == 0


@pytest.mark.exhaustive
def test_both_have_the_new_weights_or_both_the_old_ones(tmp_path):
    shapes = {name: tensor.shape for name, tensor in make_tensors("llama").items()}
    folders, answers = [tmp_path / f"weights {seed}" for seed in range(2)], []
    for seed, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
        save_file(random_tensors(shapes, seed), folder / FILE)
        with LLM(str(folder), **SIZES) as alone:
            answers.append(said(alone))
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **SIZES}
    extension = f"{Faults.__module__}:{Faults.__name__}"
    config = EngineConfig.from_options(model=str(folders[0]), worker_extension_cls=extension, **options)
    llm = AsyncLLM.from_config(config)
    try:
        asyncio.run(live(llm, answers, folders, tmp_path))
    finally:
        llm.shutdown()

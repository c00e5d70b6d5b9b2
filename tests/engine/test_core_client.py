"""Several engine cores behind one front end: who gets which request, what they say together, and what one loses."""

import asyncio
import contextlib
import os
import signal
import subprocess

import msgspec
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine import core_client
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_calls import CALLS
from jaxpaged.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ConflictError,
    EngineError,
    EngineRestartError,
    RequestError,
    UsageError,
)
from tests.engine import fake_core
from tests.engine.fake_core import answer, core_in_thread, llm_in_thread
from tests.engine.test_async_llm import PROMPT, outputs_of, params, tokens_of, until


@pytest.fixture(scope="module")
def llm():
    """Two cores in threads, for tests that break nothing."""
    with llm_in_thread(data_parallel_size=2, max_num_seqs=64, max_model_len=4096) as llm:
        asyncio.run(both_ready(llm))
        yield llm


async def both_ready(llm):
    llm._cores.open()
    await until(lambda: all(core.link.is_ready for core in llm._cores.all))


def told(llm, name, label=None):
    """Values of a metric by the number of the core."""
    return {
        metric.labels["engine"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == name and (label is None or label in metric.labels.values())
    }


def finished(llm):
    return [told(llm, "vllm:request_success", "length")[number] for number in "01"]


# ---- requests


def test_requests_are_spread_and_every_core_counts_its_own(llm):
    async def main():
        await both_ready(llm)
        return await asyncio.gather(*(tokens_of(llm, str(i), [i, 5, 6, 7]) for i in range(10)))

    before = finished(llm)
    assert asyncio.run(main()) == [answer(4, 5)] * 10
    assert [after - early for after, early in zip(finished(llm), before)] == [5, 5]
    assert set(told(llm, "vllm:num_requests_running")) == {"0", "1"}


def test_all_sequences_of_a_prompt_are_computed_by_one_core(llm):
    before = finished(llm)
    outputs = asyncio.run(outputs_of(llm, max_tokens=3, n=40))
    assert outputs[-1].finished
    assert sorted(after - early for after, early in zip(finished(llm), before)) == [0, 40]


def test_a_request_may_name_its_core(llm):
    async def main(rank):
        async for output in llm.generate(PROMPT, params(), f"r{rank}", data_parallel_rank=rank):
            assert output.error is None

    before = finished(llm)
    for _ in range(3):
        asyncio.run(main(1))
    assert [after - early for after, early in zip(finished(llm), before)] == [0, 3]
    for rank in (-1, 2):
        with pytest.raises(RequestError, match=f"data_parallel_rank is {rank}, but this engine has 2 cores: 0 to 1."):
            asyncio.run(main(rank))


def test_a_known_beginning_brings_a_prompt_back_to_its_core(llm):
    async def main():
        await both_ready(llm)
        cached = []
        for turn in range(4):
            prompt = list(range(1000, 1256 + 32 * turn))
            cached.append((await outputs_of(llm, f"turn {turn}", prompt))[-1].num_cached_tokens)
            await outputs_of(llm, f"other {turn}", [turn] * 300)  # whose turn it would be otherwise
        return cached

    cached = asyncio.run(main())
    assert cached[0] == 0 and all(tokens >= 256 for tokens in cached[1:])


def test_an_id_is_in_use_whichever_core_has_it_and_abort_finds_it(llm):
    async def main():
        await both_ready(llm)
        streams = [asyncio.ensure_future(outputs_of(llm, str(i), max_tokens=4000)) for i in range(4)]
        await until(lambda: llm.get_num_unfinished_requests() == 4)
        for i in range(4):
            with pytest.raises(RequestError, match=f"'{i}' is under way"):
                await outputs_of(llm, str(i))
        await llm.abort([str(i) for i in range(4)])
        return [(await stream)[-1].outputs[0].finish_reason for stream in streams]

    assert asyncio.run(main()) == ["abort"] * 4


# ---- calls


def test_all_cores_sleep_wake_and_answer_together(llm):
    async def main():
        await both_ready(llm)
        assert await llm.reset_prefix_cache() is True
        steps = (await llm.executor_stats())["steps"]
        assert steps == sum(core.executor_stats["steps"] for core in llm._cores.all)
        await llm.sleep(1)
        assert await llm.is_sleeping() and llm.sleep_level == 1 and "sleeps at level 1" in llm.obstacle()
        await llm._cores.all[0].call(CALLS["wake_up"]())
        assert await llm.is_sleeping() and llm.sleep_level is None and llm.obstacle() is None, "one of them serves"
        assert await tokens_of(llm) == answer(len(PROMPT), 5)
        await llm.wake_up()
        assert not await llm.is_sleeping()
        with pytest.raises(UsageError, match="level"):
            await llm.sleep(7)
        await llm.start_profile("somewhere")
        with pytest.raises(ConflictError):
            await llm.start_profile()
        await llm.stop_profile()
        await llm.wait_for_programs()

    asyncio.run(main())


def test_steps_blocks_and_snapshots_are_those_of_both(llm):
    async def main():
        await both_ready(llm)
        await llm.reset_prefix_cache()
        streams = [asyncio.ensure_future(outputs_of(llm, f"s{i}", max_tokens=4000)) for i in range(4)]
        await until(lambda: all(core.metrics.stats.num_running_reqs == 2 for core in llm._cores.all))
        seen, blocks = await asyncio.gather(llm.snapshot(5), llm.block_map())  # before any stream ends
        records, num_before = await llm.step_records()
        await llm.abort([f"s{i}" for i in range(4)])
        await asyncio.gather(*streams)
        assert len(seen.running) == len(blocks.request_ids) == 4 and seen.stats.num_running_reqs == 4
        assert seen.num_blocks == 2 * 4095 and len(seen.steps) <= 256
        assert 0 <= seen.executor["steps"] - seen.num_steps_before - len(seen.steps) <= 4, "but for those in flight"
        assert {blocks.owner[i] for i in blocks.num_owners.nonzero()[0]} >= set(range(4))
        times = [record.result_ready for record in records]
        assert times == sorted(times) and num_before == 0

    asyncio.run(main())


async def versions_of(llm):
    return [(await core.call(CALLS["get_weight_info"]())).version for core in llm._cores.all]


def test_weights_change_on_all_cores_or_on_none(llm):
    async def main():
        await both_ready(llm)
        before = await versions_of(llm)
        await llm.start_weight_update()
        await llm.update_weights(["all"])
        await llm._cores.all[1].call(CALLS["abandon_weight_update"]())
        with pytest.raises(ConflictError, match="no update"):
            await llm.finish_weight_update("new")
        assert (
            await versions_of(llm) == before and (await llm._cores.all[0].call(CALLS["get_weight_info"]())).is_updating
        )
        await llm.start_weight_update()
        await llm.update_weights(["all"])
        info = await llm.finish_weight_update()
        assert info.version and await versions_of(llm) == [info.version] * 2, "of one name, though none was given"

    asyncio.run(main())


def test_what_one_core_refuses_can_be_sent_again_and_one_without_weights_wakes(llm, monkeypatch):
    other = llm._cores.all[1]
    call = other.call

    def otherwise(asked, **change):
        """The other core is asked `asked` with a change."""
        swap = lambda given: msgspec.structs.replace(given, **change) if given.name() == asked else given
        monkeypatch.setattr(other, "call", lambda given: call(swap(given)))

    async def main():
        await both_ready(llm)
        before = await versions_of(llm)
        await llm.start_weight_update()
        assert await llm.update_weights(["first"]) == 1
        otherwise("update_weights", weights=["bad"])
        with pytest.raises(CheckpointError, match="bad is truncated"):
            await llm.update_weights(["second"])
        monkeypatch.undo()
        assert await llm.update_weights(["second"]) == 2, "of each"
        otherwise("finish_weight_update", version="too large")
        with pytest.raises(EngineError, match="1 of 2 .* core 1 has not: 2 GiB are free. Begin it once more for all"):
            await llm.finish_weight_update("new")
        monkeypatch.undo()
        assert not await llm.is_sleeping()
        assert await versions_of(llm) == ["new", before[1]]

    asyncio.run(main())


def test_every_call_says_what_several_answer():
    """A call whose answers differ, and that merges none, would tell those of the first core."""
    same_of_all = {"keep_lease", "start_profile", "stop_profile", "wait_for_programs", "add_lora", "restore_loras"}
    same_of_all |= {"start_weight_update", "update_weights", "abandon_weight_update", "check_weight_update"}
    same_of_all |= {"take_weights_back"}
    merging = {name for name, call in CALLS.items() if "merged" in vars(call)}
    assert merging == CALLS.keys() - same_of_all


def test_an_address_has_all_cores():
    with core_in_thread(data_parallel_size=3) as one, pytest.raises(ConfigError, match="has 1 cores, and the engine 3"):
        AsyncLLM.from_address(one)


# ---- faults


@contextlib.contextmanager
def two_processes(**options):
    config = EngineConfig.from_options(data_parallel_size=2)
    llm = AsyncLLM.from_config(config, factory=fake_core.FACTORY, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def alive(pid):
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True).stdout.strip()[:1] not in (
        b"",
        b"Z",
    )


@pytest.mark.slow
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_when_one_core_goes_the_other_serves_on_and_it_comes_back(harm, monkeypatch, caplog):
    monkeypatch.setattr(core_client, "SECONDS_TO_AVOID", 0.5)

    async def main(llm):
        await both_ready(llm)
        pids = [(await core.call(CALLS["executor_stats"]()))["pid"] for core in llm._cores.all]
        slow = [
            llm.generate([rank, 2, 3], params(300, fake="slow"), f"slow {rank}", data_parallel_rank=rank)
            for rank in (0, 1)
        ]
        for each in slow:
            await anext(each)
        os.kill(pids[0], harm)
        await until(lambda: not llm._cores.all[0].load.is_usable)
        assert llm.is_alive
        rest = asyncio.ensure_future(tokens_of(llm, "named", max_tokens=3))
        assert await rest == answer(len(PROMPT), 3)
        tokens = [token async for output in slow[1] for token in output.outputs[0].token_ids]
        assert tokens == answer(3, 300)[-len(tokens) :] and len(tokens) >= 250, "it never noticed"
        with pytest.raises(EngineRestartError, match=r"engine core 0|a step took longer"):
            [output async for output in slow[0]]
        assert llm.is_running and llm.obstacle() is None
        waits = [output async for output in llm.generate(PROMPT, params(), "back", data_parallel_rank=0)]
        assert waits[-1].finished
        assert told(llm, "jaxpaged:engine_restarts") == {"0": 1, "1": 0}
        return [*pids, (await llm._cores.all[0].call(CALLS["executor_stats"]()))["pid"]]

    with two_processes(step_timeout=5.0) as llm:
        pids = asyncio.run(main(llm))
    assert len(set(pids)) == 3 and not any(map(alive, pids)), "nothing is left"
    assert "engine core 0 is restarting" in caplog.text and "engine core 1 is" not in caplog.text


def test_a_core_that_is_gone_for_good_is_told_while_the_other_serves():
    async def main(llm):
        await both_ready(llm)
        with pytest.raises(Exception, match="stopped"):
            await anext(llm.generate(PROMPT, params(fake="die"), "r", data_parallel_rank=1))
        assert not llm.is_alive and llm.errored
        assert await tokens_of(llm) == answer(len(PROMPT), 5)
        await llm.executor_stats()

    with two_processes(max_restarts=0) as llm:
        asyncio.run(main(llm))


@pytest.mark.slow
def test_a_core_that_dies_while_weights_are_switched_is_told_and_needs_them_once_more():
    async def update(llm):
        await llm.start_weight_update()
        await llm.update_weights(["all"])
        return await llm.finish_weight_update("new")

    async def main(llm):
        await both_ready(llm)
        dying = llm._cores.all[1]
        pid, call = (await dying.call(CALLS["executor_stats"]()))["pid"], dying.call

        async def dies(asked):
            if asked.name() == "finish_weight_update":
                os.kill(pid, signal.SIGKILL)
            return await call(asked)

        dying.call = dies
        with pytest.raises(EngineError, match="1 of 2 engine cores have done finish_weight_update, and core 1 has not"):
            await update(llm)
        dying.call = call
        await both_ready(llm)
        assert await versions_of(llm) == ["new", ""] and await llm.get_weight_version() == ""
        assert (await update(llm)).version == "new" and await versions_of(llm) == ["new", "new"]

    with two_processes() as llm:
        asyncio.run(main(llm))


def test_where_one_core_cannot_load_nothing_is_left():
    config = EngineConfig.from_options(data_parallel_size=2)
    with pytest.raises(CapacityError, match="2 GiB are free"):
        AsyncLLM.from_config(config, factory="tests.engine.fake_core:build_nothing")
    left = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert "core_process" not in left

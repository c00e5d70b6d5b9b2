"""Streams of an engine whose core is in a process of its own, and what becomes of them when that dies or hangs."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import jaxpaged
from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import SETS_IN_CORE
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.engine.observability import throughput_log
from jaxpaged.engine.observability.metrics_types import Counter
from jaxpaged.engine.process import core_launcher, core_link, core_supervisor, heartbeat
from jaxpaged.engine.process.wire import CoreStats
from jaxpaged.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    EngineDeadError,
    EngineError,
    EngineRestartError,
    RequestError,
    UsageError,
)
from jaxpaged.messages import SchedulerStats
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine import fake_core
from tests.engine.fake_core import DEMO, answer, llm_in_thread

MANY = 20_000  # of tokens: a caller on a loaded machine comes before the last
PROMPT = [7, 8, 9, 10]
TOKENIZER = load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def llm():
    """One over a core in a thread, for tests that break nothing."""
    with llm_in_thread(max_num_seqs=64, max_model_len=32768) as llm:
        yield llm


def core_of(llm):
    """The side of its only core."""
    (core,) = llm._cores.all
    return core


@contextlib.contextmanager
def llm_with_process(**options):
    llm = AsyncLLM.from_config(EngineConfig(), factory=fake_core.FACTORY, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def params(max_tokens=5, kind=RequestOutputKind.DELTA, fake=None, **options):
    extra = {"fake": fake} if fake else None
    return SamplingParams(
        max_tokens=max_tokens,
        output_kind=kind,
        extra_args=extra,
        **{"ignore_eos": True, **options},
    )


async def outputs_of(llm, request_id="r", prompt=PROMPT, group=None, **options):
    return [output async for output in llm.generate(prompt, params(**options), request_id, group=group)]


async def tokens_of(llm, request_id="r", prompt=PROMPT, **options):
    """All tokens of a request that is streamed."""
    outputs = await outputs_of(llm, request_id, prompt, **options)
    assert outputs[-1].finished
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def held_back(module, name, monkeypatch):
    """Calls of a function of `module` from now on wait for the event that this gives."""
    function, event = getattr(module, name), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *arguments: event.wait() and function(*arguments))
        try:
            yield event
        finally:
            event.set()


def metric(llm, name, *labels):
    return next(m.value for m in llm.get_metrics() if m.name == name and tuple(m.labels.values()) == labels)


# ---- requests


def test_it_is_public():
    assert jaxpaged.AsyncLLM is AsyncLLM


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_text_and_tokens_come_as_they_were_asked_for(llm, kind):
    outputs = asyncio.run(outputs_of(llm, kind=kind, max_tokens=40))
    expected = answer(len(PROMPT), 40)
    text = TOKENIZER.decode(expected)
    if kind is RequestOutputKind.DELTA:
        assert [i for o in outputs for i in o.outputs[0].token_ids] == expected
        assert "".join(o.outputs[0].text for o in outputs) == text
    else:
        assert outputs[-1].outputs[0].token_ids == expected
        assert outputs[-1].outputs[0].text == text
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].request_id == "r"


def test_hundreds_of_streams_at_a_time_do_not_mix(llm):
    async def main():
        return await asyncio.gather(
            *(tokens_of(llm, str(i), [7] * (1 + i % 40), max_tokens=3 + i % 30) for i in range(500))
        )

    for i, tokens in enumerate(asyncio.run(main())):
        assert tokens == answer(1 + i % 40, 3 + i % 30)
    assert llm.get_num_unfinished_requests() == 0


def test_several_sequences_of_a_prompt_are_one_result(llm):
    outputs = asyncio.run(outputs_of(llm, n=3, kind=RequestOutputKind.FINAL_ONLY))
    assert [c.token_ids for c in outputs[0].outputs] == [answer(len(PROMPT), 5)] * 3


def test_a_stop_string_ends_the_request_in_the_core_too(llm):
    async def main():
        whole = TOKENIZER.decode(answer(len(PROMPT), 12))
        outputs = await outputs_of(llm, max_tokens=4000, stop=[whole[-4:]])
        await until(lambda: metric(llm, "vllm:num_requests_running") == 0)
        return whole, "".join(o.outputs[0].text for o in outputs), outputs[-1].outputs[0].stop_reason

    whole, text, stop = asyncio.run(main())
    assert (text, stop) == (whole[: whole.index(stop)], stop)


def test_a_slow_consumer_gets_everything_in_few_results(llm):
    async def main():
        stream, seen = llm.generate(PROMPT, params(300), "slow"), []
        async for output in stream:
            seen.append(output)
            await tokens_of(llm, f"other {len(seen)}", max_tokens=100)
        return seen

    seen = asyncio.run(main())
    assert [i for o in seen for i in o.outputs[0].token_ids] == answer(len(PROMPT), 300)
    assert len(seen) < 50


def test_cancelling_or_leaving_a_stream_aborts_the_request(llm):
    async def main():
        task = asyncio.ensure_future(outputs_of(llm, "cancelled", max_tokens=4000))
        stream = llm.generate(PROMPT, params(4000), "left")
        await anext(stream)
        task.cancel()
        await stream.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.get_num_unfinished_requests() == 0
        await until(lambda: metric(llm, "vllm:num_requests_running") == 0)

    asyncio.run(main())
    assert metric(llm, "vllm:kv_cache_usage_perc") == 0.0


def test_an_abort_ends_a_stream_with_what_it_had(llm):
    async def main():
        stream = llm.generate(PROMPT, params(4000), "r")
        seen = [await anext(stream)]
        await llm.abort(["r", "unknown"])
        seen += [output async for output in stream]
        await llm.abort("r")
        return seen

    seen = asyncio.run(main())
    assert seen[-1].outputs[0].finish_reason == "abort"
    tokens = [i for o in seen for i in o.outputs[0].token_ids]
    assert tokens == answer(len(PROMPT), len(tokens))


def test_a_name_can_be_used_again_at_once(llm):
    async def main():
        for length in range(1, 30):
            stream = llm.generate([7] * length, params(4000), "same")
            first = await anext(stream)
            assert first.outputs[0].token_ids[0] == answer(length, 1)[0]
            await stream.aclose()

    asyncio.run(main())


def test_bad_requests_fail_alone_before_and_in_the_core(llm):
    async def main():
        good = asyncio.ensure_future(tokens_of(llm, "good", max_tokens=200))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="has no token ids"):
            await outputs_of(llm, "empty", [])
        with pytest.raises(RequestError, match="a request with id 'good' is under way"):
            await outputs_of(llm, "good")
        assert await good == answer(len(PROMPT), 200)
        assert llm.get_num_unfinished_requests() == 0

    asyncio.run(main())


def test_what_the_core_refuses_is_a_request_error_with_the_users_name():
    async def main(llm):
        with pytest.raises(RequestError, match=r"request 'long' may need \d+ KV blocks") as caught:
            await outputs_of(llm, "long", [7] * 2500, max_tokens=1500, n=2)
        assert caught.value.parameter == "max_tokens"
        assert sum(m.value for m in llm.get_metrics() if m.name == "vllm:request_success") == 0, "it was refused"
        assert llm.get_num_unfinished_requests() == 0

    with llm_in_thread(num_gpu_blocks_override=200) as llm:
        asyncio.run(main(llm))


def test_results_that_cannot_be_processed_fail_who_waits_for_them(llm, monkeypatch):
    async def main():
        waiting = asyncio.ensure_future(outputs_of(llm, max_tokens=4000))
        await until(lambda: llm.get_num_unfinished_requests() == 1)
        with monkeypatch.context() as patch:
            patch.setattr(core_of(llm).output_processor, "process", lambda outputs: 1 / 0)
            with pytest.raises(EngineError, match="could not be processed: ZeroDivisionError"):
                await waiting
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    asyncio.run(main())


def test_a_long_prompt_does_not_stop_the_others(llm):
    async def main():
        text = "the cat sat on the mat " * 300
        outputs = await outputs_of(llm, "long", text, max_tokens=2)
        assert outputs[-1].prompt == text
        prompt = await llm.chat_prompt([{"role": "user", "content": "hello"}])
        assert prompt == llm.input_processor.chat_prompt([{"role": "user", "content": "hello"}])

    asyncio.run(main())


def test_questions_are_answered(llm):
    async def main():
        assert await llm.reset_prefix_cache() is True
        assert (await llm.executor_stats())["pid"] == os.getpid()
        assert (await llm.block_map()).block_size == 16
        assert (await llm.step_records())[0][-1].num_requests >= 1
        seen = await llm.snapshot(since_step=1)
        assert seen.executor["pid"] == os.getpid() and seen.num_steps_before >= 1 and not seen.running
        await llm.wait_for_programs()
        await llm.check_health()

    asyncio.run(outputs_of(llm))
    asyncio.run(main())
    assert llm.is_running
    assert not llm.errored


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_ends_awaits_or_keeps_what_is_under_way_and_what_comes_meanwhile_waits(llm, mode):
    async def main():
        under_way = asyncio.ensure_future(tokens_of(llm, "early", max_tokens=MANY))
        await until(lambda: metric(llm, "vllm:generation_tokens") > before)
        await llm.sleep(1, mode)
        assert await llm.is_sleeping() and llm.sleep_level == 1 and llm.is_running
        assert metric(llm, "vllm:engine_sleep_state", "weights_offloaded") == 1
        late = asyncio.ensure_future(tokens_of(llm, "late"))
        await asyncio.sleep(0.05)
        assert under_way.done() == (mode != "keep") and not late.done()
        await llm.check_health()
        await llm.wake_up()
        assert llm.sleep_level is None and not await llm.is_sleeping()
        assert await late == answer(len(PROMPT), 5)
        return await under_way

    before = metric(llm, "vllm:generation_tokens")
    aborted = metric(llm, "vllm:request_success", "abort")
    tokens, expected = asyncio.run(main()), answer(len(PROMPT), MANY)
    assert tokens == expected[: len(tokens)]
    assert (len(tokens) < MANY) == (mode == "abort")
    assert metric(llm, "vllm:request_success", "abort") - aborted == (mode == "abort")


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_ends_awaits_or_keeps_what_is_under_way_and_frees_nothing(llm, mode):
    async def main():
        under_way = asyncio.ensure_future(tokens_of(llm, "early", max_tokens=MANY))
        await until(lambda: metric(llm, "vllm:generation_tokens") > before)
        await llm.pause_generation(mode)
        assert await llm.is_sleeping() and llm.sleep_level == 0
        states = ("weights_offloaded", "discard_all")
        assert not any(metric(llm, "vllm:engine_sleep_state", state) for state in states), "its memory is there"
        late = asyncio.ensure_future(tokens_of(llm, "late"))
        await until(lambda: metric(llm, "vllm:num_requests_waiting") == 1 + (mode == "keep"))
        computed = metric(llm, "vllm:generation_tokens")
        assert await llm.is_sleeping() and not late.done() and under_way.done() == (mode != "keep")
        assert metric(llm, "vllm:generation_tokens") == computed
        await llm.resume_generation()
        assert not await llm.is_sleeping()
        assert await late == answer(len(PROMPT), 5)
        return await under_way

    before = metric(llm, "vllm:generation_tokens")
    tokens, expected = asyncio.run(main()), answer(len(PROMPT), MANY)
    assert tokens == expected[: len(tokens)]
    assert (len(tokens) < MANY) == (mode == "abort")


def test_resuming_wakes_nothing_whose_memory_sleeps_and_nothing_that_is_awake(llm):
    async def main():
        await llm.resume_generation()
        assert await tokens_of(llm) == answer(len(PROMPT), 5)
        await llm.sleep(1)
        await llm.resume_generation()
        assert llm.sleep_level == 1
        await llm.pause_generation()
        assert llm.sleep_level == 1, "it sleeps deeper"
        await llm.wake_up()
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    asyncio.run(main())


def test_what_cannot_be_is_said_by_name(llm):
    async def main():
        for wrong, name in ((llm.sleep(3), "level"), (llm.sleep(1, "never"), "mode"), (llm.wake_up(["beds"]), "tags")):
            with pytest.raises(UsageError, match=f"^{name} is .*must be"):
                await wrong
        await llm.start_profile("somewhere")
        with pytest.raises(ConflictError, match="is being recorded"):
            await llm.start_profile()
        await llm.stop_profile()
        assert not await llm.is_sleeping()

    asyncio.run(main())


def test_a_line_of_throughput_is_logged_while_it_is_busy_and_no_longer(llm, caplog, monkeypatch):
    monkeypatch.setattr(throughput_log, "INTERVAL", 0.05)
    caplog.set_level("INFO", "jaxpaged")
    lines = lambda: [record for record in caplog.records if record.name.endswith("throughput_log")]

    async def main():
        before = len(lines())
        await asyncio.gather(*(tokens_of(llm, str(i), max_tokens=500) for i in range(4)))
        await until(lambda: len(lines()) > before)
        await until(lambda: core_of(llm).throughput._loop is None)
        num_lines = len(lines())
        await asyncio.sleep(0.2)
        assert len(lines()) == num_lines, "nothing happens"

    for _ in range(2):  # two event loops
        asyncio.run(main())
    assert sum(line.generation_tokens_per_second for line in lines()) > 0
    assert "generation throughput: " in lines()[0].getMessage() and "KV cache usage: " in lines()[0].getMessage()


def test_debug_messages_follow_a_request(llm, caplog):
    caplog.set_level("DEBUG", "jaxpaged")
    asyncio.run(outputs_of(llm, "traced", n=2))
    assert [r.getMessage() for r in caplog.records if getattr(r, "request_id", None) == "traced"] == [
        "request traced: 4 prompt tokens, 2 sequences of at most 5 tokens",
        "request traced is over",
    ]


def test_one_event_loop_at_a_time(llm):
    async def elsewhere():
        with pytest.raises(UsageError, match="another event loop"):
            await llm.check_health()

    async def main():
        await outputs_of(llm)
        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))

    asyncio.run(main())
    assert asyncio.run(tokens_of(llm)) == answer(len(PROMPT), 5)


# ---- the core's process


def test_a_step_that_fails_fails_its_requests_and_nothing_else(llm):
    async def main():
        bad = await outputs_of(llm, fake="raise")
        assert (bad[-1].outputs[0].finish_reason, bad[-1].error) == ("error", "the step failed: the device is on fire")
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("die", r"signal 9 \(SIGKILL"),
        ("hang", "longer than step_timeout = 2 s"),
        ("break", "broke down: .*the device is gone"),
    ],
)
def test_when_the_core_dies_or_hangs_every_request_hears_of_it_and_another_core_comes(
    fake, reason, caplog, monkeypatch
):
    async def main(llm):
        first = (await llm.executor_stats())["pid"]
        slow = llm.generate(PROMPT, params(3000, fake="slow"), "slow")
        await anext(slow)
        waiting = [asyncio.ensure_future(outputs_of(llm, str(i), max_tokens=3000)) for i in range(50)]
        waiting.append(asyncio.ensure_future(anext(slow)))
        await until(lambda: llm.get_num_unfinished_requests() == 51)
        waiting.append(asyncio.ensure_future(outputs_of(llm, "bad", fake=fake)))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        lost = [result for result in results if isinstance(result, EngineRestartError)]
        assert len(lost) >= len(results) - 1, "slow may have had a result first"
        assert re.search(reason, str(lost[0]))
        assert str(lost[0]).endswith(". The engine restarts; send the request again.")
        return first

    async def afterwards(llm, first):
        second = await llm.executor_stats()
        assert second["pid"] != first
        assert not second["jax"], "a fake core imports no jax"
        await llm.check_health()
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    async def both():
        with (
            llm_with_process(step_timeout=2.0 if fake == "hang" else 60.0) as llm,
            held_back(core_supervisor, "CoreChild", monkeypatch) as come,
        ):
            first = await main(llm)
            assert llm.errored
            ends = {reason: metric(llm, "vllm:request_success", reason) for reason in ("abort", "error")}
            assert ends == {"abort": 0, "error": 52}
            await until(lambda: metric(llm, "jaxpaged:engine_restarts") == 1)  # counted once the process has ended
            with pytest.raises(EngineDeadError, match=reason):
                await llm.check_health()
            come.set()
            await afterwards(llm, first)

    asyncio.run(both())
    if fake == "hang":
        assert "in _obey" in caplog.text, "the log shows where it hangs"


@pytest.mark.parametrize("busy", [False, True])
def test_a_core_that_is_stopped_is_replaced_whether_it_was_busy_or_idle(busy, monkeypatch):
    """With SIGSTOP nothing in it can say that it does not go on."""
    monkeypatch.setattr(heartbeat, "LEAST_PATIENCE", 1.5)
    monkeypatch.setattr(core_link, "LONG_SILENCE", 0.2)

    async def main(llm):
        assert await tokens_of(llm) == answer(len(PROMPT), 5)
        assert llm.obstacle() is None and llm.is_alive
        pid = (await llm.executor_stats())["pid"]
        waiting = asyncio.ensure_future(outputs_of(llm, "slow", max_tokens=3000, fake="slow")) if busy else None
        await until(lambda: not busy or metric(llm, "vllm:num_requests_running") == 1)
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.ensure_future(outputs_of(llm, "late"))
        await until(lambda: "no sign of life" in (llm.obstacle() or ""))
        await until(lambda: "counts as hung" in (llm.obstacle() or ""))
        assert llm.is_alive, "it heals"
        for lost in filter(None, (waiting, late)):
            with pytest.raises(EngineRestartError, match="counts as hung"):
                await lost
        await until(lambda: llm.obstacle() is None)
        assert (await llm.executor_stats())["pid"] != pid
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    with llm_with_process(step_timeout=1.0) as llm:
        asyncio.run(main(llm))


def test_no_counter_falls_when_a_core_is_replaced():
    """Before, `vllm:prefix_cache_queries_total` began at 0 again, which rates take for a restart of the server."""

    def counts(llm):
        return {(m.name, *m.labels.values()): m.value for m in llm.get_metrics() if isinstance(m, Counter)}

    async def main(llm):
        for number in range(3):
            await tokens_of(llm, str(number))
        before = counts(llm)
        assert before["vllm:prefix_cache_queries",] >= 2 * len(PROMPT)
        os.kill((await llm.executor_stats())["pid"], signal.SIGKILL)
        await until(lambda: llm.obstacle() is not None)
        while llm.obstacle() is not None:
            assert all(now >= before.get(key, 0) for key, now in counts(llm).items())
            await asyncio.sleep(0.01)
        for number in range(3):
            await tokens_of(llm, str(number))
        after = counts(llm)
        assert all(after[key] >= value for key, value in before.items())
        assert after["vllm:prefix_cache_queries",] >= 2 * before["vllm:prefix_cache_queries",] - len(PROMPT)

    with llm_with_process() as llm:
        asyncio.run(main(llm))


def test_traces_that_cannot_be_sent_are_refused_before_a_process_is_started(monkeypatch):
    """Before, the core was started first, to say it after seconds."""
    monkeypatch.setattr(core_launcher, "CoreSupervisor", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk.")]:
        monkeypatch.delitem(sys.modules, name)
    for endpoint, match in (("http://localhost:4317", "not installed"), ("ftp://a", "no address")):
        config = EngineConfig.from_options(otlp_traces_endpoint=endpoint)
        with pytest.raises(ConfigError, match=match):
            AsyncLLM.from_config(config)


def test_an_engine_is_ready_when_the_programs_of_ordinary_requests_are_compiled():
    async def main(llm):
        assert llm.obstacle() == "The engine is starting." and llm.obstacle(False) == "The engine is starting."
        await until(lambda: llm.obstacle(False) is None)
        for ready in (0, 3):
            core_of(llm)._on_stats(
                CoreStats(SchedulerStats(), {"ordinary_programs": 4, "ordinary_programs_ready": ready})
            )
            assert llm.obstacle() == f"{ready} of the 4 programs that ordinary requests need are compiled."
            assert llm.obstacle(when_compiled=False) is None
        core_of(llm)._on_stats(CoreStats(SchedulerStats(), {"ordinary_programs": 4, "ordinary_programs_ready": 4}))
        assert llm.obstacle() is None
        core_of(llm)._on_stats(CoreStats(SchedulerStats(sleep_level=1), {}))
        assert "sleeps at level 1" in llm.obstacle()

    with llm_in_thread() as llm:
        asyncio.run(main(llm))


def test_a_core_that_sleeps_with_requests_under_way_does_not_count_as_hung():
    async def main(llm):
        pid = (await llm.executor_stats())["pid"]
        early = asyncio.ensure_future(tokens_of(llm, "early", max_tokens=3000))
        await until(lambda: metric(llm, "vllm:generation_tokens") > 0)
        await llm.sleep(2, "keep")
        late = asyncio.ensure_future(tokens_of(llm, "late"))
        await asyncio.sleep(1.0)  # several times step_timeout
        await llm.wake_up(["kv_cache"])
        assert await llm.is_sleeping(), "the weights are still to come"
        await llm.wake_up(["weights"])
        assert await early == answer(len(PROMPT), 3000)
        assert await late == answer(len(PROMPT), 5)
        assert (await llm.executor_stats())["pid"] == pid

    with llm_with_process(step_timeout=0.3) as llm:
        asyncio.run(main(llm))


def test_a_device_that_never_falls_asleep_counts_as_hung(monkeypatch):
    async def main(llm):
        pid = (await llm.executor_stats())["pid"]
        assert await tokens_of(llm, fake="stuck") == answer(len(PROMPT), 5)
        with pytest.raises(EngineError, match="went away before it answered"):
            await llm.sleep(1)
        await until(lambda: metric(llm, "jaxpaged:engine_restarts") == 1)
        assert (await llm.executor_stats())["pid"] != pid
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    monkeypatch.setattr(heartbeat, "CALL_PATIENCE", 1.0)
    with llm_with_process(step_timeout=0.5) as llm:
        asyncio.run(main(llm))


@pytest.mark.slow
def test_weights_may_be_read_for_long_as_long_as_there_is_progress(monkeypatch):
    async def main(llm):
        pid = (await llm.executor_stats())["pid"]
        await tokens_of(llm, fake="slow to wake")
        await llm.sleep(2)
        await llm.wake_up()
        assert (await llm.executor_stats())["pid"] == pid
        await tokens_of(llm, fake="never awake")
        await llm.sleep(2)
        with pytest.raises(EngineError, match="went away before it answered"):
            await llm.wake_up()
        assert await tokens_of(llm) == answer(len(PROMPT), 5)

    monkeypatch.setattr(heartbeat, "CALL_PATIENCE", 1.2)
    with llm_with_process(step_timeout=0.5) as llm:
        asyncio.run(main(llm))


def test_a_core_that_dies_too_often_stays_dead():
    async def main(llm):
        with pytest.raises(EngineRestartError):
            await outputs_of(llm, fake="die")
        waits_for_the_next = asyncio.ensure_future(outputs_of(llm))
        assert (await waits_for_the_next)[-1].finished
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"signal 9.*restarted 1 times within an hour"):
                await outputs_of(llm, fake="die")
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        assert not llm.is_alive and "restarted 1 times" in llm.obstacle()

    with llm_with_process(max_restarts=1) as llm:
        asyncio.run(main(llm))


def test_another_front_end_shares_the_core_and_notices_its_death():
    async def main(one, two):
        both = await asyncio.gather(tokens_of(one, "r", [7] * 3), tokens_of(two, "r", [7] * 30))
        assert both == [answer(3, 5), answer(30, 5)]
        assert await one.executor_stats() == await two.executor_stats()
        waiting = [asyncio.ensure_future(outputs_of(llm, max_tokens=3000, fake="slow")) for llm in (one, two)]
        await asyncio.sleep(0.1)
        os.kill((await two.executor_stats())["pid"], signal.SIGKILL)
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineRestartError] * 2
        assert "connection to the engine core broke" in str(ends[1])
        assert await asyncio.gather(tokens_of(one), tokens_of(two)) == [answer(len(PROMPT), 5)] * 2
        two.shutdown()
        assert await tokens_of(one) == answer(len(PROMPT), 5)

    with llm_with_process() as one:
        asyncio.run(main(one, AsyncLLM.from_address(one.address)))


def test_shutting_down_ends_requests_and_everything_after():
    async def main():
        with llm_with_process() as llm:
            waiting = asyncio.ensure_future(outputs_of(llm, max_tokens=3000, fake="slow"))
            await until(lambda: llm.get_num_unfinished_requests() == 1)
            asking = asyncio.ensure_future(llm.executor_stats())
            await asyncio.sleep(0)
            llm.shutdown()
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await waiting
            with pytest.raises(EngineError):
                await asking
            with pytest.raises(EngineDeadError):
                await outputs_of(llm)
            await llm.abort("r")

    asyncio.run(main())


def test_errors_of_loading_come_through():
    with pytest.raises(CapacityError, match="need 3 GiB"):
        AsyncLLM.from_config(EngineConfig(), factory="tests.engine.fake_core:build_nothing")


def test_progress_of_loading_comes_through():
    heard = []
    llm = AsyncLLM.from_config(EngineConfig(), lambda *step: heard.append(step), factory=fake_core.FACTORY)
    llm.shutdown()
    assert heard == [("weights", 1, 2), ("weights", 2, 2)]


def test_the_front_end_imports_no_jax():
    program = "import sys; from jaxpaged import AsyncLLM; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def most_in_core(llm, monkeypatch):
    """How many sequences were in the core at a time, at most."""
    add, sent = core_of(llm).link.add_requests, []
    seen = SimpleNamespace(most=0, sent=sent)

    def counted(requests):
        sent.extend(request.request_id for request in requests)
        seen.most = max(seen.most, sum(map(core_of(llm).output_processor.is_unfinished, sent)))
        add(requests)

    monkeypatch.setattr(core_of(llm).link, "add_requests", counted)
    return seen


def test_many_sequences_of_a_prompt_are_never_all_in_the_core_so_that_others_come_between(llm, most_in_core):
    count = 700
    (output,) = asyncio.run(outputs_of(llm, "many", n=count, max_tokens=2, kind=RequestOutputKind.FINAL_ONLY))
    assert [each.token_ids for each in output.outputs] == [answer(len(PROMPT), 2)] * count
    assert (len(most_in_core.sent), most_in_core.most) == (count, SETS_IN_CORE * 64)


def test_nor_are_many_prompts_of_a_group(llm, most_in_core):
    async def scenario():
        return await asyncio.gather(*(tokens_of(llm, f"r{i}", n=2, group="all") for i in range(200)))

    assert asyncio.run(scenario()) == [answer(len(PROMPT), 5)] * 200
    assert (len(most_in_core.sent), most_in_core.most) == (400, SETS_IN_CORE * 64)


def test_what_was_not_sent_of_an_aborted_prompt_never_is(llm, most_in_core):
    async def scenario():
        async with contextlib.aclosing(llm.generate(PROMPT, params(n=700, max_tokens=3000), "many")) as outputs:
            await anext(outputs)
        return await tokens_of(llm, "other")

    assert asyncio.run(scenario()) == answer(len(PROMPT), 5)
    assert len(most_in_core.sent) == SETS_IN_CORE * 64 + 1

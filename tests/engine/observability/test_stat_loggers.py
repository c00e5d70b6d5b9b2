"""Stat loggers get snapshots; one that raises or hangs stops no other, and one that cannot be made stops the start."""

import asyncio
import queue
import threading

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.observability import throughput_log
from jaxpaged.engine.observability.metrics import EngineMetrics
from jaxpaged.engine.observability.stat_loggers import stat_loggers
from jaxpaged.engine.observability.throughput_log import ThroughputLog
from jaxpaged.errors import ConfigError


def logger_of(log):
    """A stat logger's class, and where its instances put what they are told."""
    told = queue.Queue()

    class Logger:
        def __init__(self, config, engine_index=0):
            self.index = engine_index

        def log(self, metrics):
            told.put((self.index, metrics))
            log()

    return Logger, told


def test_one_that_raises_or_hangs_is_told_of_and_stops_no_other(caplog):
    released = threading.Event()
    good, told = logger_of(lambda: None)
    raises, tried = logger_of(lambda: {}[0])
    hangs, begun = logger_of(lambda: released.wait(60))
    config = EngineConfig.from_options(data_parallel_size=2)
    first, second = stat_loggers({"good": good, "raises": raises, "hangs": hangs}, config)
    for i in range(3):
        first.tell([i])
        assert told.get(timeout=30) == tried.get(timeout=30) == (0, [i])
        assert i or begun.get(timeout=30) == (0, [0])
    second.tell(["second"])
    assert told.get(timeout=30) == (1, ["second"])
    released.set()
    words = [record.getMessage() for record in caplog.records]
    assert words.count("the stat logger hangs is still at the snapshot before; this one is lost") == 1
    assert "the stat logger raises failed" in words


def test_one_that_cannot_be_made_is_named():
    with pytest.raises(ConfigError, match="the stat logger bad cannot be made: TypeError"):
        stat_loggers({"bad": lambda: None}, EngineConfig())
    assert stat_loggers({}, EngineConfig()) == []


def test_it_is_told_at_the_end_of_intervals_even_where_no_line_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(throughput_log, "INTERVAL", 0.01)
    caplog.set_level("WARNING", "jaxpaged")
    calls = []

    async def run():
        log = ThroughputLog(EngineMetrics(100), lambda: len(calls) < 2)
        log.wake()
        await asyncio.sleep(0.05)
        assert calls == []
        log.also = lambda: calls.append(1)
        log.wake()
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(calls) == 2  # and none more while nothing happens

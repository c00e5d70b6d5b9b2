"""Hands metrics to stat loggers of plugins, each in a thread of its own, so that one that hangs stops nobody.

This module does not know when the time has come.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.observability.metrics_types import Metric
from jaxpaged.plugins.loading import ending_start

if TYPE_CHECKING:
    from jaxpaged.plugins.protocols import StatLogger

logger = logging.getLogger(__name__)


class StatLoggerThread:
    """One logger. A snapshot that comes while it is still at the one before is left out."""

    def __init__(self, name: str, stat_logger: "StatLogger"):
        self._name, self._logger = name, stat_logger
        self._snapshots: queue.Queue[Sequence[Metric]] = queue.Queue(maxsize=1)
        self._is_late = False
        threading.Thread(target=self._run, name=f"stat logger {name}", daemon=True).start()

    def tell(self, metrics: Sequence[Metric]) -> None:
        try:
            self._snapshots.put_nowait(metrics)
        except queue.Full:
            if not self._is_late:
                logger.warning("the stat logger %s is still at the snapshot before; this one is lost", self._name)
            self._is_late = True

    def _run(self) -> None:
        while True:
            metrics = self._snapshots.get()
            try:
                self._logger.log(metrics)
            except Exception as error:
                logger.error("the stat logger %s failed", self._name, exc_info=error)


class StatLoggers:
    """Those of one engine core."""

    def __init__(self, factories: Mapping[str, Callable[..., Any]], config: EngineConfig, engine_index: int):
        """Raises ConfigError for one that cannot be made."""
        loggers = {name: made(name, each, config, engine_index) for name, each in factories.items()}
        self._threads = [StatLoggerThread(*each) for each in loggers.items()]

    def tell(self, metrics: Sequence[Metric]) -> None:
        for each in self._threads:
            each.tell(metrics)


def made(name: str, factory: Callable[..., Any], config: EngineConfig, engine_index: int) -> Any:
    """A logger. Raises ConfigError where its class raises."""
    with ending_start(f"the stat logger {name}", "cannot be made"):
        return factory(config, engine_index)


def stat_loggers(factories: Mapping[str, Callable[..., Any]], config: EngineConfig) -> list[StatLoggers]:
    """Of every engine core of `config`; none where no plugin has any. Raises ConfigError."""
    return [StatLoggers(factories, config, number) for number in range(config.parallel.num_cores)] if factories else []

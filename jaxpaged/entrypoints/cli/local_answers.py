"""Answers of a chat from an engine in this process, and a notice while programs for them are being compiled."""

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxpaged.engine.observability.step_times import ProgramWaits
from jaxpaged.entrypoints.cli.adapters import with_adapter
from jaxpaged.entrypoints.cli.conversation import Answer
from jaxpaged.entrypoints.cli.engine import CHAT_MAX_TOKENS, Engine, request_params
from jaxpaged.entrypoints.terminal import ProgressLine
from jaxpaged.errors import EngineError
from jaxpaged.messages import LoRARequest, RequestOutput

SECONDS = 0.5
"""Before it is said for the first time, and between two looks."""


class LocalAnswers:
    """Every turn sends the whole conversation; the engine's prefix cache still holds all but the newest message."""

    default_max_tokens: int | None

    def __init__(self, engine: Engine, adapter: LoRARequest | None = None):
        self.engine = engine
        self._adapter = with_adapter(adapter)
        # A model's own limit, if it brings one, is not ours to explain.
        self.default_max_tokens = None if "max_tokens" in engine.input_processor.defaults.sampling else CHAT_MAX_TOKENS
        self._numbers = itertools.count()

    def ask(self, messages: list[dict[str, Any]], given: Mapping[str, Any], show: Callable[[str], None]) -> Answer:
        request_id = f"turn-{next(self._numbers)}"
        prompt = self.engine.input_processor.chat_prompt(messages)
        self.engine.add_request(request_id, prompt, request_params(self.engine, given, chat=True), **self._adapter)
        num_shown, last = 0, None
        with CompileNotice(self.engine.executor_stats) as notice:
            try:
                while self.engine.has_unfinished_requests():
                    for last in self.engine.step():
                        text = last.outputs[0].text
                        notice.end()
                        show(text[num_shown:])
                        num_shown = len(text)
            except KeyboardInterrupt:
                self.engine.abort_request([request_id])
                raise
        if last is None or last.error is not None:
            raise EngineError(last.error if last and last.error else "there is no answer.")
        return self._answer(last)

    def _answer(self, output: RequestOutput) -> Answer:
        completion, times = output.outputs[0], output.metrics
        first = seconds = None
        if times is not None and times.first_token_time is not None and times.finished_time is not None:
            waits = ProgramWaits(self.engine.step_records()[0])
            first = times.first_token_time - times.arrival_time
            seconds = times.finished_time - times.first_token_time
            seconds -= waits.between(times.first_token_time, times.finished_time)
        return Answer(completion.text, completion.finish_reason, len(completion.token_ids), first, seconds)


# ---- programs that are being compiled --------------------------------------------------------------


class CompileNotice:
    """A line in a terminal, from a thread, until `end` takes it away. `stats` are those of an executor."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]):
        self._stats, self._line = stats, ProgressLine()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxpaged-compile-notice", daemon=True)

    def __enter__(self) -> Self:
        if self._line.open:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away, for good."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
            self._line.close()

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS):
            stats = self._stats()
            ready, needed = (stats.get(name, 0) for name in ("ordinary_programs_ready", "ordinary_programs"))
            if ready < needed:
                self._line.show(f"compiling: {ready} of {needed} programs are ready; the answer may have to wait")

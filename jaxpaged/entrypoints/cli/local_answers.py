"""Answers of a chat from an engine in this process."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.engine.observability.step_times import ProgramWaits
from jaxpaged.entrypoints.cli.compile_notice import CompileNotice
from jaxpaged.entrypoints.cli.conversation import Answer
from jaxpaged.entrypoints.cli.engine import CHAT_MAX_TOKENS, Engine, request_params
from jaxpaged.errors import EngineError
from jaxpaged.messages import RequestOutput


class LocalAnswers:
    """Every turn sends the whole conversation; the engine's prefix cache still holds all but the newest message."""

    default_max_tokens: int | None

    def __init__(self, engine: Engine):
        self.engine = engine
        # A model's own limit, if it brings one, is not ours to explain.
        self.default_max_tokens = None if "max_tokens" in engine.input_processor.defaults.sampling else CHAT_MAX_TOKENS
        self._numbers = itertools.count()

    def ask(self, messages: list[dict[str, Any]], given: Mapping[str, Any], show: Callable[[str], None]) -> Answer:
        request_id = f"turn-{next(self._numbers)}"
        prompt = self.engine.input_processor.chat_prompt(messages)
        self.engine.add_request(request_id, prompt, request_params(self.engine, given, chat=True))
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

"""The one place where commands meet the engine: tests put a fake in place of `open_engine`.

Importing this module imports no engine; opening one does.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxpaged.entrypoints.cli.adapters import chosen_adapter, options_for
from jaxpaged.entrypoints.cli.flags import engine_options, sampling_options
from jaxpaged.entrypoints.terminal import ProgressLine
from jaxpaged.messages import Progress, RequestOutput, StepRecord
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

RAW_MAX_TOKENS = 256
"""Output tokens of a plain completion when nothing else is said: a base model seldom ends its text by itself."""


CHAT_MAX_TOKENS = 2048
"""Output tokens of an answer when nothing else is said: a page or two, and minutes rather than hours on a CPU."""


class Engine(Protocol):
    """What commands use of `LLMEngine`."""

    input_processor: Any  # defaults, chat_templates, chat_prompt

    def add_request(self, request_id: str, prompt: Any, sampling_params: SamplingParams, **more: Any) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def abort_request(self, request_ids: Sequence[str]) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def executor_stats(self) -> Mapping[str, Any]: ...
    def step_records(self) -> tuple[list[StepRecord], int]: ...
    def shutdown(self) -> None: ...


def open_engine(options: Mapping[str, Any], progress: Progress) -> Engine:
    """Load the model and start an engine. Raises ConfigError, CheckpointError or CapacityError."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.llm_engine import LLMEngine

    return LLMEngine.from_config(EngineConfig.from_options(**options), progress)


def start(args: argparse.Namespace) -> tuple[Engine, ProgressLine]:
    """An engine from a command's flags. The progress line is still open: programs may be compiling."""
    options = options_for(chosen_adapter(args), engine_options(args))
    SamplingParams(**sampling_options(args))  # wrong values are found before any weight is read
    line = ProgressLine()
    try:
        return open_engine(options, line.update), line
    except BaseException:
        line.close()
        raise


def has_chat_template(engine: Engine) -> bool:
    return "default" in engine.input_processor.chat_templates.sources


def default_max_tokens(chat: bool) -> int:
    return CHAT_MAX_TOKENS if chat else RAW_MAX_TOKENS


def request_params(engine: Engine, given: Mapping[str, Any], chat: bool) -> SamplingParams:
    """What was given, then the model's own defaults, then a length that a person can wait for."""
    length = {"max_tokens": default_max_tokens(chat)}
    defaults = engine.input_processor.defaults.sampling
    return SamplingParams(**{**length, **defaults, **given}, output_kind=RequestOutputKind.CUMULATIVE)

"""An I/O processor of a plugin: it makes prompts of a client's own kind of data, and an answer of their numbers.

Each of its calls runs in a thread of its own, so that one that raises or hangs costs one request and holds up no other.
This module knows neither how prompts are computed nor how requests come.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError, EngineError, RequestError
from jaxpaged.plugins.loading import chosen, ending_start, load, load_plugins
from jaxpaged.plugins.sources import IO_PROCESSORS, installed_sources
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput

logger = logging.getLogger(__name__)

CALL_SECONDS = 60.0
"""How long one call may take."""
MOST_HUNG = 8
"""Calls that hang at a time; with so many the processor is not asked."""
PLUGIN_TASK = "plugin"
"""What vLLM calls the task of a request to an I/O processor."""

PoolingPrompt = str | list[int]
Prepared = tuple[list[PoolingPrompt], PoolingParams]


class IOProcessing:
    """Calls a stranger's processor."""

    def __init__(self, name: str, processor: Any, seconds: float = CALL_SECONDS):
        self.name, self._processor, self._seconds = name, processor, seconds
        self._parse: Any = getattr(processor, "parse_data", None) or getattr(processor, "parse_request", None)
        for method in ("pre_process", "post_process"):
            if not callable(getattr(processor, method, None)):
                raise ConfigError(f"the I/O processor {name} has no method {method}. Give it one.")
        if not callable(self._parse):
            raise ConfigError(f"the I/O processor {name} has no method parse_data. Give it one.")
        self._hung: set[Future] = set()

    # ---- for callers that wait ----------------------------------------------------------------------

    def prepared(self, data: Any, params: PoolingParams, request_id: str) -> Prepared:
        """The prompts that data means, and how they are pooled. Raises RequestError for data that the processor
        refuses, and EngineError where it raises anything else or takes too long."""
        return self._result(self._begin(self._prepare, data, params, request_id))

    def answer(self, outputs: Sequence[PoolingRequestOutput], request_id: str) -> Any:
        """What the processor makes of the results of all prompts, in order. Raises EngineError."""
        return self._result(self._begin(self._processor.post_process, outputs, request_id))

    # ---- for an event loop -------------------------------------------------------------------------

    async def prepared_async(self, data: Any, params: PoolingParams, request_id: str) -> Prepared:
        """`prepared`."""
        return await self._result_async(self._begin(self._prepare, data, params, request_id))

    async def answer_async(self, outputs: Sequence[PoolingRequestOutput], request_id: str, finish: Callable) -> Any:
        """`finish` of `answer`, in its thread."""
        call = lambda: finish(self._processor.post_process(outputs, request_id))
        return await self._result_async(self._begin(call))

    # ---- threads -----------------------------------------------------------------------------------

    def _begin(self, call: Callable[..., Any], *arguments: Any) -> Future:
        if len(self._hung) >= MOST_HUNG:
            raise EngineError(f"{MOST_HUNG} calls of the I/O processor {self.name} hang. Restart the engine.")
        future: Future = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"I/O processor {self.name}", daemon=True).start()
        return future

    def _result(self, future: Future) -> Any:
        try:
            return future.result(self._seconds)
        except Exception as error:
            raise self._failure(future, error) from error

    async def _result_async(self, future: Future) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._seconds)
        except Exception as error:
            raise self._failure(future, error) from error

    def _failure(self, future: Future, error: Exception) -> Exception:
        """What is raised for it."""
        if not future.done():
            self._hung.add(future)
            future.add_done_callback(self._hung.discard)
            logger.error("the I/O processor %s took more than %g s", self.name, self._seconds)
            return EngineError(f"the I/O processor {self.name} took more than {self._seconds:g} s.")
        if isinstance(error, RequestError | ConfigError):
            return error
        logger.error("the I/O processor %s failed", self.name, exc_info=error)
        return EngineError(f"the I/O processor {self.name} failed on this request; the log says why.")

    def _prepare(self, data: Any, params: PoolingParams, request_id: str) -> Prepared:
        try:
            parsed = self._parse(data)
        except (ValueError, TypeError) as error:
            raise RequestError(f"data: {error}", "data") from error
        prompts = prompts_of(self._processor.pre_process(parsed, request_id))
        merge = getattr(self._processor, "merge_pooling_params", None)
        merged = params if merge is None else merge(params)
        if not isinstance(merged, PoolingParams):
            raise TypeError(f"merge_pooling_params gave {merged!r}; it must give PoolingParams")
        return prompts, without_task(merged)


def without_task(params: PoolingParams) -> PoolingParams:
    """The same, with what the model does in place of vLLM's task for plugins."""
    return msgspec.structs.replace(params, task=None) if params.task == PLUGIN_TASK else params


def prompts_of(made: Any) -> list[PoolingPrompt]:
    """What `pre_process` made, one prompt or a list of them, each as text or token ids. Raises TypeError for what is
    none, and for pictures."""
    one = isinstance(made, str | Mapping) or (isinstance(made, list | tuple) and bool(made) and type(made[0]) is int)
    prompts = [prompt_of(each) for each in ([made] if one else made)]
    if not prompts:
        raise TypeError("pre_process gave no prompt")
    return prompts


def prompt_of(made: Any) -> PoolingPrompt:
    if isinstance(made, Mapping) and len(made) == 1:
        made = made.get("prompt", made.get("prompt_token_ids"))
    if isinstance(made, str):
        return made
    if isinstance(made, list | tuple) and made and all(type(each) is int for each in made):
        return list(made)
    raise TypeError(f"pre_process gave the prompt {made!r}; it must be a text, or a list of token ids")


def processor_of(input_processor: Any) -> IOProcessing:
    """The one of an engine. Raises RequestError where it has none."""
    if input_processor.io_processor is None:
        raise RequestError(
            "data is for an I/O processor, and the engine was started without one. Start it with io_processor_plugin.",
            "data",
        )
    return input_processor.io_processor


def io_processor_of(config: EngineConfig) -> IOProcessing | None:
    """What the option `io_processor_plugin` names: a general plugin's, or an installed one, which is loaded only then.
    Raises ConfigError where there is none, where it cannot be made, and for an engine that generates."""
    name = config.plugins.io_processor_plugin
    if name is None:
        return None
    if config.model.runner != "pooling":
        raise ConfigError(
            f"io_processor_plugin is {name!r}, but the engine generates, and I/O processors are for models that pool. "
            "Leave it out, or give runner 'pooling'."
        )
    known = dict(load_plugins(config.plugins.plugin, config.plugins.plugins).added("io_processors"))
    installed = {each.name: each for each in installed_sources() if each.group == IO_PROCESSORS}
    if name not in known and name in installed:
        known = dict(load(installed[name]).added("io_processors"))
    make = chosen("io_processor_plugin", name, known, installed)
    with ending_start(f"the I/O processor {name}", "cannot be made"):
        processor = make(config)
    return IOProcessing(name, processor)

"""An asynchronous engine in the event loop, over the engine whose model is a function: no device, no process."""

import asyncio
import contextlib
import dataclasses

from jaxpaged.config.lora import LoRAConfig
from jaxpaged.engine.adapters import AsyncAdapters
from jaxpaged.engine.control import AsyncEngineControl
from jaxpaged.engine.core_calls import AddLora, ListLoras, PinLora, RemoveLora, Sleep, Snapshot
from jaxpaged.errors import EngineDeadError, EngineError
from tests.engine.fake_engine import make_engine


class Results(asyncio.Queue):
    """All results of a request, each by itself, but those that `take` takes while somebody waits for the next."""

    def __init__(self, take):
        super().__init__()
        self._take = take
        self._is_awaited = False

    async def get(self):
        self._is_awaited = self.empty()
        return await super().get()

    def put_nowait(self, result):
        is_usual = self._take is not None and not isinstance(result, Exception) and not result.finished
        try:
            if is_usual and self._is_awaited and self._take(result):
                return
        except Exception as error:
            result = error
        self._is_awaited = False
        super().put_nowait(result)


class FakeAsyncEngine(AsyncEngineControl):
    """Steps a `LLMEngine` while there is something to do, and hands its results to whoever waits for them.

    `paused`: nothing is stepped, so requests stay under way. `is_dead`: it answers nothing any more. `cold`:
    not all programs are compiled. With a `book` it takes adapters, which are read by it.
    """

    def __init__(self, *, book=None, **options):
        self.engine, self.executor = make_engine(**options)
        self.input_processor = self.engine.input_processor
        self.book = book
        self.config = self.engine.config
        if book is not None:
            self.config = dataclasses.replace(self.config, lora=LoRAConfig(enable_lora=True))
        self.is_dead = self.is_restarting = self.cold = False
        self.sleep_level = None
        self.aborted = []
        self.seen = []  # (prompt, params, request id) in order of arrival
        self.ranks = []  # the core that each named
        self.loras = []  # the adapter that each named
        self.adapters = AsyncAdapters(self.config.lora.enable_lora, self.call)
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_snapshots = 0
        self.answers = asyncio.Event()  # whether it says anything of itself
        self.answers.set()
        self._results = {}
        self._stepper = None

    @property
    def is_alive(self):
        return not self.is_dead

    def obstacle(self, when_compiled=True):
        if self.is_dead or self.is_restarting:
            return "The engine does not serve: it died."
        if self.sleep_level is not None:
            return f"The engine sleeps at level {self.sleep_level}. Requests wait until it is woken."
        return "3 of the 7 programs that ordinary requests need are compiled." if when_compiled and self.cold else None

    async def generate(
        self,
        prompt,
        sampling_params,
        request_id,
        *,
        priority=0,
        arrival_time=None,
        truncate_prompt_tokens=None,
        add_special_tokens=True,
        trace_headers=None,
        take=None,
        group=None,
        data_parallel_rank=None,
        lora_request=None,
    ):
        if self.is_dead:
            raise EngineDeadError("the engine core at 0x7f0012345678 died: /srv/engine/core.py. Restart it.")
        self.engine.add_request(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            arrival_time=arrival_time,
            trace_headers=trace_headers,
            tokenization_kwargs={
                "add_special_tokens": add_special_tokens,
                "truncate_prompt_tokens": truncate_prompt_tokens,
            },
        )
        self.seen.append((prompt, sampling_params, request_id))
        self.ranks.append(data_parallel_rank)
        self.loras.append(lora_request)
        results = self._results[request_id] = Results(take)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.ensure_future(self._step_on())
        finished = False
        try:
            while not finished:
                output = await results.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            del self._results[request_id]
            if not finished:
                self.aborted.append(request_id)
                self.engine.abort_request(request_id)

    def suitable_core(self, token_ids, cache_salt=None, lora=None):
        return 3

    async def encode(self, prompt, pooling_params, request_id, **options):
        async with contextlib.aclosing(self.generate(prompt, pooling_params, request_id, **options)) as results:
            async for output in results:
                yield output

    async def _step_on(self):
        while self.engine.has_unfinished_requests():
            await self.go_on.wait()
            try:
                outputs = self.engine.step()
            except EngineError as error:
                outputs = []
                for results in self._results.values():
                    results.put_nowait(error)
            for output in outputs:
                self._results[output.request_id].put_nowait(output)
            await asyncio.sleep(0)

    async def abort(self, request_ids):
        for output in self.engine.abort_request(request_ids):
            self.aborted.append(output.request_id)
            self._results[output.request_id].put_nowait(output)

    async def call(self, call):
        """With "wait" the stepper goes on until it has nothing to do."""
        if isinstance(call, AddLora | RemoveLora | ListLoras | PinLora):
            return self.book.call(call)
        if isinstance(call, Snapshot):
            if self.is_dead:
                raise EngineDeadError("the engine has stopped. Start a new one.")
            self.num_snapshots += 1
            await self.answers.wait()
        while isinstance(call, Sleep) and call.mode == "wait" and self.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        answer = self.engine.call(call)
        self.sleep_level = self.engine.metrics.stats.sleep_level
        return answer

    def note_logprob_difference(self, difference):
        self.difference = difference

    def get_metrics(self):
        return self.engine.get_metrics()

    def shutdown(self):
        with contextlib.suppress(AttributeError):
            self._stepper.cancel()
        self.input_processor.grammar_checker.close()  # its processes; those for pictures are shared

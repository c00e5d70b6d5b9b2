"""Servers whose model computes nothing, for bench_serving.py: HTTP, scheduler and detokeniser are the real ones."""

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bench_process import FACTORY, SEEING_FACTORY, counting_config

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.control import AsyncEngineControl
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.output.stream import OutputStream
from jaxpaged.entrypoints.cli.serve import StartReport, announce, run_loop
from jaxpaged.entrypoints.http.server import Sockets, serve
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import ModelRunnerOutput
from jaxpaged.params.hub import resolve_model_folder
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.service import Service, served_model


def serve_free(max_num_seqs: int, grpc_port: int | None) -> None:
    """This process as a server whose model costs nothing."""
    engine = FreeAsyncEngine(max_num_seqs)
    serve_engine(engine, engine.config, "free", ServerOptions(port=0, grpc_port=grpc_port))


def serve_counting(
    max_num_seqs: int,
    device_ms: float,
    grpc_port: int | None,
    seeing: Mapping[str, Any] | None = None,
    **server: Any,
) -> None:
    """This process as a server, and another one as its engine core, whose steps take `device_ms`. `server`: its
    options. `seeing`: those of an engine that sees."""
    options = ServerOptions(port=0, grpc_port=grpc_port, **server)
    engine = AsyncLLM.from_config(
        counting_config(max_num_seqs, device_ms, **seeing or {}),
        factory=SEEING_FACTORY if seeing else FACTORY,
        step_timeout=options.step_timeout,
        max_restarts=options.max_restarts,
    )
    try:
        serve_engine(engine, engine.config, "counting", options)
    finally:
        engine.shutdown()


def serve_engine(engine: Any, config: Any, name: str, options: ServerOptions) -> None:
    sockets = Sockets(options)
    service = Service(engine, served_model(config, (name,)), options)
    with contextlib.closing(StartReport()) as report:
        announcement = functools.partial(announce, service, sockets, report, guarded=False)
        run_loop(serve(service, sockets, on_listening=announcement))


class Ready:
    """A step whose result is there."""

    def __init__(self, output: Any):
        self._output = output

    def result(self) -> Any:
        return self._output


class FreeExecutor:
    """Samples the same token for every request, at once."""

    weights_version = ""

    def __init__(self, num_blocks: int, block_size: int):
        self.kv_cache_config = KVCacheConfig((num_blocks,), (KVCacheGroup(AttentionSpec(block_size, 1, 64, 2), (0,)),))
        self.encoder_cache_config = None

    def execute_model(self, scheduled: Any) -> Ready:
        ids = [each for each, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens, strict=True) if most]
        return Ready(ModelRunnerOutput(scheduled.step_id, ids, [[500] for _ in ids]))

    def max_step_tokens(self) -> int:
        return 1 << 30

    def max_decode_steps(self) -> int:
        return 1

    def can_run(self, extra: Any) -> bool:
        return True

    @property
    def workers(self) -> "FreeExecutor":
        return self

    def stats(self) -> dict[str, Any]:
        return {}


class FreeAsyncEngine(AsyncEngineControl):
    """What the server needs of an engine, in its own event loop: a step, then everybody gets to send."""

    is_alive = True

    def __init__(self, max_num_seqs: int):
        tokenizer = load_tokenizer(resolve_model_folder("demo"))
        facts = ModelFacts(4096, "float32", 1, tokenizer.vocab_size)
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8192, "block_size": 16}
        config = EngineConfig.from_options(**sizes).resolve(facts, "cpu")
        self.input_processor = InputProcessor(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=4096)
        self.config = config
        core = EngineCore(config, FreeExecutor(max_num_seqs * 256 + 1, 16))
        self.engine = LLMEngine(config, self.input_processor, core)
        self._streams: dict[str, Any] = {}
        self._stepping: asyncio.Task | None = None

    def obstacle(self, when_compiled: bool = True) -> None:
        return None

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        *,
        take: Any = None,
        group: Any = None,
        data_parallel_rank: int | None = None,
        **others: Any,
    ):
        """As `AsyncLLM.generate`; there is one core, whichever is asked for."""
        self.engine.add_request(request_id, prompt, params, **others)
        results = self._streams[request_id] = OutputStream(by_delta=True, take=take)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(self._step())
        try:
            while True:
                output = await results.get()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            self.engine.abort_request(request_id)

    async def _step(self) -> None:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self._streams[output.request_id].put(output)
            await asyncio.sleep(0)

    async def call(self, call: Any) -> Any:
        return self.engine.call(call)

    async def check_health(self) -> None:
        pass

    def get_metrics(self) -> list[Any]:
        return self.engine.get_metrics()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.engine.abort_request(request_ids)

"""`LLMEngine`: the synchronous engine. Prompts in, `step()` by `step()`, results out.

It puts input processor, engine core and output processor in a row and knows nothing of what they do inside.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from jaxpaged.config import EngineConfig, ModelConfig
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.input.processor import InputProcessor, Prompt, tokenization_options
from jaxpaged.engine.input.public_tokenizer import public_tokenizer
from jaxpaged.engine.observability.metrics import EngineMetrics, Metric
from jaxpaged.engine.observability.tracing import request_tracer
from jaxpaged.engine.output.processor import OutputProcessor
from jaxpaged.errors import UsageError
from jaxpaged.interrupts import held_interrupts, holding_interrupts
from jaxpaged.messages import EngineSnapshot, KVBlockMap, Progress, RequestOutput, StepRecord
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.vllm_options import check_arguments


class LLMEngine:
    """Serves many requests at a time, in one thread. `config` is resolved.

    Use it as a context manager, or call `shutdown`, to release the devices.
    """

    def __init__(self, config: EngineConfig, input_processor: InputProcessor, core: EngineCoreClient):
        self.config = config
        self.input_processor = input_processor
        self.metrics = EngineMetrics(config.model.max_model_len)
        self._core = core
        self._output_processor = OutputProcessor(
            input_processor.tokenizer, self.metrics, input_processor.pooler, request_tracer(config)
        )
        self._unreturned: list[RequestOutput | PoolingRequestOutput] = []  # of a step that an interrupt ended

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> "LLMEngine":
        """Load the model that `config` names; `progress` hears how far that is.

        Raises ConfigError, CheckpointError or CapacityError.
        """
        from jaxpaged.engine.build import build_engine  # it imports jax

        return build_engine(config, progress)

    @classmethod
    def from_engine_args(cls, engine_args: Any, progress: Progress | None = None) -> "LLMEngine":
        """The same from `EngineArgs`, which hold all options by name."""
        return cls.from_config(engine_args.create_engine_config(), progress)

    @property
    def model_config(self) -> ModelConfig:
        """The options of the model, resolved: `model`, `dtype`, `max_model_len`, ..."""
        return self.config.model

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt. Results come from `step`. `params` None: the model's own defaults.

        `tokenization_kwargs` may hold `add_special_tokens` and `truncate_prompt_tokens`, see `InputProcessor.process`;
        `trace_headers` "traceparent" and "tracestate" where requests are traced.
        Raises RequestError when the request is at fault; others are not touched.
        """
        check_arguments(lora_request=lora_request)
        request, text = self.input_processor.process(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority,
            **tokenization_options(tokenization_kwargs),
        )  # fmt: skip
        with held_interrupts():
            children = self._output_processor.add_request(request, text, trace_headers=trace_headers)
            try:
                for child in children:
                    self._core.add_request(child)
            except Exception:
                self._core.abort_requests(self._output_processor.discard(request_id))
                raise

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Run one step and return the results that changed: none while the engine sleeps.

        KeyboardInterrupt comes where the step waits, or at its end: the next step returns what this one cannot. Raises
        EngineDeadError when the engine has stopped.
        """
        results: list[RequestOutput | PoolingRequestOutput] = []
        try:
            with held_interrupts():
                core_outputs = self._core.get_output()
                processed = self._output_processor.process(core_outputs.outputs)
                self._core.abort_requests(processed.ids_to_abort)
                self.metrics.record_step(core_outputs.stats, processed.num_tokens)
                results, self._unreturned = [*self._unreturned, *processed.request_outputs], []
                return results
        except BaseException:
            self._unreturned += results
            raise

    @holding_interrupts
    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Stop requests; returns what they had so far, with finish reason "abort". Unknown ids pass."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        engine_ids, results = self._output_processor.abort(ids)
        self._core.abort_requests(engine_ids)
        self._unreturned = [output for output in self._unreturned if output.request_id not in ids]
        return results

    def has_unfinished_requests(self) -> bool:
        return len(self._output_processor) > 0 or bool(self._unreturned)

    def get_num_unfinished_requests(self) -> int:
        return len(self._output_processor)

    @holding_interrupts
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt beginnings; False while requests are under way."""
        return self._core.reset_prefix_cache()

    @holding_interrupts
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; see `EngineCore.sleep`. What it ended is returned by the next `step`."""
        self.metrics.stats = self._core.sleep(level, mode)

    @holding_interrupts
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back, all of it or what `tags` name: weights, kv_cache, scheduling."""
        self.metrics.stats = self._core.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self._core.is_sleeping()

    def start_profile(self, folder: str | None = None) -> None:
        """Record what the devices do, to `folder` or to the option `profile_dir`. Raises UsageError."""
        self._core.start_profile(folder)

    def stop_profile(self) -> None:
        """Write what was recorded. Raises ConflictError when nothing is."""
        self._core.stop_profile()

    def get_metrics(self) -> list[Metric]:
        return self.metrics.read(self._core.executor_stats())

    def executor_stats(self) -> dict[str, Any]:
        """Counters of the executor: steps, padding, buckets, programs, recompiles."""
        return self._core.executor_stats()

    def step_records(self) -> tuple[list[StepRecord], int]:
        """The newest finished steps, oldest first, and how many before them are forgotten."""
        return self._core.step_records()

    def block_map(self) -> KVBlockMap:
        """Who holds which KV block now."""
        return self._core.block_map()

    def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        """Queues, blocks and newest steps at this moment, see `engine/observability/snapshot.py`."""
        return self._core.snapshot(since_step)

    def wait_for_programs(self) -> None:
        """Block until every program is compiled: for tests and benchmarks; serving does not need it."""
        self._core.wait_for_programs()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker, or a function with it; a list of one result. Raises UsageError."""
        if timeout is not None:
            raise UsageError(f"timeout is {timeout!r}, but the worker answers in the caller's thread. Leave it out.")
        return self._core.collective_rpc(method, args, kwargs or {})

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model's parameters; a list of one result. Raises ConflictError when they sleep."""
        return self.collective_rpc("apply_model", args=(func,))

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it, see `public_tokenizer`. Raises UsageError when there is none."""
        return public_tokenizer(self.input_processor)

    def shutdown(self) -> None:
        """Release the devices. Requests under way are lost."""
        self._core.shutdown()
        self._output_processor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

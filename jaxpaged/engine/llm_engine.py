"""`LLMEngine`: the synchronous engine. Prompts in, `step()` by `step()`, results out.

It puts input processor, engine core and output processor in a row and knows nothing of what they do inside.
"""

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from jaxpaged.config import EngineConfig, ModelConfig
from jaxpaged.engine.adapters import Adapters
from jaxpaged.engine.control import EngineControl
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.engine.early_leases import lease_kept
from jaxpaged.engine.input.processor import InputProcessor, Prompt, tokenization_options
from jaxpaged.engine.input.public_tokenizer import public_tokenizer
from jaxpaged.engine.observability.logprob_difference import LogprobDifference
from jaxpaged.engine.observability.metrics import EngineMetrics, Metric
from jaxpaged.engine.observability.tracing import request_tracer
from jaxpaged.engine.output.processor import OutputProcessor
from jaxpaged.interrupts import held_interrupts, holding_interrupts
from jaxpaged.messages import LoRAInfo, LoRARequest, Progress, RequestOutput, SchedulerStats
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import SamplingParams


class LLMEngine(EngineControl):
    """Serves many requests at a time, in one thread. `config` is resolved.

    Use it as a context manager, or call `shutdown`, to release the devices.
    """

    def __init__(self, config: EngineConfig, input_processor: InputProcessor, core: EngineCore):
        self.config = config
        self.input_processor = input_processor
        self.metrics = EngineMetrics(config.max_model_len)
        self.adapters = Adapters(config.lora.enable_lora, self.call)
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
        from jaxpaged.engine.build import build_parts  # it imports jax

        return cls(*build_parts(config, progress))

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
        lora_request: LoRARequest | LoRAInfo | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt. Results come from `step`. `params` None: the model's own defaults.

        `tokenization_kwargs` may hold `add_special_tokens` and `truncate_prompt_tokens`, see `InputProcessor.process`;
        `trace_headers` "traceparent" and "tracestate" where requests are traced.
        `lora_request`: its adapter, which is read if no request has named it before. Raises RequestError when the
        request is at fault, and CheckpointError when its adapter is; others are not touched.
        """
        lora = None if lora_request is None else self.adapters.info_of(lora_request)
        with self._lease_kept(params) if isinstance(getattr(params, "extra_args", None), dict) else nullcontext():
            request, text = self.input_processor.process(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                make_room=self._make_room,
                **tokenization_options(tokenization_kwargs),
            )
        if lora is not None:
            request.lora = lora
        with held_interrupts():
            children = self._output_processor.add_request(request, text, trace_headers=trace_headers)
            try:
                self._core.add_requests(children)
            except Exception:
                self._core.abort_requests(self._output_processor.discard(request_id))
                raise

    def _make_room(self) -> bool:
        """Go on with the requests under way, whose pictures take the memory that those of a new one need. False: there
        are none, or the engine sleeps."""
        if not len(self._output_processor) or self.is_sleeping():
            return False
        self._unreturned = self.step()
        return True

    def _lease_kept(self, params: SamplingParams | PoolingParams | None) -> AbstractContextManager[None]:
        """While a request with `extra_args` is checked: another engine may lend what it needs."""
        offload = self.config.cache.offload
        borrows = offload is not None and offload.peering is not None and offload.peering.borrows
        return lease_kept(self._core.call, self.input_processor.grammar_checker, params, borrows=borrows)

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Run one step and return the results that changed: none while the engine sleeps.

        KeyboardInterrupt comes where the step waits, or at its end: the next step returns what this one cannot. Raises
        EngineDeadError when the engine has stopped.
        """
        results: list[RequestOutput | PoolingRequestOutput] = []
        try:
            with held_interrupts():
                core_outputs = self._core.step()
                processed = self._output_processor.process(core_outputs.outputs)
                if processed.ids_to_abort:
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

    def call[R](self, call: CoreCall[R]) -> R:
        """The core's result. Interrupts wait until what they would tear apart is done."""
        with held_interrupts() if call.changes_books else contextlib.nullcontext():
            result = self._core.call(call)
        if isinstance(result, SchedulerStats):
            self.metrics.stats = result
        return result

    def get_metrics(self) -> list[Metric]:
        return self.metrics.read(self.executor_stats())

    def note_logprob_difference(self, difference: LogprobDifference) -> None:
        """Show how far a trainer's log probabilities are from the engine's among the metrics."""
        self.metrics.logprob_difference = difference

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it, see `public_tokenizer`. Raises UsageError when there is none."""
        return public_tokenizer(self.input_processor)

    def shutdown(self) -> None:
        """Release the devices. Requests under way are lost."""
        self._core.shutdown()
        self._output_processor.shutdown()
        self.input_processor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

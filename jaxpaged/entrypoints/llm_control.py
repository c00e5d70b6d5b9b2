"""`LLM`'s methods around the engine: what it does and did, its sleep, its recordings, its end.

This module knows no prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.entrypoints.pictures.block_map import BlockMap
from jaxpaged.entrypoints.pictures.engine_stats import EngineStats
from jaxpaged.entrypoints.pictures.timeline import Timeline
from jaxpaged.sampling_params import SamplingParams


class ControlMethods:
    """What `LLM` offers beside answers."""

    llm_engine: LLMEngine

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it: `apply_chat_template`, `encode`, `decode`, a call, `len`, ...

        It is a copy: changing it changes nothing in the engine. The first call imports transformers, which takes a
        second or two. Raises UsageError for an engine without tokenizer.
        """
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`: the model's own defaults."""
        return self.llm_engine.input_processor.defaults.sampling_params()

    def get_metrics(self) -> list[Metric]:
        return self.llm_engine.get_metrics()

    def timeline(self) -> Timeline:
        """Where the time of the last steps went. It shows itself in notebooks, and `save(path)` draws it."""
        engine = self.llm_engine
        return Timeline(*engine.step_records(), engine.executor_stats().get("token_buckets", ()))

    def blocks(self) -> BlockMap:
        """Who holds which KV block now. It shows itself in notebooks, prints as text, and `save(path)` draws it."""
        return BlockMap(self.llm_engine.block_map())

    def stats(self) -> EngineStats:
        """What the engine did so far, in a few lines for people; `get_metrics` is for programs."""
        return EngineStats(self.llm_engine.get_metrics(), self.llm_engine.executor_stats())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt beginnings."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; programs stay, so waking compiles nothing.

        Level 0 only pauses. Level 1 frees the KV cache, forgets cached prompt beginnings, and moves the weights to the
        host's memory; on a CPU, where that is the device's own, it drops them, to be read from the checkpoint again.
        Level 2 drops them everywhere. `mode` is for requests under way, which only those have who step the engine
        themselves: "abort" ends them, "wait" finishes them first, "keep" lets them go on after waking.
        """
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: all of it, or what `tags` name ("weights", "kv_cache", "scheduling").

        Prompts are completed once all of it is back. An engine that is awake passes. Raises CheckpointError or
        CapacityError when weights or memory are gone; it can be tried again.
        """
        self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether anything has to be woken before prompts can be completed."""
        return self.llm_engine.is_sleeping()

    def start_profile(self, folder: str | None = None) -> None:
        """Record what the devices do, to `folder` or to the option `profile_dir`, for XProf and Perfetto.

        Raises ConflictError while a recording is under way, UsageError without a folder that can be written.
        """
        self.llm_engine.start_profile(folder)

    def stop_profile(self) -> None:
        """Write the recording. Raises ConflictError when there is none."""
        self.llm_engine.stop_profile()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name, or a function with the worker as its first argument.

        There is one worker, which computes on all devices in this process: one result, and nothing is pickled. The
        worker is no public interface. Raises UsageError for an unknown name, and for a `timeout`: a call in the
        caller's own thread cannot be given up.
        """
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model's parameters, a tree of dataclasses with arrays of JAX; a list of one result.

        Raises ConflictError while the weights sleep.
        """
        return self.llm_engine.apply_model(func)

    def wait_for_programs(self) -> None:
        """Block until every program is compiled: for tests and benchmarks; serving does not need it."""
        self.llm_engine.wait_for_programs()

    def shutdown(self) -> None:
        """Release the devices."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

"""`LLM`: batches of prompts in, results out, with vLLM's signatures.

    llm = LLM(model="demo")
    llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text

This module knows nothing of how the engine works; it feeds `LLMEngine` and waits for it.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from jaxpaged.config import EMBEDDED_MODEL, EngineConfig
from jaxpaged.engine.chat_template import Message
from jaxpaged.engine.input_processor import Prompt
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.metrics import Metric
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.entrypoints.batch_progress import BatchProgress
from jaxpaged.entrypoints.beam_search import BeamSearch, BeamSearchOutput, check_beam_width, one_token
from jaxpaged.entrypoints.cli.terminal import ProgressLine
from jaxpaged.entrypoints.llm_pooling import PoolingMethods
from jaxpaged.entrypoints.notebook import show_results_in_notebooks
from jaxpaged.entrypoints.pictures.block_map import BlockMap
from jaxpaged.entrypoints.pictures.engine_stats import EngineStats
from jaxpaged.entrypoints.pictures.timeline import Timeline
from jaxpaged.errors import ConflictError, EngineDeadError, RequestError
from jaxpaged.messages import RequestOutput
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

UseTqdm = bool | Callable[..., Any]
"""True for a progress bar on terminals, or a function that makes one."""


class LLM(PoolingMethods):
    """A model, ready to complete prompts.

    `model` is a folder in Hugging Face format, a hub id, or "demo", the embedded model. `options` are those of
    `EngineConfig`, by name. Raises ConfigError, CheckpointError or CapacityError.

    Use it as a context manager, or call `shutdown`, to release the devices.
    """

    def __init__(self, model: str = EMBEDDED_MODEL, **options: Any):
        show_results_in_notebooks()
        loading = ProgressLine()
        try:
            self.llm_engine = LLMEngine.from_config(EngineConfig.from_options(model=model, **options), loading.update)
        finally:
            loading.close()
        self._request_ids = map(str, itertools.count())

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> "LLM":
        """An LLM over an engine that exists already. Nobody else may step it."""
        llm = cls.__new__(cls)
        llm.llm_engine = engine
        llm._request_ids = map(str, itertools.count())
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, given as text, token ids, or dicts; results in the same order.

        `sampling_params` and `priority` are one for all, or one per prompt; without parameters the model's own
        defaults hold. Raises RequestError naming the prompt when one is at fault, before any is computed. A request
        that fails later has its `error` set; the others are complete.
        """
        batch = batch_of(prompts)
        params = per_prompt("sampling_params", sampling_params, len(batch))
        priorities = per_prompt("priority", 0 if priority is None else priority, len(batch))
        request_ids = self._add_all(batch, params, priorities)
        return self._run(request_ids, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. Messages are dicts with "role" and "content".

        `chat_template` is a template, or the name of one of the model's; `chat_template_kwargs` are further variables
        that it reads. Raises RequestError as `generate` does.
        """
        conversations = [messages] if is_conversation(messages) else list(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            with naming("conversation", index, len(conversations)):
                prompts.append(
                    self.llm_engine.input_processor.chat_prompt(
                        conversation,
                        chat_template=chat_template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        tools=tools,
                        template_variables=chat_template_kwargs,
                    )
                )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: UseTqdm = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of every prompt. Raises RequestError as `generate` does."""
        processor = self.llm_engine.input_processor
        check_beam_width(params, processor.max_logprobs)
        starts = self._beam_prompts(batch_of(prompts))
        token_ids = [start["prompt_token_ids"] for start in starts]
        search = BeamSearch(token_ids, params, processor.max_model_len, processor.eos_token_ids)
        with BatchProgress(params.max_tokens, use_tqdm, unit="step") as progress:
            while step := search.next_step():
                beams = [{**starts[number], "prompt_token_ids": tokens} for number, tokens in step]
                outputs = self.generate(beams, one_token(params), use_tqdm=False)
                search.advance(outputs)
                progress.advance(*outputs)
        return self._with_texts(search.results(), params)

    def _beam_prompts(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Prompts as token ids, checked, with what goes along with every beam."""
        starts = []
        for index, prompt in enumerate(prompts):
            with naming("prompt", index, len(prompts)):
                request, _ = self.llm_engine.input_processor.process("", prompt)
                start = {"prompt_token_ids": request.prompt_token_ids, "priority": request.priority}
                starts.append(start | ({"cache_salt": request.cache_salt} if request.cache_salt else {}))
        return starts

    def _with_texts(self, outputs: list[BeamSearchOutput], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The ending token has no text unless it is asked for."""
        decode = self.get_tokenizer().decode
        for sequence in (sequence for output in outputs for sequence in output.sequences):
            hide_end = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
            sequence.text = decode(sequence.tokens[:-1] if hide_end else sequence.tokens)
        return outputs

    def get_tokenizer(self) -> Tokenizer:
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

    def _add_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], priorities: Sequence[int]
    ) -> list[str]:
        """Queue all prompts, or none. Raises ConflictError while the engine sleeps: they would wait for ever."""
        if self.is_sleeping():
            raise ConflictError("the engine sleeps, so no prompt can be completed. Call wake_up() first.")
        request_ids: list[str] = []
        default = self.get_default_sampling_params()
        try:
            for index, (prompt, given, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
                request_id = next(self._request_ids)
                with naming("prompt", index, len(prompts)):
                    given = default if given is None else given
                    once = given if isinstance(given, PoolingParams) else final_only(given)
                    self.llm_engine.add_request(request_id, prompt, once, priority=priority)
                request_ids.append(request_id)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise
        return request_ids

    def _run_prompts(self, prompts: Any, params: Any, use_tqdm: UseTqdm) -> list[PoolingRequestOutput]:
        batch = batch_of(prompts)
        of_each = per_prompt("pooling_params", params, len(batch))
        return self._run(self._add_all(batch, of_each, [0] * len(batch)), use_tqdm)

    def _run(self, request_ids: Sequence[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step the engine until these requests are done."""
        results: dict[str, RequestOutput | None] = dict.fromkeys(request_ids)
        num_left = len(results)
        try:
            with BatchProgress(num_left, use_tqdm) as progress:
                while num_left:
                    for output in self.llm_engine.step():
                        if output.request_id in results:
                            results[output.request_id] = output
                            progress.advance(output)
                            num_left -= 1
        except BaseException:  # an interrupt too must not leave requests behind
            with contextlib.suppress(EngineDeadError):
                self.llm_engine.abort_request(request_ids)
            raise
        return list(results.values())


@contextlib.contextmanager
def naming(what: str, index: int, count: int) -> Iterator[None]:
    """Make a RequestError say which of several prompts is at fault."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{what} {index}: {error}", error.parameter) from error


def final_only(params: SamplingParams) -> SamplingParams:
    """A copy whose result comes once, at the end. Raises RequestError for what is no SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {params!r}; it must be SamplingParams.", "sampling_params")
    once = params.clone()
    once.output_kind = RequestOutputKind.FINAL_ONLY
    return once


def batch_of(prompts: Any) -> list[Prompt]:
    """Prompts as a list, of one when it is text, a dict or token ids. Raises RequestError for what is none of it."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; it must be a prompt or a list of prompts.", "prompts")
    batch = list(prompts)
    is_prompt = batch and not isinstance(batch[0], str | Mapping) and not hasattr(batch[0], "__len__")
    return [prompts] if is_prompt else batch


def is_conversation(messages: Any) -> bool:
    """Whether this is one conversation, not a sequence of them."""
    return len(messages) == 0 or isinstance(messages[0], Mapping | str)


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt. Raises RequestError when a sequence has another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts. Give one for all, or one each.", name)
    return list(value)

"""`LLM`: batches of prompts in, results out, with vLLM's signatures.

    llm = LLM(model="demo")
    llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text

This module knows nothing of how the engine works; it feeds `LLMEngine` and waits for it.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jaxpaged.config import EMBEDDED_MODEL, EngineConfig
from jaxpaged.config.vllm_options import check_arguments
from jaxpaged.engine.control import EngineControl
from jaxpaged.engine.core_calls import CoreCall, LoadPrefix, SavePrefix
from jaxpaged.engine.input.chat_template import Message
from jaxpaged.engine.input.picture_parts import has_pictures
from jaxpaged.engine.input.processor import Prompt
from jaxpaged.engine.input.prompts import ChatWithPictures, carries_pictures
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.observability.logprob_difference import LogprobDifference
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.entrypoints.batch_progress import BatchProgress
from jaxpaged.entrypoints.batches import (
    LoRARequests,
    Results,
    UseTqdm,
    batch_of,
    is_chat,
    is_conversation,
    naming,
    per_prompt,
    tokenized,
    with_output_kind,
    with_processor_kwargs,
)
from jaxpaged.entrypoints.notebook import show_results_of
from jaxpaged.entrypoints.pooled import PoolingCalls
from jaxpaged.entrypoints.scored_tokens import ScoredTokens
from jaxpaged.entrypoints.terminal import ProgressLine
from jaxpaged.errors import ConflictError, EngineDeadError, EngineError, RequestError
from jaxpaged.interrupts import accepted_interrupts, held_interrupts, holding_interrupts
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.messages import CompletionOutput, LoRARequest, RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxpaged.serving.beam_search import BeamSearch, BeamSearchOutput, add_texts, check_beam_width, one_token

if TYPE_CHECKING:
    from jaxpaged.tools.pictures.block_map import BlockMap
    from jaxpaged.tools.pictures.engine_stats import EngineStats
    from jaxpaged.tools.pictures.timeline import Timeline


class LLM(PoolingCalls, EngineControl):
    """A model, ready to complete prompts.

    `model` is a folder in Hugging Face format, a hub id, or "demo", the embedded model. `options` are those of
    `EngineConfig`, by name. Raises ConfigError, CheckpointError or CapacityError.

    Use it as a context manager, or call `shutdown`, to release the devices.
    """

    def __init__(self, model: str = EMBEDDED_MODEL, *, use_tqdm_on_load: bool = True, **options: Any):
        loading = ProgressLine()
        report = loading.update if use_tqdm_on_load else None
        try:
            self._take(LLMEngine.from_config(EngineConfig.from_options(model=model, **options), report))
        finally:
            loading.close()
        show_results_of(self.llm_engine.input_processor)

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> "LLM":
        """An LLM over an engine that exists already. Nobody else may step it."""
        llm = cls.__new__(cls)
        llm._take(engine)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """An LLM from `EngineArgs`."""
        return cls(**vars(engine_args))

    def _take(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._request_ids = map(str, itertools.count())
        self._results = Results(engine)
        self.adapters = engine.adapters
        self._enqueued: list[str] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, given as text, token ids, or dicts; results in the same order.

        `sampling_params`, `lora_request` and `priority` are one for all, or one per prompt; without parameters the
        model's own defaults hold. `tokenization_kwargs` may hold `add_special_tokens` and `truncate_prompt_tokens`. A
        dict may hold pictures as `multi_modal_data`, processed as `mm_processor_kwargs` say where it says nothing.
        Raises RequestError naming the prompt when one is at fault, before any is computed, as far as all pictures fit
        into memory. A request that fails later has its `error` set; the others are complete.
        """
        prompts = with_processor_kwargs(prompts, mm_processor_kwargs)
        with held_interrupts():
            request_ids = self._add_batch(prompts, sampling_params, lora_request, priority, tokenization_kwargs)
            return self._run(request_ids, use_tqdm)

    @holding_interrupts
    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts and return at once, with their request ids; `wait_for_completion` gives the results.

        Arguments and errors are those of `generate`; this takes so little time that no progress is shown.
        """
        del use_tqdm
        request_ids = self._add_batch(prompts, sampling_params, lora_request, priority, tokenization_kwargs)
        self._enqueued += request_ids
        return request_ids

    @holding_interrupts
    def wait_for_completion(self, output_type: type | None = None, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Complete all that was enqueued since the last call; results in that order.

        With an `output_type`, every result must be one: TypeError otherwise. Raises ConflictError while the engine
        sleeps; what was enqueued waits on.
        """
        if self.is_sleeping():
            raise ConflictError("the engine sleeps, so no prompt can be completed. Call wake_up() first.")
        request_ids, self._enqueued = self._enqueued, []
        outputs = self._run(request_ids, use_tqdm)
        for output in outputs:
            if output_type is not None and not isinstance(output, output_type):
                raise TypeError(f"a result is a {type(output).__name__}, not a {output_type.__name__}.")
        return outputs

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **chat_options: Any,
    ) -> Iterator[CompletionOutput]:
        """Complete one prompt, or answer one conversation, and give text as it comes:

            for chunk in llm.stream("Once upon a time"):
                print(chunk.text, end="", flush=True)

        A chunk is a `CompletionOutput` with what is new since the one before: `text`, `token_ids` and `logprobs`. The
        last one of a sequence has a `finish_reason`; with `n` above 1 `index` tells the sequence. A list of messages is
        a conversation, whose `chat_options` are those of `chat`. Leaving the loop aborts the request. It needs no event
        loop and minds none, so it runs in notebooks; other calls, and other streams, may run inside the loop.
        Raises RequestError at the first chunk; EngineError if the request fails while it is computed.
        """
        prompt = self.one_prompt(prompt, chat_options)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request_ids: list[str] = []
        finished = False
        try:
            with held_interrupts():
                params = with_output_kind(params, RequestOutputKind.DELTA)
                request_ids += self._add_all([prompt], [params], [priority], lora_request)
            while not finished:
                with held_interrupts(), self._results:
                    self._results.keep(self.llm_engine.step())
                output = self._results.take(request_ids[0])
                if output is None:
                    continue
                finished = output.finished
                if output.error is not None:
                    raise EngineError(output.error)
                yield from (chunk for chunk in output.outputs if chunk.token_ids or chunk.text or chunk.finish_reason)
        finally:
            with contextlib.suppress(EngineDeadError):
                self._results.leave(request_ids)

    def one_prompt(self, prompt: Any, chat_options: Mapping[str, Any]) -> Prompt:
        """A prompt, or a conversation as one. Raises RequestError for several."""
        if is_chat(prompt):
            return self._chat_prompt(prompt, **chat_options)
        if chat_options:
            raise RequestError(f"{next(iter(chat_options))} is for chats, and the prompt is none.", "prompt")
        batch = batch_of(prompt)
        if len(batch) != 1:
            raise RequestError(
                f"there are {len(batch)} prompts, and one is taken here. Make a call for each.", "prompt"
            )
        return batch[0]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. Messages are dicts with "role" and "content", a text or a list of texts,
        pictures ({"type": "image", "image": a PIL image, an array, a path, bytes or a data URL}) and videos (lists).

        `chat_template` is a template, or the name of one of the model's; `chat_template_kwargs` are further variables
        that it reads. Raises RequestError as `generate` does.
        """
        check_arguments(chat_template_content_format=chat_template_content_format)
        conversations = [messages] if is_conversation(messages) else list(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            with naming("conversation", index, len(conversations)):
                prompts.append(
                    self._chat_prompt(
                        conversation,
                        chat_template,
                        add_generation_prompt,
                        continue_final_message,
                        tools,
                        chat_template_kwargs,
                        mm_processor_kwargs,
                    )
                )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )

    def _chat_prompt(
        self,
        messages: Sequence[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt; with pictures it becomes one when its turn comes: not all may fit into memory."""
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_variables": chat_template_kwargs,
        }
        if has_pictures(messages):
            return {"chat": ChatWithPictures(messages, {**options, "mm_processor_kwargs": mm_processor_kwargs})}
        return self.llm_engine.input_processor.chat_prompt(messages, **options)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of every prompt. Raises RequestError as `generate` does."""
        check_arguments(concurrency_limit=concurrency_limit)
        processor = self.llm_engine.input_processor
        check_beam_width(params, processor.max_logprobs)
        starts = tokenized(self.llm_engine, batch_of(prompts))
        loras = per_prompt("lora_request", lora_request, len(starts))
        token_ids = [start["prompt_token_ids"] for start in starts]
        search = BeamSearch(token_ids, params, processor.max_model_len, processor.eos_token_ids)
        records = self.llm_engine.step_records
        with BatchProgress(params.max_tokens, use_tqdm, unit="step", step_records=records) as progress:
            while step := search.next_step():
                beams = [{**starts[number], "prompt_token_ids": tokens} for number, tokens in step]
                of_beams = [loras[number] for number, _ in step]
                outputs = self.generate(beams, one_token(params), use_tqdm=False, lora_request=of_beams)
                search.advance(outputs)
                progress.advance(*outputs)
        outputs = search.results()
        if processor.has_tokenizer:
            add_texts(outputs, processor.tokenizer, params)
        return outputs

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
    ) -> list[np.ndarray]:
        """The log probabilities of tokens behind prompts, at temperature 1: a float32 array for each completion.

        `completions` are token ids, one list or array for each prompt. What prompts have in common is computed once,
        where the prefix cache is on. Raises RequestError as `generate` does, UsageError for an engine whose
        `logprobs_mode` has logits, and EngineError where a completion fails while it is computed.
        """
        scored = ScoredTokens(self.llm_engine, tokenized(self.llm_engine, batch_of(prompts)), completions)
        loras = scored.of_asked(per_prompt("lora_request", lora_request, len(scored.completions)))
        return scored.read(self.generate(scored.prompts, scored.params, use_tqdm=use_tqdm, lora_request=loras))

    # ---- beginnings as files, which need the option kv_offload --------------------------------------

    def save_prefix(
        self, prompt: Prompt | Sequence[Message], path: str | os.PathLike[str], lora_request: LoRARequest | None = None
    ) -> PrefixInfo:
        """Compute a prompt, or a conversation up to where the output begins, and write its keys and values to a file.

        The file holds the full blocks of its tokens; what is left of the last block is computed again. Raises
        RequestError for a bad prompt, UsageError without `kv_offload`, or where not all of it is in the prefix cache.
        """
        chosen: Any = self.one_prompt(prompt, {})
        if carries_pictures(chosen):
            raise RequestError("the prompt has pictures, and files of beginnings hold texts only.", "prompt")
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        (output,) = self.generate([chosen], params, lora_request=lora_request, use_tqdm=False)
        if output.error is not None:
            raise EngineError(output.error)
        lora = None if lora_request is None else self.llm_engine.adapters.info_of(lora_request)
        salt = chosen.get("cache_salt") if isinstance(chosen, Mapping) else None
        assert output.prompt_token_ids is not None
        return self.call(SavePrefix(os.fspath(path), list(output.prompt_token_ids), salt, lora))

    def load_prefix(self, path: str | os.PathLike[str]) -> PrefixInfo:
        """Put a file of `save_prefix` into the tiers of `kv_offload`: prompts that begin so load it.

        Every page is checked. Raises UsageError for a file that cannot be read, or that the tiers have no room for, and
        PageError for one that is damaged, or of another model, configuration, cache type or block size.
        """
        return self.call(LoadPrefix(os.fspath(path)))

    # ---- the engine ---------------------------------------------------------------------------------

    def call[R](self, call: CoreCall[R]) -> R:
        """The result of the engine's core."""
        return self.llm_engine.call(call)

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

    def note_logprob_difference(self, difference: LogprobDifference) -> None:
        """Show how far a trainer's log probabilities are from the engine's among the metrics."""
        self.llm_engine.note_logprob_difference(difference)

    def timeline(self) -> "Timeline":
        """Where the time of the last steps went. It shows itself in notebooks, and `save(path)` draws it."""
        from jaxpaged.tools.pictures.timeline import Timeline

        return Timeline(*self.step_records(), self.executor_stats().get("token_buckets", ()))

    def blocks(self) -> "BlockMap":
        """Who holds which KV block now. It shows itself in notebooks, prints as text, and `save(path)` draws it."""
        from jaxpaged.tools.pictures.block_map import BlockMap

        return BlockMap(self.block_map(), self.llm_engine.input_processor.pictures)

    def stats(self) -> "EngineStats":
        """What the engine did so far, in a few lines for people; `get_metrics` is for programs."""
        from jaxpaged.tools.pictures.engine_stats import EngineStats

        return EngineStats(self.get_metrics(), self.executor_stats())

    def shutdown(self) -> None:
        """Release the devices."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ---- requests ------------------------------------------------------------------------------

    def _add_batch(
        self,
        prompts: Any,
        sampling_params: Any,
        lora_request: LoRARequests,
        priority: Any,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[str]:
        """Queue prompts with arguments as callers write them."""
        batch = batch_of(prompts)
        params = per_prompt("sampling_params", sampling_params, len(batch))
        priorities = per_prompt("priority", 0 if priority is None else priority, len(batch))
        default = self.get_default_sampling_params()
        once = RequestOutputKind.FINAL_ONLY
        params = [with_output_kind(default if given is None else given, once) for given in params]
        return self._add_all(batch, params, priorities, lora_request, tokenization_kwargs)

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: Sequence[int],
        lora_request: LoRARequests,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue all prompts, or none. Raises ConflictError while the engine sleeps: they would wait for ever."""
        if self.is_sleeping():
            raise ConflictError("the engine sleeps, so no prompt can be completed. Call wake_up() first.")
        request_ids: list[str] = []
        try:
            loras = per_prompt("lora_request", lora_request, len(prompts))
            for index, (prompt, given, priority, lora) in enumerate(zip(prompts, params, priorities, loras)):
                with accepted_interrupts():
                    request_id = next(self._request_ids)
                with naming("prompt", index, len(prompts)):
                    self.llm_engine.add_request(
                        request_id,
                        prompt,
                        given,
                        lora_request=lora,
                        priority=priority,
                        tokenization_kwargs=tokenization_kwargs,
                    )
                request_ids.append(request_id)
                by_delta = getattr(given, "output_kind", None) is RequestOutputKind.DELTA
                self._results.expect(request_id, by_delta)
        except BaseException:
            self._results.leave(request_ids)
            raise
        return request_ids

    def _run(self, request_ids: Sequence[str], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step the engine until these requests are done; results that came already count."""
        waited_for = set(request_ids)
        try:
            with BatchProgress(len(waited_for), use_tqdm, step_records=self.llm_engine.step_records) as progress:
                new: Sequence[RequestOutput] = self._results.finished(request_ids)
                while True:
                    for output in new:
                        if output.request_id in waited_for and output.finished:
                            waited_for.remove(output.request_id)
                            progress.advance(output)
                    if not waited_for:
                        return [self._results.take(request_id) for request_id in request_ids]
                    with held_interrupts(), self._results:
                        new = self._results.keep(self.llm_engine.step())
        except BaseException:  # an interrupt too must not leave requests behind
            with contextlib.suppress(EngineDeadError):
                self._results.leave(request_ids)
            raise

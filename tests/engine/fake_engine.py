"""A model without a device: what the tests of the front end run on.

`FakeExecutor` keeps the book that a runner keeps: what every row has computed, and what it sampled, from the
messages alone. Its model is a function from all tokens so far to log probabilities.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.engine.input.generation_config import GenerationDefaults
from jaxpaged.engine.input.grammar_checker import GrammarChecker
from jaxpaged.engine.input.pictures import PictureIntake
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.pooling.io_processor import IOProcessing
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.errors import CheckpointError, ConflictError
from jaxpaged.kv_cache_spec import AttentionSpec, EncoderCacheConfig, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import (
    LoRAInfo,
    LoRARequest,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SampledLogprobs,
    SchedulerOutput,
)
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Extra, extras_of
from tests.engine.fake_weights import FakeWeights
from tests.engine.small_tokenizer import CHAT, make_tokenizer


@dataclass
class Done:
    """A step whose result is known: a value, or an error."""

    value: ModelRunnerOutput | Exception

    def result(self) -> ModelRunnerOutput:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass
class Row:
    """What the fake device knows of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    num_sampled: int = 0
    lora_slot: int = 0

    @property
    def ended(self) -> bool:
        """Whether the device has seen it end."""
        return self.num_sampled > 0 and self.token_ids[-1] in (self.params.stop_token_ids or ())


Model = Callable[[Sequence[int]], np.ndarray]


def counting_model(vocab_size: int, base: int = 5) -> Model:
    """The next token is the last one plus 1, wrapping round to `base`; the others are less likely with distance."""

    def model(token_ids: Sequence[int]) -> np.ndarray:
        best = base + (token_ids[-1] + 1 - base) % (vocab_size - base)
        logits = -0.5 * np.abs(np.arange(vocab_size) - best).astype(np.float64)
        return logits - np.log(np.exp(logits).sum())

    return model


def scripted_model(vocab_size: int, answer: Sequence[int], num_prompt_tokens: int) -> Model:
    """Answers a prompt of `num_prompt_tokens` tokens with `answer`, whatever it says."""

    def model(token_ids: Sequence[int]) -> np.ndarray:
        place = min(len(token_ids) - num_prompt_tokens, len(answer) - 1)
        logits = np.full(vocab_size, -10.0)
        logits[answer[place]] = 0.0
        return logits - np.log(np.exp(logits).sum())

    return model


class FakeExecutor(FakeWeights):
    """Computes steps at once, and hands results out when asked."""

    def __init__(self, model: Model, vocab_size: int, num_blocks: int = 64, block_size: int = 4):
        group = KVCacheGroup(AttentionSpec(block_size, 1, 1, 2), (0,))
        self.kv_cache_config = KVCacheConfig((num_blocks,), (group,))
        self.encoder_cache_config = None
        self.model = model
        self.vocab_size = vocab_size
        self.rows: dict[str, Row] = {}
        self.executed: list[SchedulerOutput] = []
        self.fail_at: dict[int, str] = {}  # number of the executed step -> "dispatch" or "result"
        self.bad_requests: dict[str, str] = {}  # request -> why its logits are unusable
        self.recoveries = 0
        self.running = True
        self.waited = False
        self.longest_run = 32
        self.parts = {"weights", "kv_cache"}  # that are on the device
        self.discarded = False
        self.weights_version = "of these"
        self.wake_error: Exception | None = None
        self.profiling = False
        self.recorded_to: list[str | None] = []  # folders, None: that of the options
        self.programs: dict[Extra, bool | Exception] = {}  # whether they are compiled, or why they cannot be
        self.files: dict[str, int] = {}  # adapters by their paths, and what each adds to every token
        self.host: dict[int, int] = {}  # those in host memory, by number
        self.lora_slots: dict[int, int] = {0: 0}
        self.may_read = threading.Event()  # while it is not set, reading takes its time
        self.may_read.set()

    def max_step_tokens(self) -> int:
        return 1 << 30

    def max_decode_steps(self) -> int:
        return self.longest_run

    def can_run(self, extra: Extra) -> bool:
        answer = self.programs.get(extra, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def execute_model(self, scheduled: SchedulerOutput) -> Done:
        assert scheduled.total_num_scheduled_tokens == sum(scheduled.num_scheduled_tokens) > 0
        assert max(scheduled.max_sampled_tokens) in {0, scheduled.num_steps}
        assert self.parts == {"weights", "kv_cache"}, "it sleeps"
        number = len(self.executed)
        self.executed.append(scheduled)
        if self.fail_at.get(number) == "dispatch":
            raise RuntimeError("the device is on fire")
        for request_id in scheduled.removed_request_ids:
            self.rows.pop(request_id, None)
        self.lora_slots |= {slot: self.host[number] for slot, number in scheduled.lora_loads}
        for new in scheduled.new_requests:
            missing = [extra for extra in extras_of(new.sampling_params) if not self.can_run(extra)]
            assert not missing, f"a step would wait for {missing}"
            self._add(new)
        output = ModelRunnerOutput(scheduled.step_id, [], [], prompt_logprobs={})
        lines = []
        for i, request_id in enumerate(scheduled.request_ids):
            (self._compute if scheduled.num_steps == 1 else self._run)(request_id, scheduled, i, output, lines)
        output.logprobs = stacked(lines)
        if self.fail_at.get(number) == "result":
            return Done(RuntimeError("the device is on fire"))
        return Done(output)

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} has a row already"
        row = Row(list(new.token_ids), new.num_prompt_tokens, new.sampling_params, lora_slot=new.lora_slot)
        self.rows[new.request_id] = row

    def _compute(self, request_id: str, scheduled: SchedulerOutput, i: int, output: ModelRunnerOutput, lines) -> None:
        row = self.rows[request_id]
        start, count = scheduled.num_computed_tokens[i], scheduled.num_scheduled_tokens[i]
        end = start + count
        if row.ended and start >= len(row.token_ids):  # in a run before this step, so this means nothing
            self._give(output, request_id, [0])
            lines.append(([0], [0.0], 1))
            return
        assert end <= len(row.token_ids), f"{request_id}: {end} tokens scheduled, {len(row.token_ids)} known"
        if row.params.prompt_logprobs is not None and start + 1 < row.num_prompt_tokens:
            predicted = range(start + 1, min(end, row.num_prompt_tokens - 1) + 1)
            tops = [self._line(row.token_ids[:p], row.token_ids[p], row.params.prompt_logprobs) for p in predicted]
            sampled = stacked(tops)
            output.prompt_logprobs[request_id] = PromptLogprobs(
                start + 1, sampled.token_ids, sampled.logprobs, sampled.ranks
            )
        if not scheduled.max_sampled_tokens[i]:
            return
        assert end == len(row.token_ids)
        fault = self._fault(request_id)
        if fault is not None:
            output.failed[request_id] = fault
            self._draw(row, [])
            self._give(output, request_id, [])
        else:
            self._give(output, request_id, [self._draw(row, lines)])

    def _fault(self, request_id: str) -> str | None:
        """Why a request gets no token."""
        return self.bad_requests.get(request_id)

    def _run(self, request_id: str, scheduled: SchedulerOutput, i: int, output: ModelRunnerOutput, lines) -> None:
        """The tokens of a run of decode steps, up to a stop token."""
        row, run = self.rows[request_id], []
        while len(run) < scheduled.max_sampled_tokens[i] and not row.ended:
            run.append(self._draw(row, lines))
        self._give(output, request_id, run)

    def _draw(self, row: Row, lines) -> int:
        token_id = self._sample(row)
        lines.append(self._line(row.token_ids, token_id, row.params.logprobs or 0))
        row.token_ids.append(token_id)
        row.num_sampled += 1
        return token_id

    @staticmethod
    def _give(output: ModelRunnerOutput, request_id: str, token_ids: list[int]) -> None:
        output.request_ids.append(request_id)
        output.sampled_token_ids.append(token_ids)

    def _sample(self, row: Row) -> int:
        logprobs = self.model(row.token_ids)
        if row.params.temperature > 0:
            noise = np.random.default_rng([row.params.seed % 2**64, len(row.token_ids)])
            logprobs = logprobs / row.params.temperature + noise.gumbel(size=logprobs.shape)
        return int(np.argmax(logprobs)) + self.lora_slots[row.lora_slot]

    def _line(self, before: Sequence[int], token_id: int, count: int) -> tuple[list[int], list[float], int]:
        logprobs = self.model(before)
        top = np.argsort(-logprobs, kind="stable")[: len(logprobs) if count == -1 else count]
        ids = [token_id, *top.tolist()]
        return ids, [float(logprobs[t]) for t in ids], 1 + int((logprobs > logprobs[token_id]).sum())

    @property
    def workers(self):
        return self

    def read_lora(self, request: LoRARequest) -> LoRAInfo:
        assert self.may_read.wait(10)
        if request.lora_path not in self.files:
            raise CheckpointError(f"{request.lora_path} has no adapter_config.json. Give the folder of an adapter.")
        self.host[request.lora_int_id] = change = self.files[request.lora_path]
        return LoRAInfo(request.lora_name, request.lora_int_id, request.lora_path, f"adds {change}")

    def drop_lora(self, lora_int_id: int) -> None:
        del self.host[lora_int_id]

    def recover(self) -> None:
        self.lora_slots = {0: 0}
        self.rows.clear()
        self.recoveries += 1

    def sleep(self, discard: bool) -> None:
        """Like a device: whoever had a row has none afterwards."""
        self.parts -= {"weights", "kv_cache"}
        self.lora_slots = {0: 0}
        self.discarded = discard

    def wake_up(self, part: str) -> None:
        if self.wake_error is not None:
            raise self.wake_error
        self.parts.add(part)

    def start_profile(self, folder: str | None) -> None:
        if self.profiling:
            raise ConflictError("a profile is being recorded.")
        self.profiling = True
        self.recorded_to.append(folder)

    def stop_profile(self) -> None:
        if not self.profiling:
            raise ConflictError("no profile is being recorded.")
        self.profiling = False

    def stats(self) -> dict:
        return {"steps": len(self.executed), "recompiles": 0}

    def wait_for_programs(self) -> None:
        self.waited = True

    def shutdown(self) -> None:
        self.running = False


def stacked(lines: list[tuple[list[int], list[float], int]]) -> SampledLogprobs | None:
    """Lines of unequal length as arrays, padded with the last candidate."""
    if not lines:
        return None
    width = max(len(ids) for ids, _, _ in lines)
    pad = lambda values: [*values, *[values[-1]] * (width - len(values))]
    return SampledLogprobs(
        np.array([pad(ids) for ids, _, _ in lines], np.int32),
        np.array([pad(logprobs) for _, logprobs, _ in lines], np.float32),
        np.array([rank for _, _, rank in lines], np.int32),
    )


def make_config(**options) -> EngineConfig:
    """A resolved configuration, small by default. Programs run one decode step unless `num_scheduler_steps` says how
    many: with None the engine measures times, and which steps there are would depend on the machine's load."""
    small = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4}
    options = {**small, "num_scheduler_steps": 1, **options}
    facts = ModelFacts(max_position_embeddings=4096, dtype="float32", num_heads=1, vocab_size=300)
    return EngineConfig.from_options(**options).resolve(facts, "cpu")


def make_engine(
    executor: FakeExecutor | None = None,
    *,
    defaults: GenerationDefaults | None = None,
    chat: str | None = CHAT,
    grammars: Grammars | None = None,
    grammar_checker: GrammarChecker | None = None,
    pooler: Pooler | None = None,
    tokenizer: Tokenizer | None = None,
    pictures: PictureIntake | None = None,
    io_processor: IOProcessing | None = None,
    **options,
) -> tuple[LLMEngine, FakeExecutor]:
    """An engine over a fake executor, whose model counts unless another is given. With `pictures` it takes some."""
    tokenizer = tokenizer or make_tokenizer()
    executor = executor or FakeExecutor(counting_model(tokenizer.vocab_size), tokenizer.vocab_size)
    config = make_config(**options)
    processor = InputProcessor(
        tokenizer,
        vocab_size=executor.vocab_size,
        max_model_len=config.model.max_model_len,
        max_logprobs=config.model.max_logprobs,
        seed=config.model.seed,
        allow_priority=config.scheduler.scheduling_policy == "priority",
        defaults=defaults,
        chat_templates=ChatTemplates({"default": chat} if chat else {}),
        grammar_checker=grammar_checker,
        pooler=pooler,
        pictures=pictures,
        io_processor=io_processor,
    )
    if pictures is not None:
        executor.encoder_cache_config = EncoderCacheConfig(num_pages=64, page_size=16, max_step_embeds=256)
    return LLMEngine(config, processor, EngineCore(config, executor, grammars)), executor


def run_to_end(engine: LLMEngine, limit: int = 1000) -> dict[str, list]:
    """All outputs of all requests, by request id, in order."""
    outputs: dict[str, list] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"not done after {limit} steps: {engine.get_num_unfinished_requests()} requests are left")

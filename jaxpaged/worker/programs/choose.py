"""Which programs a step calls: chosen once, where steps are scheduled, so that every worker launches the same ones.

The choice is the smallest bucket that is compiled; what is compiled is asked of `Readiness`, a worker's own table, or
what several workers have reported. This module calls no program.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from jaxpaged.errors import EngineError, RequestError
from jaxpaged.messages import EncoderInput, ProgramKey, SchedulerOutput, StepPrograms
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Extra
from jaxpaged.worker.adapter_slots import NUM_PROBED
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.programs.declare import DECODE_KINDS, ENCODE_KINDS, VERIFY_KINDS, ProgramKind
from jaxpaged.worker.programs.engine_programs import SMALL_PROMPT, EnginePrograms
from jaxpaged.worker.step.encoding import batches_of, encoded_together

DECODES_THAT_PAY = 128
"""Steps of one bucket in which all only decode, before a multi-step program is wanted for them where compiling takes
the cores that compute: what it saves, a few hundredths of a step to a third, pays for it only where there are many."""
MULTI_STEP_SAVES_SECONDS = 0.0005
"""What a step of one program is faster than one of two: 0.6 ms in bfloat16 and 1.5 in 4 bits for one request of a 110M
Llama, and less for several, while the program costs twice what others do."""


class Readiness(Protocol):
    """What is known of the compiled programs; `CompiledPrograms` is one."""

    def is_ready(self, key: ProgramKey) -> bool:
        """Whether a program can be called without waiting. One that is kept on demand is wanted from now on. Raises
        KeyError when there is no such program."""
        ...

    def has(self, key: ProgramKey) -> bool:
        """Whether a program can be called without waiting. It is not wanted for that it is asked for."""
        ...

    def prepare(self, key: ProgramKey) -> bool:
        """The same for a program that somebody waits for. Raises what its compilation raised."""
        ...

    def smallest_ready(self, kind: str, size: int, buckets: Sequence[int]) -> int:
        """The bucket to use for `size`: the smallest that is compiled, or will be soonest."""
        ...

    def largest_usable(self, kind: str, buckets: Sequence[int]) -> int:
        """The largest bucket that is compiled, or will be soonest."""
        ...

    def miss(self, key: ProgramKey, num_tokens: int) -> None:
        """So many tokens took a step of their own for want of a program."""
        ...

    def miss_seconds(self, key: ProgramKey, seconds: float) -> None:
        """A step took so much longer for want of a program."""
        ...


class StepSizes(NamedTuple):
    """The buckets of an engine's programs, sorted. `multi_steps`: how many steps a multi-step program takes
    at most.

    `output` is the kind of the output stage's program in an ordinary step. `needs_full` says whether a request needs
    the full sampler; it raises RequestError when the request will be refused. `verify`: what ends one with drafts, by
    what would end it without; empty where nothing is drafted. `small_prompt`: for want of a program prompts are cut
    into pieces of so many tokens at least, since each reads all weights. `decodes_that_pay`: after so many steps in
    which all decode a multi-step program is wanted.
    """

    output: ProgramKind  # SAMPLE or POOL
    tokens: Sequence[int]
    samples: Sequence[int]
    multi_steps: Mapping[ProgramKey, int]
    needs_full: Callable[[SamplingParams], bool]
    verify: Mapping[ProgramKind, ProgramKind] = MappingProxyType({})
    small_prompt: int = 1
    decodes_that_pay: int = DECODES_THAT_PAY
    encoder: EncoderSpec | None = None


def sizes_of(programs: EnginePrograms, keys: Iterable[ProgramKey]) -> StepSizes:
    """What there is to choose from, of programs with these keys."""
    engine_spec, layouts = programs.engine_spec, programs.multi_step_layouts
    return StepSizes(
        output=ProgramKind.POOL if engine_spec.pools else ProgramKind.SAMPLE,
        tokens=engine_spec.token_buckets,
        samples=engine_spec.sample_buckets,
        multi_steps={key: layouts[key.size].max_steps for key in keys if key.kind in DECODE_KINDS},
        needs_full=engine_spec.needs_full,
        verify=VERIFY_KINDS if engine_spec.num_drafts else {},
        small_prompt=SMALL_PROMPT,
        decodes_that_pay=DECODES_THAT_PAY if engine_spec.platform == "cpu" else 1,
        encoder=engine_spec.encoder,
    )


class ProgramChoice:
    """Follows which requests have a row, and what they need."""

    def __init__(self, programs: Readiness, sizes: StepSizes):
        self._programs, self._sizes = programs, sizes
        self._multi_step_buckets = sorted({key.size for key in sizes.multi_steps})
        self._most_tokens, self._has_largest = sizes.tokens[-1], False
        self._smallest_keys: dict[tuple[str, int], ProgramKey] = {}  # by kind and size, of those that are compiled
        self._num_decodes: Counter[ProgramKey] = Counter()  # steps in which all only decoded
        self.forget_requests()

    def forget_requests(self) -> None:
        """Nobody has a row."""
        self._live: defaultdict[int, set[str]] = defaultdict(set)  # by attention rank
        self._full: set[str] = set()  # of them, those that need the full sampler
        self._ending_in_picture: set[str] = set()  # whose first token follows an embedding, which no decode step takes

    def choose(self, scheduled: SchedulerOutput) -> StepPrograms:
        """The programs of the next step; none for a step without requests."""
        parts = scheduled.ranks or (scheduled,)
        for rank, part in enumerate(parts):
            self._live[rank].difference_update(part.removed_request_ids)
            self._live[rank].update([request.request_id for request in part.new_requests])
        self._full.difference_update(scheduled.removed_request_ids)
        self._ending_in_picture.difference_update(scheduled.removed_request_ids)
        for request in scheduled.new_requests:
            if request.mm_features and sum(request.mm_features[-1].runs[-1]) == request.num_prompt_tokens:
                self._ending_in_picture.add(request.request_id)
            if self._needs_full(request.sampling_params):
                self._full.add(request.request_id)
        if not scheduled.request_ids:
            return StepPrograms()
        programs = self._choose_for_tokens(scheduled, parts)
        if scheduled.encoder_inputs:
            programs = programs._replace(encode=self._encode(scheduled.encoder_inputs))
        if scheduled.lora_loads:
            programs = programs._replace(adapters=self._adapters())
        return programs

    def _choose_for_tokens(self, scheduled: SchedulerOutput, parts: Sequence[SchedulerOutput]) -> StepPrograms:
        num_sampling = max([len(part.max_sampled_tokens) - part.max_sampled_tokens.count(0) for part in parts])
        multi_step = self._multi_step(scheduled, num_sampling)
        if multi_step is not None:
            return StepPrograms(multi_step=multi_step)
        num_tokens = max([part.total_num_scheduled_tokens for part in parts])
        largest = self._sizes.tokens[-1]
        if num_tokens == self._most_tokens < largest:
            self._programs.miss(ProgramKey(ProgramKind.FORWARD, largest), num_tokens)
        forward = self._smallest(ProgramKind.FORWARD, num_tokens, self._sizes.tokens)
        if not num_sampling:
            return StepPrograms(forward=forward)
        output = self._output(scheduled, num_sampling)
        if self._sizes.verify and max(scheduled.max_sampled_tokens) > 1:
            return StepPrograms(self._smallest(ProgramKind.DRAFT, num_sampling, self._sizes.samples), forward, output)
        return StepPrograms(forward=forward, finish=output)

    def _adapters(self) -> tuple[ProgramKey, ...]:
        """What moves adapters into slots, and what probes them."""
        num_probed = min(NUM_PROBED, self._sizes.tokens[-1])
        probe = self._smallest(ProgramKind.FORWARD, num_probed, self._sizes.tokens)
        return ProgramKey(ProgramKind.LOAD_LORA), probe

    def _encode(self, inputs: Sequence[EncoderInput]) -> tuple[ProgramKey, ...]:
        """The programs of batches of pictures, and of moments of videos."""
        needed = [each for each in inputs if not each.feature.is_encoded]
        parts = encoded_together(needed)
        return tuple(key for modality, part in parts for key in self._encode_by(ENCODE_KINDS[modality], part))

    def _encode_by(self, kind: ProgramKind, inputs: Sequence[EncoderInput]) -> list[ProgramKey]:
        """Programs of one kind."""
        encoder = self._sizes.encoder
        assert encoder is not None, "an engine that encodes pictures sees"
        keys: list[ProgramKey] = []

        def bucket_for(size: int) -> int:
            if encoder.config.is_fixed:  # what is left over fills a smaller one
                size = max([each for each in encoder.sizes if each <= size], default=encoder.sizes[0])
            if encoder.one_each:
                keys.append(ProgramKey(kind, encoder.sizes[bisect_left(encoder.sizes, size)]))
            else:
                keys.append(self._smallest(kind, size, encoder.sizes))
            return keys[-1].size

        batches_of([encoder.config.size_of(each.feature.grid) for each in inputs], encoder, bucket_for)
        return keys

    def max_step_tokens(self) -> int:
        """See `Executor`."""
        if not self._has_largest:
            largest = self._sizes.tokens[-1]
            usable = self._programs.largest_usable(ProgramKind.FORWARD, self._sizes.tokens)
            self._most_tokens = max(usable, min(self._sizes.small_prompt, largest))
            self._has_largest = usable == largest and self._programs.has(ProgramKey(ProgramKind.FORWARD, largest))
        return self._most_tokens

    def max_decode_steps(self) -> int:
        """See `Executor`."""
        if self._ending_in_picture:
            return 1
        most = max(map(len, self._live.values()), default=0)
        bucket = next((size for size in self._multi_step_buckets if size >= most), 0)
        key = ProgramKey(ProgramKind.DECODE_FULL if self._full else ProgramKind.DECODE, bucket)
        return self._sizes.multi_steps[key] if key in self._sizes.multi_steps and self._is_multi_step_ready(key) else 1

    def can_run(self, extra: Extra) -> bool:
        """See `Executor`. Programs for any number of requests are compiled next; narrower ones are, once a step could
        use them."""
        try:
            ready = [self._programs.prepare(key) for key in self._programs_of(extra)]  # each of them hurries
            return all(ready)
        except Exception as error:
            raise EngineError(f"{extra.value} could not be compiled; the engine's log says why.") from error

    def _programs_of(self, extra: Extra) -> tuple[ProgramKey, ...]:
        """What steps with `extra` call, whatever their size."""
        if extra is Extra.MASKS:
            return self._widest(ProgramKind.SAMPLE_MASKED)
        if extra is Extra.PROMPT_LOGPROBS:
            return (ProgramKey(ProgramKind.PROMPT_LOGPROBS),)
        if extra in (Extra.PICTURES, Extra.VIDEOS):
            kind = ENCODE_KINDS["image" if extra is Extra.PICTURES else "video"]
            sizes = () if self._sizes.encoder is None else self._sizes.encoder.sizes
            return tuple(ProgramKey(kind, size) for size in sizes)
        return (
            ProgramKey(ProgramKind.LOAD_ROW),
            ProgramKey(ProgramKind.LOAD_TOKENS),
            *self._widest(ProgramKind.SAMPLE_FULL),
        )

    def _widest(self, kind: str) -> tuple[ProgramKey, ...]:
        """The programs of a kind of sampler for any number of requests, with drafts and without."""
        kinds = (kind, self._sizes.verify[kind]) if self._sizes.verify else (kind,)
        return tuple(ProgramKey(each, self._sizes.samples[-1]) for each in kinds)

    def _needs_full(self, params: SamplingParams) -> bool:
        try:
            return self._sizes.needs_full(params)
        except RequestError:
            return False  # the worker refuses it, and then it is a plain one

    def _multi_step(self, scheduled: SchedulerOutput, num_sampling: int) -> ProgramKey | None:
        """The program of a multi-step decode. A single step in which all decode takes it too, as soon as it is there:
        nothing in it is for prompts, and it is one program in place of two. None where only those two will do.

        With the full sampler such a program brings back log probabilities for as many steps as it could have: only
        where that is one it serves single steps.
        """
        is_full = self._full and not self._full.isdisjoint(scheduled.request_ids)
        kind = ProgramKind.DECODE_FULL if is_full else ProgramKind.DECODE
        if scheduled.num_steps > 1:
            return self._smallest(kind, num_sampling, self._multi_step_buckets)
        one_each = scheduled.total_num_scheduled_tokens == len(scheduled.request_ids)
        if not (one_each and all(scheduled.max_sampled_tokens)) or scheduled.masked:
            return None
        if self._ending_in_picture and not self._ending_in_picture.isdisjoint(scheduled.request_ids):
            return None
        place = bisect_left(self._multi_step_buckets, num_sampling)
        if place == len(self._multi_step_buckets):
            return None
        key = ProgramKey(kind, self._multi_step_buckets[place])
        most_steps = self._sizes.multi_steps.get(key, 0)
        if not most_steps or (kind != ProgramKind.DECODE and most_steps > 1):
            return None
        self._num_decodes[key] += 1
        if self._num_decodes[key] < self._sizes.decodes_that_pay:
            return None
        if self._is_multi_step_ready(key):
            return key
        self._programs.miss_seconds(key, MULTI_STEP_SAVES_SECONDS)
        return None

    def _is_multi_step_ready(self, key: ProgramKey) -> bool:
        """From now on the program is wanted, and so is that for a single request: where it pays for some, it pays
        most for one, whose steps are the shortest."""
        self._programs.is_ready(ProgramKey(key.kind, self._multi_step_buckets[0]))
        return self._programs.is_ready(key)

    def _output(self, scheduled: SchedulerOutput, num_sampling: int) -> ProgramKey:
        kind, buckets = self._sizes.output, self._sizes.samples
        if scheduled.masked:
            kind = ProgramKind.SAMPLE_MASKED
        elif self._full and any(
            most and request_id in self._full
            for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens)
        ):
            kind = ProgramKind.SAMPLE_FULL
        ordinary = self._sizes.output
        if self._sizes.verify and max(scheduled.max_sampled_tokens) > 1:
            kind, ordinary = self._sizes.verify[kind], self._sizes.verify[ordinary]
        if kind != ordinary:  # one of this size is wanted from now on
            self._programs.is_ready(ProgramKey(kind, next(size for size in buckets if size >= num_sampling)))
        return self._smallest(kind, num_sampling, buckets)

    def _smallest(self, kind: str, size: int, buckets: Sequence[int]) -> ProgramKey:
        """The program for `size`: that of the smallest bucket, or another one until it is compiled."""
        key = self._smallest_keys.get((kind, size))
        if key is None:
            key = ProgramKey(kind, self._programs.smallest_ready(kind, size, buckets))
            if key.size == buckets[bisect_left(buckets, size)] and self._programs.has(key):
                self._smallest_keys[kind, size] = key
        return key

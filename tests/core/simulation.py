"""A runner without a model: it keeps what every KV slot holds, and checks what every query reads.

A token that an embedding of a picture replaces counts as its key and number there (`seen`), and the runner keeps what
every slot of the encoder cache holds, too. An adapter changes what the first token counts as, and so everything.

A slot holds (KV group, hash of all tokens up to and including its own): what keys and values depend on, and recurrent
states, of which a block has one slot. The next token is a hash of all tokens before it, so a token in the wrong place
changes everything after it. So do the weights that computed each token, which may change (`Engine.change_weights`).
Whatever the prefix cache has must be what a computation token by token, with the weights of now, would have left there.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, repeat

import msgspec
import numpy as np

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.lora.book import AdapterBook
from jaxpaged.core.request import Request
from jaxpaged.core.request_queue import AGES
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import (
    AttentionSpec,
    CacheSpec,
    EncoderCacheConfig,
    KVCacheConfig,
    KVCacheGroup,
    LatentSpec,
    StateArray,
    StateSpec,
    pool_layouts,
)
from jaxpaged.kv_connector.base import KVConnection
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    LoRAInfo,
    LoRARequest,
    ModelRunnerOutput,
    MultiModalFeature,
    SchedulerOutput,
)
from jaxpaged.sampling_params import SamplingParams

BLOCK_SIZE = 4
VOCAB_SIZE = 30
EOS = 1
STOP = 2
GARBAGE = -1
"""What a row writes where it computes more tokens than it gets, in place of a hash."""


def latents(block_size: int) -> LatentSpec:
    return LatentSpec(block_size, width=5, dtype_bytes=4)


def states(block_size: int) -> StateSpec:
    return StateSpec(block_size, (StateArray((2, 3), "float32"),), num_drafts=4)


Kind = int | None | CacheSpec
"""What a KV group caches: keys and values of the tokens in a window, or of all; or as it is said."""


def groups_of(kinds: tuple[Kind, ...]) -> tuple[KVCacheGroup, ...]:
    """A group for each, of one layer."""
    attention = lambda window: AttentionSpec(BLOCK_SIZE, 1, 8, 4, window)
    specs = [attention(kind) if kind is None or isinstance(kind, int) else kind for kind in kinds]
    return tuple(KVCacheGroup(spec, (g,)) for g, spec in enumerate(specs))


def needs_of(kinds: tuple[Kind, ...], num_tokens: int, max_step_tokens: int) -> list[int]:
    """Blocks that a request of `num_tokens` needs, of each pool, or a snapshot."""
    return [layout.max_blocks(num_tokens, max_step_tokens) or 1 for layout in pool_layouts(groups_of(kinds))]


def extend_hash(state: int, token_id: int, weights: int = 0) -> int:
    state = zlib.crc32(token_id.to_bytes(4, "big"), state)
    return zlib.crc32(weights.to_bytes(4, "big"), state) if weights else state


def prefix_hashes(token_ids: list[int], weights: Iterable[int] = repeat(0)) -> list[int]:
    """For every token the hash of everything up to it. `weights`: those that compute each token, at least."""
    hashes, state = [], 0
    for token_id, version in zip(token_ids, weights):
        state = extend_hash(state, token_id, version)
        hashes.append(state)
    return hashes


def next_token(token_ids: list[int], weights: Iterable[int] = repeat(0)) -> int:
    """What the model of this file says after `token_ids`."""
    return prefix_hashes(token_ids, weights)[-1] % VOCAB_SIZE


def seen(token_ids: list[int], features: Sequence[MultiModalFeature], digest: str = "") -> list[int]:
    """What the model sees in place of the tokens: of embeddings their numbers. `digest`: of the adapter's weights."""
    tokens = list(token_ids)
    if digest:
        tokens[0] = zlib.crc32(digest.encode(), tokens[0])
    for feature in features:
        places = [place for start, length in feature.runs for place in range(start, start + length)]
        for i, place in enumerate(places):
            tokens[place] = embedding(feature.key, i)
    return tokens


def embedding(key: bytes, i: int) -> int:
    return zlib.crc32(i.to_bytes(4, "big"), zlib.crc32(key))


def expected_output(
    request: EngineCoreRequest, max_model_len: int, weights: int = 0, drawn: Sequence[int] | None = None
) -> tuple[list[int], str, int | None]:
    """(output tokens, finish reason, stop reason), one token after another. `drawn`: the tokens, None: those that these
    weights draw."""
    digest = request.lora.digest if request.lora else ""
    params, tokens = request.sampling_params, seen(request.prompt_token_ids, request.mm_features, digest)
    output: list[int] = []
    while True:
        token = next_token(tokens, repeat(weights)) if drawn is None else drawn[len(output)]
        tokens.append(token)
        output.append(token)
        if token == request.eos_token_id and not params.ignore_eos:
            return output, "stop", None
        if token in (params.stop_token_ids or ()):
            return output, "stop", token
        if len(output) >= params.max_tokens or len(tokens) >= max_model_len:
            return output, "length", None


@dataclass
class Row:
    """What the runner knows of a request: its tokens, the sampled ones included, how many are computed, its tables, and
    the recurrent state after the computed tokens. It begins with what a snapshot holds, or at 0.

    A stop token ends a row within a run, and at the beginning of one. A single step knows nothing of it, nor does the
    scheduler: it computes the stop token, and goes on.
    """

    token_ids: list[int]
    tables: tuple[list[int], ...]
    stop_ids: frozenset[int]
    num_computed: int
    num_uploaded: int
    num_sampled: int = 0
    state: int = 0
    begins: int = 0
    features: Sequence[MultiModalFeature] = ()
    pages: dict[int, list[int]] = field(default_factory=dict)  # of the encoder cache, by the index of the feature
    lora_slot: int = 0
    digest: str = ""  # of what was in its slot when it began
    weights: list[int] = field(default_factory=list)  # that have computed its tokens
    goes_on: bool = True  # else other weights compute from now on, and it must begin anew

    @property
    def ended(self) -> bool:
        """Whether a run finds that it has ended."""
        return self.num_sampled > 0 and self.token_ids[-1] in self.stop_ids


class SimulatedRunner:
    """Executes steps in the order in which they come, as a device does, beginning where each row is.

    With `stingy` a run may give a row fewer tokens than it might, as one does that rejects what was drafted; the row
    has written keys for the others.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroup, ...],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stingy: random.Random | None = None,
        encoder: EncoderCacheConfig | None = None,
        files: "AdapterFiles | None" = None,
    ):
        self.stingy = stingy
        self.files = files
        self.lora_slots: dict[int, str] = {0: ""}  # digests of what they hold
        self.encoder = encoder
        self.encoded: dict[int, int] = {}  # slot of the encoder cache -> embedding
        self.num_encoded = 0
        self.weights = 0  # the number of those that compute
        self.drawn: dict[str, list[int]] = {}  # by request, all tokens since it came
        self.specs = [group.spec for group in groups]
        self.pool_of = {g: p for p, layout in enumerate(pool_layouts(groups)) for g in layout.group_idxs}
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows: dict[str, Row] = {}
        self.hears_removals_again = False  # after a failed step, of which the scheduler cannot know what was heard
        self.memory: dict[tuple[int, int, int], tuple[int, int]] = {}  # (pool, block, slot) -> (group, hash)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        assert sum(scheduled.num_scheduled_tokens) == scheduled.total_num_scheduled_tokens
        assert scheduled.total_num_scheduled_tokens <= self.max_num_batched_tokens * scheduled.num_steps
        if not scheduled.total_num_scheduled_tokens:
            assert not scheduled.removed_request_ids, "what the runner must know came with a step that may be skipped"
            return ModelRunnerOutput(scheduled.step_id, [], [])
        self._encode(scheduled)
        self._update_rows(scheduled)
        if scheduled.num_steps > 1:
            return self._run(scheduled)
        names, ones = scheduled.request_ids, [min(most, 1) for most in scheduled.max_sampled_tokens]
        accepted = self._accept_drafts(scheduled)
        drawn = self._step(names, self._places(scheduled, accepted), ones)
        self._write_rejected(scheduled, accepted)
        sampling = [name for name, most in zip(names, ones) if most]
        given = [[*accepted.get(name, ()), token] for name, token in zip(sampling, drawn)]
        num_drafts = [most - 1 for most in scheduled.max_sampled_tokens if most] if accepted else None
        return ModelRunnerOutput(scheduled.step_id, sampling, given, num_drafts=num_drafts)

    def _encode(self, scheduled: SchedulerOutput) -> None:
        """All that the step encodes, before anything else."""
        if not scheduled.encoder_inputs:
            return
        assert self.encoder is not None
        size, written = self.encoder.page_size, set[int]()
        for each in scheduled.encoder_inputs:
            assert each.feature.pixels is not None
            assert len(each.page_ids) == -(-each.feature.num_embeds // size)
            assert not written.intersection(each.page_ids), "two pictures of a step have one page"
            written.update(each.page_ids)
            for i in range(each.feature.num_embeds):
                self.encoded[each.page_ids[i // size] * size + i % size] = embedding(each.feature.key, i)
        num_embeds = sum(each.feature.num_embeds for each in scheduled.encoder_inputs)
        assert num_embeds <= self.encoder.max_step_embeds
        assert len({each.feature.key for each in scheduled.encoder_inputs}) == len(scheduled.encoder_inputs)
        self.num_encoded += len(scheduled.encoder_inputs)

    def _check_embeddings(self, row: Row, name: str, place: range) -> None:
        """What embeddings replace is there in the encoder cache; a run is not cut, if it must not be."""
        assert self.encoder is not None
        size, whole = self.encoder.page_size, self.encoder.whole_spans
        for index, feature in enumerate(row.features):
            places = [each for start, length in feature.runs for each in range(start, start + length)]
            for i, each in enumerate(places):
                if each in place:
                    slot = row.pages[index][i // size] * size + i % size
                    assert self.encoded.get(slot) == row.token_ids[each], (
                        f"{name}: embedding {i} of {index} is not there"
                    )
            if whole:
                assert not any(start < place.stop < start + length for start, length in feature.runs), f"{name}: cut"

    def _accept_drafts(self, scheduled: SchedulerOutput) -> dict[str, list[int]]:
        """Take some of the drafts of requests that have any for what single steps would draw."""
        accepted: dict[str, list[int]] = {}
        for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens):
            if most > 1:
                accepted[request_id] = []
                for _ in range(self.stingy.randint(0, most - 1)):
                    accepted[request_id].append(self._draw(request_id))
        return accepted

    def _draw(self, name: str) -> int:
        """The next token of a row, with the weights of now."""
        row = self.rows[name]
        row.token_ids.append(self._hashes(row)[-1] % VOCAB_SIZE)
        row.num_sampled += 1
        self.drawn.setdefault(name, []).append(row.token_ids[-1])
        return row.token_ids[-1]

    def _hashes(self, row: Row) -> list[int]:
        """For every token the hash of everything up to it: of the next ones as they are computed now."""
        assert row.goes_on, "tokens would be drawn over old keys and values"
        return prefix_hashes(row.token_ids, chain(row.weights, repeat(self.weights)))

    def _write_rejected(self, scheduled: SchedulerOutput, accepted: dict[str, list[int]]) -> None:
        """The keys of the other drafts are written, too."""
        for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens):
            if request_id in accepted:
                first = self.rows[request_id].num_computed
                for group, _, slot in self._slots(
                    request_id, range(first, first + most - 1 - len(accepted[request_id]))
                ):
                    self.memory[slot] = group, GARBAGE

    def _places(self, scheduled: SchedulerOutput, accepted: dict[str, list[int]]) -> list[range]:
        """The positions that each request of a single step computes: those of uploaded tokens as they are told, and of
        drafts those that are accepted."""
        places = []
        for request_id, computed, n in zip(
            scheduled.request_ids, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
        ):
            row = self.rows[request_id]
            if request_id in accepted:
                n = 1 + len(accepted[request_id])
            if computed < row.num_uploaded:
                assert computed == row.num_computed, f"{request_id}: uploaded tokens are left out"
            assert row.num_computed <= computed, f"{request_id}: more is computed than the scheduler thinks possible"
            places.append(range(row.num_computed, row.num_computed + n))
        return places

    def _step(self, names: list[str], places: list[range], samples: list[int]) -> list[int]:
        """Compute these positions; returns the tokens of those that sample."""
        for read_before_write in (True, False):  # kernels promise no order between the requests of a step
            for name, place in zip(names, places):
                self._check_reads(name, place.start)
            if read_before_write:
                self._write(names, places)
        return [self._sample(name) for name, most in zip(names, samples) if most]

    def _update_rows(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.removed_request_ids:
            assert request_id in self.rows or self.hears_removals_again
            self.rows.pop(request_id, None)
        for slot, number in scheduled.lora_loads:
            assert all(row.lora_slot != slot for row in self.rows.values()), "a row reads it"
            self.lora_slots[slot] = self.files.host[number]
        for new in scheduled.new_requests:
            assert new.request_id not in self.rows
            stop_ids, digest = frozenset(new.sampling_params.stop_token_ids), self.lora_slots[new.lora_slot]
            tables, tokens = tuple(map(list, new.block_ids)), seen(new.token_ids, new.mm_features, digest)
            assert all(feature.pixels is None for feature in new.mm_features)
            row = Row(tokens, tables, stop_ids, new.num_computed_tokens, len(tokens), begins=new.num_computed_tokens)
            row.features, row.lora_slot, row.digest = new.mm_features, new.lora_slot, digest
            row.weights = [self.weights] * new.num_computed_tokens
            self.rows[new.request_id] = row
        assert len(self.rows) <= self.max_num_seqs
        assert all(self.lora_slots[row.lora_slot] == row.digest for row in self.rows.values())
        for request_id, new_block_ids in zip(scheduled.request_ids, scheduled.new_block_ids):
            for table, block_ids in zip(self.rows[request_id].tables, new_block_ids or ()):
                table.extend(block_ids)
        for request_id, index, page_ids in scheduled.encoder_pages:
            assert index not in self.rows[request_id].pages, "pages are told twice"
            self.rows[request_id].pages[index] = page_ids

    def _check_reads(self, request_id: str, computed: int) -> None:
        """All that the first query of a request sees before itself must be there."""
        row = self.rows[request_id]
        hashes = self._hashes(row)
        for group, (spec, table) in enumerate(zip(self.specs, row.tables)):
            window = getattr(spec, "window", None)
            positions = range(0 if window is None else max(computed - window + 1, 0), computed)
            if getattr(spec, "chunk", None):
                positions = range(computed - computed % spec.chunk, computed)
            if isinstance(spec, StateSpec):
                positions = positions[-1:] if computed == row.begins else range(0)
                assert computed % spec.block_size == 0 or not positions, f"{request_id} begins behind no snapshot"
            for position in positions:
                place = self._place(group, table, position)
                assert self.memory.get(place) == (group, hashes[position]), (request_id, group, position, place)
        if computed == row.num_computed:
            row.state = hashes[computed - 1] if 0 < computed == row.begins else row.state
            assert row.state == (hashes[computed - 1] if computed else 0), f"{request_id}: its state is of other tokens"

    def _place(self, group: int, table: list[int], position: int) -> tuple[int, int, int]:
        spec = self.specs[group]
        slot = 0 if isinstance(spec, StateSpec) else position % spec.block_size
        return self.pool_of[group], table[position // spec.block_size], slot

    def _write(self, names: list[str], places: list[range]) -> None:
        written: set[tuple[int, int]] = set()
        for name, place in zip(names, places):
            row = self.rows[name]
            assert place.stop <= len(row.token_ids), f"{name}: tokens scheduled that nobody has sampled"
            hashes = self._hashes(row)
            if row.features:
                self._check_embeddings(row, name, place)
            for group, position, slot in self._slots(name, place):
                assert slot not in written, f"{name}: {slot} is written twice in a step"
                written.add(slot)
                self.memory[slot] = group, hashes[position]
            for token_id in row.token_ids[place.start : place.stop]:
                row.state = extend_hash(row.state, token_id, self.weights)
            row.num_computed = place.stop
            row.weights = [*row.weights[: place.start], *repeat(self.weights, len(place))]

    def _slots(self, name: str, place: range) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
        """(KV group, position, slot) of all that is written there: states at the end of a block, if they are wanted."""
        for group, table in enumerate(self.rows[name].tables):
            is_state, size = isinstance(self.specs[group], StateSpec), self.specs[group].block_size
            for position in place:
                slot = self._place(group, table, position)
                assert slot[1] != 0 or is_state, "the null block is written"
                if not is_state or (slot[1] and (position + 1) % size == 0):
                    yield group, position, slot

    def _sample(self, name: str) -> int:
        row = self.rows[name]
        assert row.num_computed == len(row.token_ids), f"{name} samples before all is computed"
        return self._draw(name)

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """A run of decode steps: single ones, in which a request has no part any more once a stop token is its last.

        The runner knows the stop tokens only, so an end-of-sequence token that is none of them does not end a run.
        """
        assert not scheduled.new_requests and scheduled.max_sampled_tokens == scheduled.num_scheduled_tokens
        assert max(scheduled.max_sampled_tokens) == scheduled.num_steps
        runs: dict[str, list[int]] = {request_id: [] for request_id in scheduled.request_ids}
        limits = {}
        for request_id, computed, most in zip(runs, scheduled.num_computed_tokens, scheduled.max_sampled_tokens):
            assert self.rows[request_id].num_computed <= computed
            limits[request_id] = most if self.stingy is None else self.stingy.randint(1, most)
        for i in range(scheduled.num_steps):
            names = [name for name, limit in limits.items() if i < limit and not self.rows[name].ended]
            places = [range(self.rows[name].num_computed, self.rows[name].num_computed + 1) for name in names]
            for name, token in zip(names, self._step(names, places, [1] * len(names))):
                runs[name].append(token)
        for (name, run), most in zip(runs.items(), scheduled.max_sampled_tokens):
            first = self.rows[name].num_computed
            for group, _, slot in self._slots(name, range(first, first + most - len(run))):
                self.memory[slot] = group, GARBAGE
        return ModelRunnerOutput(scheduled.step_id, list(runs), list(runs.values()))


class AdapterFiles:
    """Adapters in files, by their paths, and in host memory, by the workers' numbers: their digests. With `late` a read
    ends when `end_read` is called."""

    def __init__(self, late: bool = False):
        self.files: dict[str, str] = {}
        self.host: dict[int, str] = {}
        self.late = late
        self.reading: deque[tuple[LoRARequest, Future[LoRAInfo]]] = deque()
        self.num_reads = 0

    def read(self, request: LoRARequest) -> Future[LoRAInfo]:
        self.reading.append((request, Future()))
        self.num_reads += 1
        future = self.reading[-1][1]
        if not self.late:
            self.end_read()
        return future

    def end_read(self) -> None:
        request, future = self.reading.popleft()
        try:
            info = self.take(request)
        except CheckpointError as error:
            future.set_exception(error)
        else:
            future.set_result(info)

    def take(self, request: LoRARequest) -> LoRAInfo:
        if request.lora_path not in self.files:
            raise CheckpointError(f"{request.lora_path} has no adapter.")
        digest = self.files[request.lora_path]
        assert request.lora_int_id not in self.host, "it is there"
        self.host[request.lora_int_id] = digest
        return LoRAInfo(request.lora_name, request.lora_int_id, request.lora_path, digest)

    def drop(self, number: int) -> None:
        del self.host[number]


class ForcedLengths:
    """As many drafts as a test wants, in place of what measurements suggest; counts them."""

    most_in_step = 1000

    def __init__(self, choose: Callable[[], int]):
        self.choose, self.num_drafts, self.num_accepted = choose, 0, 0

    def begin(self, request: Request) -> None:
        pass

    def note(self, step_id: int) -> None:
        pass

    def observe(self, requests: dict[str, Request], scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if output.num_drafts is not None:
            self.num_drafts += sum(output.num_drafts)
            self.num_accepted += sum(len(tokens) - 1 for tokens in output.sampled_token_ids if tokens)
        for request in requests.values():
            request.num_drafts, request.decode_limit = self.choose(), 0


def any_length(most: int) -> ForcedLengths:
    chance = random.Random(most)
    return ForcedLengths(lambda: chance.choice([0, most, chance.randint(0, most)]))


class Engine:
    """Scheduler and simulated runner with up to `depth` steps in flight, and a record of what clients got."""

    def __init__(
        self,
        *,
        num_blocks: int | tuple[int, ...] = 40,
        windows: tuple[Kind, ...] = (None,),
        max_num_batched_tokens: int = 16,
        max_num_seqs: int = 4,
        max_model_len: int = 48,
        enable_prefix_caching: bool = True,
        enable_kv_cache_events: bool = False,
        depth: int = 1,
        max_steps: int = 1,
        stingy: random.Random | None = None,
        most_drafts: int = 0,
        num_stages: int = 1,
        num_ranks: int = 1,
        connection: KVConnection | None = None,
        encoder: EncoderCacheConfig | None = None,
        max_loras: int = 0,
        max_cpu_loras: int = 0,
        **scheduler_options,
    ):
        """`most_drafts`: how many tokens a request may draft; how many it does is left to chance. `max_loras`: slots
        for adapters, 0: there are none."""
        if most_drafts and stingy is None:
            stingy = random.Random(most_drafts)
        groups = groups_of(windows)
        blocks = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(pool_layouts(groups))
        config = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, **scheduler_options
        )
        self.files, self.adapters = AdapterFiles(), None
        if max_loras:
            age = AGES[config.scheduling_policy]
            most = max_cpu_loras or max_loras
            self.adapters = AdapterBook(max_loras, most, age, lambda request: self.files.read(request), self.files.drop)
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(blocks, groups),
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            enable_kv_cache_events=enable_kv_cache_events,
            num_drafts=most_drafts,
            num_stages=num_stages,
            num_ranks=num_ranks,
            connection=connection,
            encoder_cache_config=encoder,
            adapters=self.adapters,
        )
        if most_drafts:
            self.scheduler.draft_lengths = any_length(most_drafts)
        self.runner = SimulatedRunner(groups, max_num_seqs, max_num_batched_tokens, stingy, encoder, self.files)
        self.depth = depth
        self.max_steps = max_steps
        self.num_runs = 0
        self.max_model_len = max_model_len
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.books: list[Request] = []  # the scheduler's, of all that ever came
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineCoreOutput] = {}
        self.weights: dict[str, int | None] = {}  # that draw a request's tokens; None: several do

    def add(self, request_id: str, prompt: list[int], arrival_time: float = 0.0, **options) -> None:
        """Queue a request; options of SamplingParams and of EngineCoreRequest alike."""
        request_fields = EngineCoreRequest.__struct_fields__
        fields = {name: options.pop(name) for name in list(options) if name in request_fields}
        fields.setdefault("eos_token_id", EOS)
        params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": [STOP], **options})
        request = EngineCoreRequest(request_id, prompt, params, arrival_time, **fields)
        self.scheduler.add_request(request)
        self.books.append(self.scheduler.requests[request_id])
        request.lora = self.books[-1].lora  # the version that it got
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.weights[request_id] = self.runner.weights
        self.runner.drawn.pop(request_id, None)
        self.ends.pop(request_id, None)

    def load(self, info: LoRAInfo) -> None:
        """What `EngineCore.add_lora` does: the adapter's files are there with this content, and are read."""
        self.files.files[info.lora_path] = info.digest
        number = next(self.adapters.numbers)
        request = LoRARequest(info.lora_name, number, info.lora_path)
        self.adapters.come(msgspec.structs.replace(self.files.take(request), lora_int_id=info.lora_int_id), number)

    def dispatch(self) -> SchedulerOutput:
        """Schedule a step and have it executed; its output stays in flight."""
        if self.adapters is not None and self.adapters.is_busy:
            self.record(self.scheduler.admit_read())
        scheduled = self.scheduler.schedule(self.max_steps)
        self.num_runs += scheduled.num_steps > 1
        self.scheduler.check_integrity()
        self.in_flight.append((scheduled, self.runner.execute(scheduled)))
        self.check_cache()
        return scheduled

    def receive(self) -> list[EngineCoreOutput]:
        """Hand the oldest output to the scheduler."""
        return self.record(self.scheduler.update_from_output(*self.in_flight.popleft()))

    def record(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        self.scheduler.check_integrity()
        self.check_cache()
        for output in outputs:
            assert output.request_id not in self.ends, f"{output.request_id} had ended"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
        return outputs

    def step(self) -> list[EngineCoreOutput]:
        """Keep up to `depth` steps in flight, then wait for the oldest."""
        while len(self.in_flight) < self.depth:
            self.dispatch()
        return self.receive()

    def abort(self, *request_ids: str) -> None:
        self.record(self.scheduler.abort_requests(request_ids))

    def lose_everything(self) -> None:
        """What happens before the KV cache is freed: nothing is in flight, no request has blocks, nothing is cached."""
        while self.in_flight:
            self.receive()
        self.scheduler.preempt_all()
        self.scheduler.check_integrity()
        assert not self.scheduler.running
        self.scheduler.lose_content()
        assert not any(block.cache_key for pool in self.scheduler.kv_cache_manager.pools for block in pool.blocks)
        self.scheduler.lose_slots()
        self.scheduler.check_integrity()
        self.runner.memory.clear()
        self.runner.encoded.clear()
        self.runner.lora_slots = {0: ""}

    def change_weights(self, *, keeps: bool) -> None:
        """What `EngineCore.note_weight_update` does. `keeps`: requests go on over their old keys and values."""
        while self.in_flight:
            self.receive()
        if not keeps:
            self.scheduler.preempt_all()
        self.exchange()
        if not keeps:
            self.runner.memory.clear()
        self.runner.weights += 1
        self.scheduler.change_weights(version := f"weights {self.runner.weights}", version)
        self.scheduler.check_integrity()
        kept = {request.request_id for request in self.scheduler.running}
        assert keeps or not kept
        for name, row in self.runner.rows.items():
            row.goes_on = name in kept
        self.weights |= dict.fromkeys(self.scheduler.requests)
        self.runner.encoded.clear()
        if not kept:
            self.runner.lora_slots = {0: ""}
        assert not any(block.cache_key for pool in self.scheduler.kv_cache_manager.pools for block in pool.blocks)

    def exchange(self) -> None:
        """What is said to a connector between steps."""

    def run(self, max_steps: int = 2000) -> None:
        """Step until all requests have ended and nothing is in flight, then check every answer."""
        while self.scheduler.has_unfinished_requests():
            self.step()
            max_steps -= 1
            assert max_steps, "requests do not finish"
        while self.in_flight:
            self.receive()
        self.check_answers()
        self.check_idle()

    def check_answers(self) -> None:
        """Whoever was not aborted has exactly the tokens of the model; the others have a beginning of them. Where
        several weights drew them, they are what the runner drew, which has checked all that it read."""
        for request_id, end in self.ends.items():
            request, weights, got = self.requests[request_id], self.weights[request_id], self.tokens[request_id]
            drawn = self.runner.drawn.get(request_id, []) if weights is None else None
            if drawn is not None and end.finish_reason in ("abort", "error"):
                assert got == drawn[: len(got)], request_id
                continue
            tokens, finish_reason, stop_reason = expected_output(request, self.max_model_len, weights or 0, drawn)
            if end.finish_reason in ("abort", "error"):
                assert got == tokens[: len(got)], request_id
            else:
                assert (got, end.finish_reason, end.stop_reason) == (tokens, finish_reason, stop_reason), request_id

    def check_cache(self) -> None:
        """Every block in the prefix cache holds what a computation of its tokens, one by one, leaves in it."""
        self.check_cache_of(self.scheduler.kv_cache_manager, self.runner)

    def check_cache_of(self, manager: KVCacheManager, runner: SimulatedRunner) -> None:
        memory, hashes_of, unit = runner.memory, {}, manager.groups.unit
        for request in self.books:
            digest = request.lora.digest if request.lora else ""
            hashes = prefix_hashes(seen(request.all_token_ids, request.mm_features, digest), repeat(runner.weights))
            for i, key in enumerate(request.block_hashes):
                hashes_of[key] = hashes[: (i + 1) * unit]
        for p, pool in enumerate(manager.pools):
            for block in pool.blocks:
                if block.cache_key is not None:
                    group, hashes = int.from_bytes(block.cache_key[-4:], "big"), hashes_of[block.cache_key[:-4]]
                    spec = runner.specs[group]
                    num_slots = 1 if isinstance(spec, StateSpec) else spec.block_size
                    held = [memory.get((p, block.block_id, slot)) for slot in range(num_slots)]
                    assert held == [(group, each) for each in hashes[-num_slots:]], block

    def check_idle(self) -> None:
        """Nothing is held by anybody."""
        pools = [pool for rank in self.scheduler.ranks for pool in rank.kv_cache_manager.pools]
        assert not any(pool.num_held_blocks for pool in pools)
        assert self.scheduler.get_num_unfinished_requests() == 0
        self.scheduler.check_integrity()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens of which neither is a stop token."""
    return [3 + (seed * 31 + i * 7) % (VOCAB_SIZE - 3) for i in range(length)]


PLACEHOLDER = 0
PIXELS = np.zeros(1, np.uint8)


def adapter(name: str, digest: str = "0", number: int = 1) -> LoRAInfo:
    return LoRAInfo(name, number, f"/adapters/{name}", digest)


def picture(name: str, offset: int, *lengths: int) -> MultiModalFeature:
    """One whose runs have these lengths, one token between them."""
    starts = [offset + sum(lengths[:i]) + i for i in range(len(lengths))]
    length, num_embeds = sum(lengths) + len(lengths) - 1, sum(lengths)
    runs, key = list(zip(starts, lengths)), name.encode().ljust(32, b".")
    return MultiModalFeature(key, "image", offset, length, runs, (1, 1, num_embeds), PIXELS)


def illustrated(
    prompt: list[int], *pictures: tuple[int, str, tuple[int, ...]]
) -> tuple[list[int], list[MultiModalFeature]]:
    """A prompt with pictures before some of its tokens, in order: where, name, and lengths of runs."""
    tokens, features, end = list[int](), list[MultiModalFeature](), 0
    for place, name, lengths in pictures:
        tokens += prompt[end:place]
        feature = picture(name, len(tokens), *lengths)
        tokens += [PLACEHOLDER] * feature.length
        features.append(feature)
        end = place
    return tokens + prompt[end:], features

"""What the page is told of the engine: sizes, counts and times. Nothing here has text of anybody's prompt or answer.

Requests are called by labels that tell neither their ids nor who asks.
"""

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxpaged.engine.observability.metrics import Histogram, Metric
from jaxpaged.engine.observability.step_times import MILLISECONDS, StepTimes, padding, step_times
from jaxpaged.messages import EngineSnapshot, KVBlockMap, RequestState, StepRecord

ENGINE_ID = re.compile(r"(?:\d+_)?([^#]*)(?:#.*)?", re.DOTALL)
"""The core's name of a sequence: its number among several, the request as the front end calls it, and a count."""
COUNTED = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
)
MOST_PICTURES = 12
"""Of the encoder cache, which are told one by one."""
TIMED = {"first_token": "time_to_first_token", "next_token": "inter_token_latency", "whole": "e2e_request_latency"}


class ShownRequest(msgspec.Struct, array_like=True):
    """A sequence under way. `cached` is the part of the prompt that was found in the prefix cache; -1: not looked for
    yet. Of it, `loaded` came from tiers besides the device, by their names; `is_loading`: it waits for such. `pictures`
    are the labels of those in its prompt, in their order."""

    label: str
    is_running: bool
    seconds: float  # since it came
    prompt: int
    cached: int
    computed: int
    generated: int
    preemptions: int
    loaded: dict[str, int] = {}
    is_loading: bool = False
    pictures: list[str] = []


class ShownStep(msgspec.Struct, array_like=True):
    """A finished step, or a run of `steps`. Times are milliseconds; `bucket` is what each one was padded to. Before its
    tokens `encoded` embeddings of pictures were computed, in the part `encode` of the device's time."""

    number: int
    tokens: int
    bucket: int
    padding: int
    requests: int
    sampled: int
    steps: int
    device: float
    host: float
    compile: float
    encoded: int = 0
    encode: float = 0.0


class ShownBlocks(msgspec.Struct):
    """The KV cache as runs of equal blocks: what they are, and how many. What a block is: the place of its owner in
    `owners`, -1 free, -2 free with content that can be reused, -3 shared by several requests.

    `stride` above 1: one of so many blocks is shown. `pictures` are labels of pictures, and `picture_runs` say in the
    same way as `runs` which of them each block has tokens of, -1 for none; empty where the engine sees nothing.
    """

    size: int
    count: int
    stride: int
    owners: list[str]
    runs: list[tuple[int, int]]
    pictures: list[str] = []
    picture_runs: list[tuple[int, int]] = []


class ShownEncoder(msgspec.Struct):
    """The encoder cache: how many pages there are, how many belong to pictures that requests still read, and how many
    to others that are kept for later ones. `queries`: pictures that were looked for; `hits`: that were there. `shown`:
    labels of the first pictures in it, their pages, and whether a request still reads them."""

    pages: int
    held: int
    kept: int
    pictures: int
    queries: int
    hits: int
    shown: list[tuple[str, int, bool]] = []


class EngineState(msgspec.Struct, kw_only=True):
    """The engine at one moment. `time` is in seconds of the server's own clock; `wait` says after how many there may
    be something newer. `obstacle`: why new requests should go elsewhere. `silent`: for how long the engine has not
    answered; the rest is as old as that.
    """

    time: float
    wait: float
    obstacle: str | None
    sleep_level: int | None = None
    silent: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    http: int = 0
    restarts: int = 0
    counts: dict[str, float] = {}
    times: dict[str, tuple[int, float]] = {}
    finished: dict[str, int] = {}
    requests: list[ShownRequest] = []
    blocks: ShownBlocks | None = None
    encoder: ShownEncoder | None = None
    steps: list[ShownStep] = []
    executor: dict[str, Any] = {}


class EngineInfo(msgspec.Struct, kw_only=True):
    """What does not change while the server runs. `defaults` are sampling parameters that the model brings along.
    A prompt may have `max_images` pictures, 0 where the model sees none, in files of `max_image_bytes` at most."""

    version: str
    models: list[str]
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    tensor_parallel_size: int
    data_parallel_size: int
    task: str
    chats: bool
    defaults: dict[str, Any]
    grpc_port: int | None
    finds_tool_calls: bool
    reports_cached_tokens: bool
    max_images: int
    max_image_bytes: int
    max_body_bytes: int


class Labels:
    """Names for requests: the same for all sequences of one, and for as long as the server runs."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def of(self, engine_id: str) -> str:
        request_id = ENGINE_ID.fullmatch(engine_id)[1]
        return self._label(request_id.encode("utf-8", "replace"))

    def of_picture(self, key: bytes) -> str:
        """A name for a picture, which tells nothing of it."""
        return self._label(key)

    def _label(self, name: bytes) -> str:
        return hashlib.blake2s(name, key=self._key, digest_size=3).hexdigest()[:5]


def runs_of(values: np.ndarray) -> list[tuple[int, int]]:
    """Equal neighbours as the value and how often it comes."""
    ends = np.append(np.flatnonzero(np.diff(values)) + 1, len(values))
    return list(zip(values[ends - 1].tolist(), np.diff(ends, prepend=0).tolist())) if len(values) else []


def shown_blocks(blocks: KVBlockMap, count: int, labels: Labels) -> ShownBlocks:
    owners = [labels.of(each) for each in blocks.request_ids] + blocks.holds
    found = ShownBlocks(blocks.block_size, count, blocks.stride, owners, runs_of(blocks.kinds))
    if blocks.picture is not None:
        found.pictures = list(map(labels.of_picture, blocks.picture_keys))
        found.picture_runs = runs_of(blocks.picture[1:])
    return found


def shown_encoder(snapshot: EngineSnapshot, labels: Labels) -> ShownEncoder | None:
    """None where the engine sees nothing."""
    blocks, stats = snapshot.blocks, snapshot.stats
    if blocks.encoder_picture is None or blocks.encoder_held is None:
        return None
    is_used, held = blocks.encoder_picture >= 0, int(np.count_nonzero(blocks.encoder_held))
    pages = Counter(blocks.encoder_picture[is_used].tolist())
    read = set(blocks.encoder_picture[blocks.encoder_held].tolist())
    first = sorted(pages, key=lambda number: (number not in read, number))[:MOST_PICTURES]  # of requests first
    return ShownEncoder(
        pages=len(is_used),
        held=held,
        kept=int(np.count_nonzero(is_used)) - held,
        pictures=len(pages),
        queries=stats.mm_cache_queries,
        hits=stats.mm_cache_hits,
        shown=[(labels.of_picture(blocks.picture_keys[each]), pages[each], each in read) for each in first],
    )


def shown_steps(before: StepRecord | None, records: Sequence[StepRecord], first: int) -> list[ShownStep]:
    """`before` came right before the records, the first of which has the number `first`."""
    times = step_times([before, *records] if before else records)[before is not None :]
    return [shown_step(first + place, *pair) for place, pair in enumerate(zip(records, times))]


def shown_step(number: int, record: StepRecord, times: StepTimes) -> ShownStep:
    *milliseconds, encode = [
        round(each * MILLISECONDS, 3) for each in (times.device, times.host, times.compile, times.encode)
    ]
    return ShownStep(
        number,
        record.num_tokens,
        record.token_bucket,
        padding(record),
        record.num_requests,
        record.num_sampled,
        record.num_steps,
        *milliseconds,
        record.num_encoded,
        encode,
    )


def shown_requests(snapshot: EngineSnapshot, labels: Labels, now: float) -> list[ShownRequest]:
    """`now` is in seconds since the epoch, as arrival times are."""

    def shown(state: RequestState, is_running: bool) -> ShownRequest:
        return ShownRequest(
            labels.of(state.request_id),
            is_running,
            round(max(now - state.arrival_time, 0.0), 2),
            state.num_prompt_tokens,
            state.num_cached_tokens,
            state.num_computed_tokens,
            state.num_output_tokens,
            state.num_preemptions,
            state.loaded,
            state.is_loading,
            list(map(labels.of_picture, state.pictures)),
        )

    running = [shown(state, True) for state in snapshot.running]
    return running + [shown(state, False) for state in snapshot.waiting]


def numbers_of(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Fields of `EngineState` that are counted in the front end, for all engine cores together."""
    by_name: dict[str, list[Any]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    finished: Counter[str] = Counter()
    for metric in by_name["vllm:request_success"]:
        finished[metric.labels["finished_reason"]] += metric.value

    def count_of(name: str) -> int:
        return sum(metric.value for metric in by_name[name])

    def time_of(name: str) -> tuple[int, float]:
        tallies: list[Histogram] = by_name[f"vllm:{name}_seconds"]
        return sum(tally.count for tally in tallies), sum(tally.sum for tally in tallies)

    return {
        "counts": {name: count_of(f"vllm:{name}") for name in COUNTED},
        "times": {short: time_of(name) for short, name in TIMED.items()},
        "finished": dict(finished),
        "restarts": count_of("jaxpaged:engine_restarts"),
    }

"""What several engine cores say of themselves, as if it were one engine's: numbers add up, lists follow each other.

Functions of plain values; every call of `core_calls.py` names the one for its result. They share one clock, that of
their host. This module knows no core.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxpaged.messages import EngineSnapshot, KVBlockMap, LoRAStats, SchedulerStats, StepRecord, WeightStats

OF_EACH_DEVICE = ("weight_bytes", "state_bytes", "kv_cache_bytes", "encoder_cache_bytes")
"""Counters of an executor that tell what one device holds: those of any core."""
MOST_STEPS = 256
"""In a snapshot, as from one core."""


LEAST = {"expert_balancedness_before", "expert_balancedness_after"}
"""What there is of each core, and shows where one of them does badly."""


def merged_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Queues and counters of all; the KV cache is used as much as theirs on the average."""
    total = lambda name: sum(getattr(each, name) for each in stats)
    places = itertools.zip_longest(*(each.num_accepted_per_pos for each in stats), fillvalue=0)
    levels = [each.sleep_level for each in stats]
    return SchedulerStats(
        step_id=max(each.step_id for each in stats),
        num_running_reqs=total("num_running_reqs"),
        num_waiting_reqs=total("num_waiting_reqs"),
        kv_cache_usage=total("kv_cache_usage") / len(stats),
        prefix_cache_queries=total("prefix_cache_queries"),
        prefix_cache_hits=total("prefix_cache_hits"),
        external_prefix_cache_queries=total("external_prefix_cache_queries"),
        external_prefix_cache_hits=total("external_prefix_cache_hits"),
        num_kv_fetches=[sum(stage) for stage in zip(*(each.num_kv_fetches for each in stats if each.num_kv_fetches))],
        num_preemptions=total("num_preemptions"),
        num_corrupted_reqs=total("num_corrupted_reqs"),
        num_scheduled_tokens=total("num_scheduled_tokens"),
        num_steps=max(each.num_steps for each in stats),
        sleep_level=None if None in levels else min(level for level in levels if level is not None),
        num_drafts=total("num_drafts"),
        num_draft_tokens=total("num_draft_tokens"),
        num_accepted_tokens=total("num_accepted_tokens"),
        num_accepted_per_pos=[sum(place) for place in places],
        mm_cache_queries=total("mm_cache_queries"),
        mm_cache_hits=total("mm_cache_hits"),
        mm_cache_usage=total("mm_cache_usage") / len(stats),
        lora=merged_lora_stats([each.lora for each in stats if each.lora is not None]),
        weights=merged_weight_stats([each.weights for each in stats]),
    )


def merged_weight_stats(stats: Sequence[WeightStats | None]) -> WeightStats | None:
    """Those of the core that has taken the fewest updates. None where no core has taken any."""
    if not any(stats):
        return None
    return min((each or WeightStats("", 0) for each in stats), key=lambda each: each.num_updates)


def merged_lora_stats(stats: Sequence[LoRAStats]) -> LoRAStats | None:
    """Requests and counters of all. None where requests have no adapters."""
    if not stats:
        return None
    names = LoRAStats.__struct_fields__
    numbers = {name: sum(getattr(each, name) for each in stats) for name in names if name.startswith("num_")}
    running, waiting = Counter[str](), Counter[str]()
    for each in stats:
        running.update(each.running)
        waiting.update(each.waiting)
    return LoRAStats(max(each.max_loras for each in stats), dict(running), dict(waiting), **numbers)


def merged_executor_stats(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums of what is counted, also by size, and the least of what is a share; the rest, as buckets, is the same."""
    merged: dict[str, Any] = {}
    for name, value in stats[0].items():
        values = [each.get(name, 0) for each in stats]
        if name in LEAST:
            merged[name] = min(values)
        elif type(value) in (int, float) and name not in OF_EACH_DEVICE:
            merged[name] = sum(values)
        elif isinstance(value, dict):
            keys = sorted(set().union(*(each or () for each in values)))
            merged[name] = {key: sum(each.get(key, 0) for each in values if each) for key in keys}
        else:
            merged[name] = value
    return merged


def merged_steps(records: Sequence[tuple[list[StepRecord], int]]) -> tuple[list[StepRecord], int]:
    """All steps in the order in which they ended, and how many of all are forgotten."""
    steps = itertools.chain.from_iterable(steps for steps, _ in records)
    return sorted(steps, key=lambda step: step.result_ready), sum(num_before for _, num_before in records)


def merged_block_maps(maps: Sequence[KVBlockMap]) -> KVBlockMap:
    """The blocks of one core behind those of another, whose null block is left out as for a further pool."""
    request_ids = [name for each in maps for name in each.request_ids]
    holds = [name for each in maps for name in each.holds]
    owners, first_request, first_hold = [], 0, len(request_ids)
    for number, each in enumerate(maps):
        own = np.arange(len(each.request_ids)) + first_request, np.arange(len(each.holds)) + first_hold
        new_places = np.concatenate([*own, [-1]])  # that of -1, nobody, is the last
        owners.append(new_places[each.owner][bool(number) :])
        first_request, first_hold = first_request + len(each.request_ids), first_hold + len(each.holds)
    joined = lambda name: np.concatenate([getattr(each, name)[bool(number) :] for number, each in enumerate(maps)])
    return KVBlockMap(
        block_size=maps[0].block_size,
        request_ids=request_ids,
        owner=np.concatenate(owners).astype(maps[0].owner.dtype),
        num_owners=joined("num_owners"),
        cached=joined("cached"),
        stride=max(each.stride for each in maps),
        holds=holds,
        **merged_pictures(maps),
    )


def merged_pictures(maps: Sequence[KVBlockMap]) -> dict[str, Any]:
    """Where pictures are, by the names of `KVBlockMap`; nothing where an engine sees none."""
    merged: dict[str, list[np.ndarray]] = {"picture": [], "encoder_picture": [], "encoder_held": []}
    keys: list[bytes] = []
    for number, each in enumerate(maps):
        if each.picture is None or each.encoder_picture is None or each.encoder_held is None:
            return {}
        new_places = np.append(np.arange(len(each.picture_keys)) + len(keys), -1).astype(
            np.int32
        )  # the last is that of -1
        merged["picture"].append(new_places[each.picture][bool(number) :])
        merged["encoder_picture"].append(new_places[each.encoder_picture])
        merged["encoder_held"].append(each.encoder_held)
        keys += each.picture_keys
    return {"picture_keys": keys, **{name: np.concatenate(parts) for name, parts in merged.items()}}


def merged_snapshots(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """All that they do; of their steps the newest ones."""
    steps, num_before = merged_steps([(each.steps, each.num_steps_before) for each in snapshots])
    return msgspec.structs.replace(
        snapshots[0],
        stats=merged_stats([each.stats for each in snapshots]),
        executor=merged_executor_stats([each.executor for each in snapshots]),
        steps=steps[-MOST_STEPS:],
        num_steps_before=num_before + max(len(steps) - MOST_STEPS, 0),
        blocks=merged_block_maps([each.blocks for each in snapshots]),
        num_blocks=sum(each.num_blocks for each in snapshots),
        running=sorted((state for each in snapshots for state in each.running), key=lambda state: state.arrival_time),
        waiting=sorted((state for each in snapshots for state in each.waiting), key=lambda state: state.arrival_time),
        seconds=max(each.seconds for each in snapshots),
    )

"""What an engine does with its KV connector between steps: most is said with steps (`core/kv_transfer`)."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpaged.core.kv_transfer.transfers import KVTransfers
from jaxpaged.core.request import Request
from jaxpaged.errors import UsageError
from jaxpaged.executor.base import KVTransferWorker
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.messages import EngineCoreRequest, LoRAInfo
from jaxpaged.sampling_params import SamplingParams

ASK_SECONDS = 0.002
"""How often an engine that has nothing else to do looks whether a store elsewhere has answered."""
SAVE_PATIENCE, MOST_SAVE_SECONDS = 10.0, 30.0
"""Seconds that what is saved before content is lost may take without any progress, and in all."""

NO_FILES = (
    "keys and values are saved and loaded as files by engines that keep them besides the device. Give kv_offload, such "
    "as host=1G."
)
"""Why there are none."""


def save_all(transfers: KVTransfers, exchange: Callable[[float], None], before: int | None = None) -> None:
    """Wait until what steps before number `before` have computed, None: all steps, is on its way off the device, and
    give up what takes too long. `exchange` tells the workers, and waits at most so many seconds to hear of them."""
    end = time.monotonic() + MOST_SAVE_SECONDS
    exchange(0.0)
    while transfers.saves.has_any(before):
        num_under_way = len(transfers.gathers)
        exchange(min(SAVE_PATIENCE, end - time.monotonic()))
        if len(transfers.gathers) >= num_under_way and not transfers.gathers.has_room:
            transfers.give_up(transfers.saves.take(before, len(transfers.saves)))
    exchange(0.0)


def seconds_to_wait(transfers: KVTransfers, most: float) -> float:
    """How long an engine sleeps that has nothing else to do, until it hears of loads; 0: nobody waits for any."""
    if transfers.is_asking:
        return min(most, ASK_SECONDS)
    return most if transfers.is_waited_for else 0.0


def save_prefix(
    transfers: KVTransfers,
    worker: KVTransferWorker,
    path: Path,
    token_ids: Sequence[int],
    cache_salt: str | None,
    lora: LoRAInfo | None,
) -> PrefixInfo:
    """Write what the prefix cache has of these tokens, all that fill blocks and pages, to a file. Raises UsageError."""
    if transfers.has_snapshots:
        raise UsageError(
            "a file of a prefix holds keys and values, and this model has recurrent states besides. Keep prompts in a "
            "disk tier: kv_offload disk=FOLDER:SIZE."
        )
    wanted = transfers.align(len(token_ids))
    # One token more, since the last one of a request never comes from the cache.
    message = EngineCoreRequest(
        "prefix", [*token_ids[:wanted], 0], SamplingParams(max_tokens=1), 0.0, cache_salt=cache_salt, lora=lora
    )
    num_tokens, found = transfers.beginning(Request(message, wanted + 1, 0, transfers.num_groups))
    if not wanted:
        raise UsageError(
            f"the prompt has {len(token_ids)} tokens, and a file holds full blocks and pages, of {transfers.alignment} "
            "tokens here. Save a longer prompt."
        )
    if num_tokens < wanted:
        raise UsageError(
            f"the prefix cache has {num_tokens} of the {wanted} tokens that fill blocks and pages. Save a prompt "
            "without images, with the KV cache large enough for all of it."
        )
    return worker.save_prefix(path, token_ids[:wanted], found)

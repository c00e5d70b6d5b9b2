"""Brings the two halves of KV transfer together, step by step: what the scheduler's half decides the worker's does.

The core calls this between the steps that it dispatches; nothing here waits, but for `wait`.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpaged.core.kv_transfer.saves import Save
from jaxpaged.core.kv_transfer.transfers import KVTransfers, Load
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import RequestError, UsageError
from jaxpaged.executor.base import KVTransferWorker
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.kv_store.transfer_params import RemoteSource, source_of, transfer_params
from jaxpaged.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats, StepRecord
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

ASK_SECONDS = 0.002
"""How often an engine that has nothing else to do looks whether a store elsewhere has answered."""
MOST_PIECES = 64
"""That are offered for copies at a time."""
SAVE_PATIENCE, MOST_SAVE_SECONDS = 10.0, 30.0
"""Seconds that what is saved before content is lost may take without any progress, and in all."""


class KVTransferDriver:
    """With `failure_policy` "fail" a request whose pages do not come ends with an error, instead of being computed.
    Without a `worker` nothing travels."""

    def __init__(self, scheduler: Scheduler, worker: KVTransferWorker | None, failure_policy: str):
        self._scheduler, self._fails = scheduler, failure_policy == "fail"
        self._half = None
        self._told: list[EngineCoreOutput] = []  # of prompts that are lent
        if worker is not None:
            manager, tiers = scheduler.kv_cache_manager, worker.chunk_tiers
            self._half = KVTransfers(manager, worker.page_tokens, worker.lookup, worker.where, worker.expect, tiers)
            manager.transfers = self._half
            self._manager: Any = manager
        self._worker: Any = worker

    def save(self, before: int | None = None) -> None:
        """Dispatch copies of what steps before number `before` compute, None: all that are dispatched, as far as there
        is room. The rest waits."""
        half, worker = self._half, self._worker
        if half is None:
            return
        if half.lost:
            worker.discard(half.take_lost())
        while half.saves and worker.has_room and (saves := half.saves.take(before, MOST_PIECES)):
            left = worker.save(saves)
            half.saves.add_first(left)

    def save_urgent(self) -> None:
        """Copy what is overwritten next, and give up what finds no room."""
        assert self._half is not None
        if urgent := self._half.saves.take_urgent():
            self._worker.give_up(self._worker.save(urgent))

    @property
    def has_saves(self) -> bool:
        """Whether anything waits to be copied off the device."""
        return self._half is not None and bool(self._half.saves)

    def save_idle(self) -> None:
        """Go on saving while no step is in flight."""
        if self.has_saves:
            self.save()
            self._worker.confirm(None)

    def save_all(self, before: int | None = None) -> None:
        """Wait until all that steps before number `before` have computed, None: all steps, is on its way off the
        device, and give up what takes too long. No step may begin meanwhile."""
        if self._half is None:
            return
        end = time.monotonic() + MOST_SAVE_SECONDS
        self.save(before)
        self._worker.confirm(before)
        while self._half.saves.has_any(before):
            if not self._worker.wait_for_room(min(SAVE_PATIENCE, end - time.monotonic())):
                self._worker.give_up(self._half.saves.take(before, len(self._half.saves)))
                return
            self.save(before)
            self._worker.confirm(before)

    def save_last(self, before: int | None) -> None:
        """The same before the engine ends, if anything that is kept outlives it."""
        if self._half is not None and self._worker.outlives_engine:
            self.save_all(before)

    def before_step(self, step_id: int) -> None:
        """Step `step_id` is scheduled and not dispatched: lend the prompts that it begins, save what it overwrites, and
        send for what it waits for."""
        if self._half is None:
            return
        for request in self._half.handovers.take_begun():
            self._lend(self._half, request, step_id)
        self.save_urgent()
        self.save(step_id)
        for load in self._half.take_begun():
            self._worker.load(load)

    def _lend(self, half: KVTransfers, request: Request, step_id: int) -> None:
        """Lend a prompt from its first step on, and say so at once to who reads a stream."""
        num_tokens, pieces = half.lent_pieces(request)
        said = self._worker.lend(num_tokens, pieces)
        if said is None:
            return
        half.handovers.lent(request, said)
        # What the prefix cache had; what this step or one before it computes is to be saved behind that step already.
        there = [Save(step_id - 1, piece) for piece in pieces if piece.block_ids]
        half.saves.add_first([save for save in there if save.key not in half.saves])
        if request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
            told = EngineCoreOutput(request.request_id, [], max(request.num_cached_tokens, 0), request.num_preemptions)
            told.kv_transfer_params = said
            self._told.append(told)

    def settle(self, oldest: int | None) -> list[EngineCoreOutput]:
        """All that is scheduled is dispatched, and steps before number `oldest` are done, None: all are. Returns what
        there is to say of prompts that are lent."""
        if self._half is None:
            return []
        self.save()
        self._worker.confirm(oldest)
        told, self._told = self._told, []
        return [output for output in told if output.request_id in self._scheduler.requests]

    def hand_over(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Let other engines go on from the prompts of those that ended, and say so in their outputs."""
        if self._half is None:
            return outputs
        ended = self._half.handovers.take_ended()
        for output in outputs if ended else ():
            if output.finish_reason in ("stop", "length") and output.request_id in ended:
                request, said = ended.pop(output.request_id)
                _, pieces = self._half.lent_pieces(request)
                output.kv_transfer_params = self._worker.finish_lending(said, pieces)
                for save in [Save(-1, piece) for piece in pieces if piece.block_ids]:
                    if save.key not in self._half.saves:
                        self._half.saves.add(save)
        for _, said in ended.values():
            self._worker.take_back(said)
        return outputs

    def revoke(self) -> None:
        """A step has failed: what is not confirmed is not kept."""
        if self._half is not None:
            self._half.saves.clear()
            self._worker.revoke()

    def deliver(self) -> list[EngineCoreOutput]:
        """Dispatch what has come, so that the next step finds it. Returns the last outputs of who failed for it."""
        outputs: list[EngineCoreOutput] = []
        if self._half is None:
            return outputs
        if self._manager.records_events:
            self._manager.add_events(self._half.events.of(self._worker.take_changes()))
        for fetched in self._worker.take_fetched():
            load: Load = fetched.load
            is_waiting = self._half.loading.get(load.request.request_id) is load and not load.request.is_finished
            if all(fetched.came):
                self._half.rates.observe_load(load.num_tokens, fetched.seconds, fetched.sources)
            elif self._fails and is_waiting:
                reason = f"{fetched.came.count(False)} of {len(fetched.came)} pages of its beginning were not loaded"
                outputs += self._scheduler.fail_requests([load.request.request_id], reason)
            block_ids = self._half.arrived(load, fetched.came, fetched.sources)
            if block_ids is not None:
                self.save_urgent()
                self._worker.write(fetched, block_ids)
        self.tell_peers()
        return outputs

    def tell_peers(self) -> None:
        """Say which leases requests wait for, and which are not needed any more; those of requests that were aborted
        or have failed end."""
        if self._half is not None:
            for _, said in self._half.handovers.take_ended().values():
                self._worker.take_back(said)
            for source in self._half.handovers.take_needed():
                self._worker.keep_lease(source)
            for source in self._half.handovers.take_released():
                self._worker.release(source)

    def keep_lease(self, source: RemoteSource, is_needed: bool) -> None:
        """A request may come that goes on from what is lent there. Not `is_needed`: it will not come after all."""
        if self._half is not None:
            (self._worker.keep_lease if is_needed else self._worker.release)(source)

    def refuse(self, request: EngineCoreRequest) -> None:
        """A request is refused: nobody will go on from what is lent for it."""
        params = request.sampling_params
        if self._half is not None and params is not None and params.extra_args:
            with contextlib.suppress(RequestError):
                if (source := source_of(transfer_params(params.extra_args))) is not None:
                    self._worker.release(source)

    def observe(self, record: StepRecord) -> None:
        """A step is done."""
        if self._half is not None:
            record.pages_saved, record.pages_loaded = self._worker.take_copied()
            begin = record.schedule_end + record.program_wait  # a CPU may compute while it is dispatched
            self._half.rates.observe_step(record.num_tokens, record.num_sampled, begin, record.result_ready)

    def wait(self, seconds: float) -> bool:
        """Sleep until pages have come, at most so long. False, at once, where nobody waits for any."""
        if self._half is None:
            return False
        is_asking = self._half.is_asking
        if not is_asking and not self._half.is_waited_for:
            return False
        self._worker.wait(min(seconds, ASK_SECONDS) if is_asking else seconds)
        return True

    def save_prefix(self, path: Path, token_ids: Sequence[int], cache_salt: str | None) -> PrefixInfo:
        """Write what the prefix cache has of these tokens, all that fill blocks and pages, to a file. Raises
        UsageError."""
        half, worker = self._half_or_refuse()
        params = SamplingParams(max_tokens=1)
        wanted = half.align(len(token_ids))
        # One token more, since the last one of a request never comes from the cache.
        message = EngineCoreRequest("prefix", [*token_ids[:wanted], 0], params, 0.0, cache_salt=cache_salt)
        num_tokens, found = half.beginning(Request(message, wanted + 1, 0, len(self._manager.groups)))
        if not wanted:
            raise UsageError(
                f"the prompt has {len(token_ids)} tokens, and a file holds full blocks and pages, of {half.alignment} "
                "tokens here. Save a longer prompt."
            )
        if num_tokens < wanted:
            raise UsageError(
                f"the prefix cache has {num_tokens} of the {wanted} tokens that fill blocks and pages. Save a prompt "
                "without images, with the KV cache large enough for all of it."
            )
        return worker.write_file(path, token_ids[:wanted], found)

    def load_prefix(self, path: Path) -> PrefixInfo:
        """Put the pages of a file into the tiers. Raises UsageError, and PageError for one that must not be used."""
        return self._half_or_refuse()[1].read_file(path)

    def _half_or_refuse(self) -> tuple[KVTransfers, Any]:
        if self._half is None:
            raise UsageError(
                "keys and values are saved and loaded as files by engines that keep them besides the device. Give "
                "kv_offload, such as host=1G."
            )
        return self._half, self._worker

    def count_in(self, stats: SchedulerStats) -> None:
        """Say what was looked for in the tiers, and who waits for them now."""
        half = self._half
        if half is not None:
            stats.external_prefix_cache_queries, stats.external_prefix_cache_hits = half.num_queries, half.num_hits
            stats.num_kv_fetches = half.fetch_stages()

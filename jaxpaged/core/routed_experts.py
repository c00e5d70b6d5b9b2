"""Which experts the tokens of requests went to: as steps say it of the tokens that they computed, and as they said it
of a beginning that the prefix cache has.

What is kept of a block is written when the output of a step comes, and read with the output of the first step of a
request that found the block. Outputs come in the order of steps, so it is of the same tokens as the keys and values
that this step has read.

Letters: R blocks, B tokens of a block, L blocks of experts, J experts of a token.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.messages import EngineCoreOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput

UNKNOWN = -1


class ExpertRecord:
    """Of one request. Of the first `num_known` tokens the experts are told, or `untold` yet; none before `first` are.
    The next line that comes is of token `place`."""

    __slots__ = ("block_ids", "first", "num_known", "place", "untold")

    def __init__(self, first: int):
        self.first, self.num_known, self.place = first, 0, 0
        self.untold: list[np.ndarray] = []
        self.block_ids: list[int] = []

    def add(self, expert_TLJ: np.ndarray) -> None:
        """The experts of the next tokens."""
        wanted_TLJ = expert_TLJ[max(self.first - self.num_known, 0) :]
        if len(wanted_TLJ):
            self.untold.append(wanted_TLJ.copy())  # a part would keep all of a step
        self.num_known += len(expert_TLJ)


class RoutedExperts:
    """Of all requests and, if the prefix cache `keeps_blocks`, of all blocks of each attention rank."""

    def __init__(self, config: KVCacheConfig, num_ranks: int, keeps_blocks: bool):
        specs = [group.spec for group in config.groups]
        having = [g for g, spec in enumerate(specs) if spec.needs_blocks]
        self._group = next((g for g in having if specs[g].num_read_blocks is None), having[0])
        self._block_size = specs[self._group].block_size
        pools = zip(config.pools, config.num_blocks, strict=True)
        self._num_blocks = next(count for pool, count in pools if self._group in pool.group_idxs)
        self._kept_RBLJ: list[np.ndarray | None] = [None] * num_ranks
        self._keeps_blocks = keeps_blocks

    def take(
        self,
        requests: Mapping[str, Request],
        step: SchedulerOutput,
        output: ModelRunnerOutput,
        results: Iterable[EngineCoreOutput],
    ) -> None:
        """Keep what a step says, and add to its results what clients were not told."""
        assert output.routed_experts is not None, "the step says nothing of experts"
        rest_TLJ = output.routed_experts
        for rank, part in enumerate(step.parts):
            rest_TLJ = self._take_part(rank, requests, part, output, rest_TLJ)
        for result in results:
            record = requests[result.request_id].routed
            if record is not None and record.untold:
                result.routed_experts, record.untold = record.untold, []

    def _take_part(
        self,
        rank: int,
        requests: Mapping[str, Request],
        part: SchedulerOutput,
        output: ModelRunnerOutput,
        rest_TLJ: np.ndarray,
    ) -> np.ndarray:
        """The lines of one rank's requests; returns those behind them. A token that was to be drawn and was not means
        that one less was computed, too."""
        new = {each.request_id: each for each in part.new_requests}
        num_drawn = dict(zip(output.request_ids, map(len, output.sampled_token_ids), strict=True))
        told = part.request_ids, part.num_scheduled_tokens, part.max_sampled_tokens, part.new_block_ids
        for request_id, count, most, block_ids in zip(*told, strict=True):
            request = requests[request_id]
            if request_id in new:
                self._begin(rank, request, new[request_id], rest_TLJ)
            elif block_ids is not None:
                request.routed.block_ids += block_ids[self._group]
            self._add(rank, request.routed, rest_TLJ[: count - most + num_drawn.get(request_id, 0)])
            rest_TLJ = rest_TLJ[count:]
        return rest_TLJ

    def _begin(self, rank: int, request: Request, new: NewRequestData, like_TLJ: np.ndarray) -> None:
        """A request has got a row, for the first time or again. What it knew already stays as it was."""
        if request.routed is None:
            request.routed = ExpertRecord(request.sampling_params.routed_experts_prompt_start)
        record = request.routed
        record.block_ids, record.place = list(new.block_ids[self._group]), new.num_computed_tokens
        found = np.arange(record.num_known, record.place)
        if len(found):
            blocks, slots = self._places(record.block_ids, found)
            kept_RBLJ = self._kept_RBLJ[rank]
            if kept_RBLJ is None:
                found_TLJ = np.full((len(found), *like_TLJ.shape[1:]), UNKNOWN, np.int16)
            else:  # block 0 stands where no query reads any more
                found_TLJ = np.where(blocks[:, None, None] == 0, np.int16(UNKNOWN), kept_RBLJ[blocks, slots])
            record.add(found_TLJ)

    def _add(self, rank: int, record: ExpertRecord, expert_TLJ: np.ndarray) -> None:
        """Tokens of a request are computed. Those that it had computed before are passed over, as log probabilities
        are: the first time is when what follows was drawn."""
        first, record.place = record.place, record.place + len(expert_TLJ)
        if self._keeps_blocks:
            kept_RBLJ = self._kept_RBLJ[rank]
            if kept_RBLJ is None:
                shape = self._num_blocks, self._block_size, *expert_TLJ.shape[1:]
                kept_RBLJ = self._kept_RBLJ[rank] = np.zeros(shape, np.int16)
            kept_RBLJ[self._places(record.block_ids, np.arange(first, record.place))] = expert_TLJ
        if record.place > record.num_known:
            record.add(expert_TLJ[record.num_known - first :])

    def _places(self, block_ids: Sequence[int], places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens of a request are kept: (blocks, places in them)."""
        begin = int(places[0]) // self._block_size if len(places) else 0
        end = int(places[-1]) // self._block_size + 1 if len(places) else 0
        own = np.array(block_ids[begin:end], np.int64)
        return own[places // self._block_size - begin], places % self._block_size

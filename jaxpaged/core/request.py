"""The host's record of one request: its tokens, how far it is computed, and which blocks it holds.

Scheduler and KV cache manager read and write this record. It knows nothing of budgets, of other requests, or of the
device. A request that could never be served is refused here (`check_request`).
"""

import enum
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from jaxpaged.core.grammar.matcher import Matcher
from jaxpaged.core.grammar.thinking_budget import BudgetMatcher
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, NewRequestData, TokenLogprobs


class RequestStatus(enum.Enum):
    """The state of a request. The runner has a row for it exactly while it is RUNNING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # waiting again, its blocks taken away
    FINISHED = enum.auto()


class Request:
    """One request from intake to its end.

    Counts of tokens:
    * `num_tokens` are known.
    * `num_tokens_with_placeholders` also counts the tokens that steps in flight may sample.
    * `num_computed_tokens` are computed if steps in flight sample all that they may.
    * `num_confirmed_tokens` are computed however few tokens steps in flight sample.
    * `max_total_tokens` is the length at which the request ends at the latest. The last token is never computed.

    Positions below `decode_limit` have a slot and may still sample, so a decode below it needs no decision. A request
    with `num_drafts` tokens to draft always needs one.

    The KV cache manager owns the rest. `blocks[g]` is the block table of KV group g, and the first
    `num_skipped_blocks[g]` of its blocks are the null block. The blocks that the first `num_entered_tokens` fill are
    entered in the prefix cache, which knew the prompt up to `branch`.
    """

    __slots__ = (
        "adapter",
        "all_token_ids",
        "arrival_order",
        "arrival_time",
        "block_hashes",
        "blocks",
        "branch",
        "cache_salt",
        "decode_limit",
        "drafts",
        "eos_token_id",
        "finish_reason",
        "first_scored",
        "has_old_kv",
        "loaded",
        "lora",
        "matcher",
        "max_total_tokens",
        "mm_features",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts",
        "num_entered_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_skipped_blocks",
        "num_tokens_with_placeholders",
        "old_kv_from",
        "page_hashes",
        "priority",
        "prompt_logprobs",
        "rank",
        "reads_prefix_cache",
        "reports_logprobs",
        "request_id",
        "routed",
        "sampling_params",
        "status",
        "stop_ids",
        "times",
        "untold_spans",
        "weight_spans",
    )

    def __init__(self, message: EngineCoreRequest, max_model_len: int, arrival_order: int, num_groups: int):
        params = message.sampling_params
        self.request_id = message.request_id
        self.sampling_params = params
        self.arrival_time = message.arrival_time
        self.arrival_order = arrival_order
        self.rank = 0  # the number of its attention rank
        self.priority = message.priority
        self.cache_salt = message.cache_salt
        self.lora = message.lora
        self.adapter: Any = None  # the `Adapter` of `core/lora`, where it has one
        self.mm_features = message.mm_features

        assert params.max_tokens is not None, "the sampling parameters are not complete"
        self.all_token_ids = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.max_total_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        if message.pooling_params is not None:  # it samples nothing, so it ends after its prompt
            self.max_total_tokens = self.num_prompt_tokens + 1
        self.num_computed_tokens = 0
        self.num_tokens_with_placeholders = self.num_prompt_tokens
        self.decode_limit = 0
        self.num_drafts = 0
        self.drafts: Any = None  # the `DraftRecord` of `core/speculative.py`
        self.num_cached_tokens = -1  # prefix-cache hit of the first admission; -1 before it
        self.loaded: dict[str, int] | None = None  # how many of them were loaded, by tier
        self.num_preemptions = 0
        # Times of intake and of the first admission; None once clients were told.
        self.times: tuple[float, float] | None = (time.time(), math.nan)

        # Which weights draw its tokens, as `CompletionOutput` has it; and the same until clients were told.
        self.weight_spans: list[tuple[int, str]] = []
        self.untold_spans: list[tuple[int, str]] | None = None
        self.old_kv_from: int | None = None  # as `CompletionOutput` has it
        # Its blocks hold what older weights computed, too, so nobody else may ever find them.
        self.has_old_kv = False

        self.eos_token_id = None if params.ignore_eos else message.eos_token_id
        self.stop_ids = frozenset(params.stop_token_ids or ())
        if self.eos_token_id is not None:
            self.stop_ids |= {self.eos_token_id}
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None

        wants_prompt_logprobs = params.prompt_logprobs is not None
        # Collected over the chunks of the prompt; None when not asked for, or already sent.
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt_logprobs else None
        self.reports_logprobs = wants_prompt_logprobs or params.logprobs is not None or params.returns_mask
        # Prompt tokens taken from the cache have no log probabilities, nor has the one behind them.
        self.first_scored = max(params.prompt_logprob_start, 1) if wants_prompt_logprobs else None
        self.reads_prefix_cache = self.first_scored != 1 and not params.skip_reading_prefix_cache

        self.routed: Any = None  # the `ExpertRecord` of `core/routed_experts.py`, where experts are told
        self.matcher: Matcher | BudgetMatcher | None = None  # of a grammar, or of a limit of thinking

        self.block_hashes: list[bytes] = []
        self.page_hashes: list[bytes] = []  # where pages and blocks differ in length
        self.blocks: tuple[list, ...] = tuple([] for _ in range(num_groups))
        self.num_skipped_blocks = [0] * num_groups
        self.num_entered_tokens = self.branch = 0

    @property
    def has_only_tokens(self) -> bool:
        """Whether the content of its blocks follows from tokens and weights alone."""
        return self.lora is None and self.cache_salt is None and not self.mm_features

    def forget_hashes(self) -> None:
        """From now on the request computes other content."""
        self.block_hashes.clear()
        self.page_hashes.clear()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_findable_tokens(self) -> int:
        """Tokens that caches may have for it. The one before a token that is drawn or scored is always computed."""
        return (self.num_tokens if self.first_scored is None else min(self.first_scored, self.num_tokens)) - 1

    @property
    def num_output_placeholders(self) -> int:
        """Tokens that steps in flight are sampling for this request."""
        return self.num_tokens_with_placeholders - len(self.all_token_ids)

    @property
    def is_computing_prompt(self) -> bool:
        """Whether it lacks more than its newest token."""
        return self.num_tokens_with_placeholders > self.num_computed_tokens + 1

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens that are computed, or will be by steps in flight, however few tokens these give."""
        return min(self.num_computed_tokens, len(self.all_token_ids) - 1)

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens whose keys and values are certain to be written once all steps in flight are done.

        Neither a token that is still being sampled counts, nor the stop token that ended the request: whether the
        device computes a stop token depends on the steps in flight. A single step does, a multi-step decode does not.
        """
        num_known = len(self.all_token_ids)
        if num_known > self.num_prompt_tokens and self.all_token_ids[-1] in self.stop_ids:
            num_known -= 1
        return min(self.num_computed_tokens, num_known)

    def finish(self, reason: FinishReason) -> None:
        """The request has ended, for this reason."""
        self.status, self.finish_reason = RequestStatus.FINISHED, reason

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def check_stop(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop reason) when `token_id`, the newest token, ends the request, else None.

        The order is vLLM's: end of sequence, stop token, length. `min_tokens` is kept by the sampler, which
        does not draw a stop token before.
        """
        if token_id in self.stop_ids:
            return "stop", None if token_id == self.eos_token_id else token_id
        if len(self.all_token_ids) >= self.max_total_tokens:
            return "length", None
        return None

    @property
    def lora_slot(self) -> int:
        """Of its adapter on the devices; 0 without one."""
        return 0 if self.adapter is None else self.adapter.slot

    @property
    def tower_slot(self) -> int:
        """The same for the encoder of its pictures, which most adapters leave as it is."""
        return self.lora_slot if self.lora is not None and self.lora.changes_tower else 0

    def to_new_request_data(self) -> NewRequestData:
        """The runner's data of a request that is admitted, or admitted again after preemption."""
        return NewRequestData(
            request_id=self.request_id,
            token_ids=list(self.all_token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=tuple([block.block_id for block in table] for table in self.blocks),
            sampling_params=self.sampling_params,
            is_private=self.cache_salt is not None,
            lora_slot=self.lora_slot,
            mm_features=[msgspec.structs.replace(feature, pixels=None, embeds=None) for feature in self.mm_features],
        )

    def note_weights(self, label: str | None) -> None:
        """The next tokens are drawn by these weights, None: by those that the engine loaded."""
        start = self.num_tokens - self.num_prompt_tokens
        spans = [each for each in self.weight_spans or [(0, "")] if each[0] < start]
        if spans or label is not None:
            self.weight_spans = self.untold_spans = [*spans, (start, label or "")]
        if self.has_old_kv and self.old_kv_from is None:
            self.old_kv_from = start

    @property
    def weights_label(self) -> str | None:
        """What the weights are called that compute it; None: those that the engine began with, and no others did."""
        return self.weight_spans[-1][1] if self.weight_spans else None

    def note_admission(self) -> None:
        """The request is scheduled for the first time."""
        assert self.times is not None, "clients are told with the first tokens, which come later"
        self.times = (self.times[0], time.time())

    def to_last_output(self) -> EngineCoreOutput:
        """The output of a request that ends without a new token."""
        was_scheduled = self.times is not None and self.num_cached_tokens >= 0
        return EngineCoreOutput(
            self.request_id,
            [],
            finish_reason=self.finish_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            num_preemptions=self.num_preemptions,
            times=self.times if was_scheduled else None,
            loaded=self.loaded if was_scheduled else None,
            weight_spans=self.untold_spans,
            old_kv_from=self.old_kv_from,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens} of "
            f"{self.num_tokens}+{self.num_output_placeholders}, at most {self.max_total_tokens})"
        )


def check_request(
    message: EngineCoreRequest,
    max_model_len: int,
    max_prompt_step: int | None,
    shortage: Callable[[int], tuple[int, int, int] | None],
) -> None:
    """Raise RequestError when a request could not run even alone.

    `max_prompt_step`: the tokens of a step, if a prompt must fit one step. `shortage`: see `KVCacheManager.shortage`.
    """
    name, num_prompt = message.request_id, len(message.prompt_token_ids)
    max_tokens = message.sampling_params.max_tokens
    if not num_prompt:
        raise RequestError(f"the prompt of request {name!r} has no tokens. Give at least one.", "prompt")
    if message.pooling_params is not None and num_prompt > max_model_len:
        raise RequestError(
            f"the prompt of request {name!r} has {num_prompt} tokens, but max_model_len is {max_model_len}. Shorten "
            "it, or set truncate_prompt_tokens.",
            "prompt",
        )
    if message.pooling_params is None and num_prompt >= max_model_len:
        raise RequestError(
            f"the prompt of request {name!r} has {num_prompt} tokens, but max_model_len is {max_model_len} and at "
            "least one token must be generated. Shorten the prompt or raise max_model_len.",
            "prompt",
        )
    if max_tokens is None or max_tokens < 1:
        raise RequestError(f"request {name!r} asks for max_tokens {max_tokens}. Ask for at least 1.", "max_tokens")
    if max_prompt_step is not None and num_prompt > max_prompt_step:
        raise RequestError(
            f"the prompt of request {name!r} has {num_prompt} tokens, but chunked prefill is off and a step holds "
            f"max_num_batched_tokens = {max_prompt_step}. Shorten the prompt, or turn chunked prefill on.",
            "prompt",
        )
    # The last token is sampled, and never computed.
    num_tokens = min(num_prompt + max_tokens - 1, max(max_model_len - 1, num_prompt))
    if lacking := shortage(num_tokens):
        needed, block_size, usable = lacking
        raise RequestError(
            f"request {name!r} may need {needed} KV blocks of {block_size} tokens for {num_prompt} prompt tokens and "
            f"max_tokens {max_tokens}, but there are {usable}. Shorten the prompt, lower max_tokens, or give the KV "
            "cache more memory.",
            "max_tokens",
        )

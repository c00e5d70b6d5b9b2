"""What crosses a boundary, in order of travel. Read this file first.

    InputProcessor -> EngineCoreRequest -> Scheduler -> SchedulerOutput -> Executor -> ModelRunner
      -> ModelRunnerOutput -> Scheduler -> EngineCoreOutput -> OutputProcessor -> RequestOutput

All are msgspec structs of plain values and numpy arrays: they travel between processes without
pickle. They hold data and no behaviour; this module knows nothing of how a step is computed. Those that come by the
token are `gc=False`: they cannot be part of a cycle, and the garbage collector need not look at them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxpaged.kv_connector.base import KVConnectorMetadata, KVConnectorOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.result import Result
from jaxpaged.sampling_params import SamplingParams

# Why a request ended, as clients see it.
FinishReason = str  # "stop" | "length" | "abort" | "error"

# Progress of long work: what is going on ("weights", "programs"), how much of it is done, how much there is.
Progress = Callable[[str, int, int], None]


class MultiModalFeature(msgspec.Struct, array_like=True):
    """One picture of a prompt, or one moment of a video: the frames that become one grid of embeddings. A video is as
    many of them as it has moments, which are encoded, cached and computed one by one.

    Its `key` of 32 bytes says what the encoder makes of it (`multimodal/identity.py`). It is bound to nothing that a
    client says, and caches on the device, on the host and in block hashes go by it. `grid` is the encoder's output:
    items, rows, columns. Its embeddings replace, in their order, the tokens of `runs`, each of which is a start in the
    prompt and a length. From the first placeholder token to the last, what stands between included, are `length`
    tokens from `offset` on.

    Where tokens have positions in time, row and column, moments that follow each other without a text between begin at
    one position: `moment` counts them from 0, and `time` is what is added to the position in time.
    """

    key: bytes
    modality: str  # "image", "video"
    offset: int
    length: int
    runs: list[tuple[int, int]]
    grid: tuple[int, int, int]
    pixels: np.ndarray | None = None  # uint8, of the processor's shape; None: the core has it by its key, or asks
    embeds: np.ndarray | None = None  # in the model's type, that another engine has computed; within a core only
    is_embeds: bool = False  # `pixels` are the bytes of embeddings in the model's type, [num_embeds, bytes of one]
    moment: int = 0
    time: int = 0

    @property
    def num_embeds(self) -> int:
        """How many embeddings the encoder gives for it."""
        num_items, rows, columns = self.grid
        return num_items * rows * columns

    @property
    def is_encoded(self) -> bool:
        """Whether there are embeddings already: given in place of a picture, or computed by another engine."""
        return self.is_embeds or self.embeds is not None


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An adapter as users name it: the folder `lora_path`, under a name and a number above 0 of its own.

    `base_model_name` is what it says of the model that it adapts. `load_inplace`: it may replace one of the same name.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


class LoRAInfo(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An adapter that was read. `digest` is the SHA-256 of its files in hexadecimal: two versions under one name have
    two of them. `changes_tower`: embeddings of pictures are its own."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    digest: str
    rank: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    changes_tower: bool = False


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A checked, tokenised request on its way to the engine core.

    `sampling_params` is complete: `max_tokens` is a number, `seed` a 64-bit integer, `stop_token_ids` holds the
    model's own end-of-sequence ids unless `ignore_eos`. `eos_token_id` is the id that ends the text with a
    `stop_reason` of None. With `pooling_params` the step that would draw the first token gives the prompt's numbers
    instead, and ends the request; its sampling parameters ask for that one token. `mm_features` are in the order of
    the prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    eos_token_id: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRAInfo | None = None
    mm_features: list[MultiModalFeature] = []
    pooling_params: PoolingParams | None = None


# ---- Scheduler -> ModelRunner ------------------------------------------------------------------


class ProgramKey(NamedTuple):
    """Which compiled program: its kind, and its bucket (0 for programs of a single size)."""

    kind: str
    size: int = 0


class NewRequestData(msgspec.Struct):
    """What the runner must know of a request that it sees for the first time, or again after preemption.

    `token_ids` is everything known so far: prompt, and output when the request was preempted.
    `block_ids[g]` is the block table of KV group g, prefix-cache hits included.
    `is_private`: it has a cache salt, so its speed must tell nothing of others' text, nor theirs of its own.
    `lora_slot`: where the devices have its adapter; 0: it has none.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    sampling_params: SamplingParams
    is_private: bool = False
    mm_features: list[MultiModalFeature] = []  # without pixels
    lora_slot: int = 0


class EncoderInput(msgspec.Struct):
    """A picture that a step's encode programs compute before its forward pass.

    Embedding i goes to page `page_ids[i // page_size]` of the encoder cache, place `i % page_size`. `lora_slot`: of the
    adapter that makes them its own; 0: none does.
    """

    feature: MultiModalFeature  # with pixels
    page_ids: list[int]
    lora_slot: int = 0


class StepPrograms(NamedTuple):
    """The programs of a step, in the order of calls: `draft` proposes tokens, `forward` has the model's layers, and
    `finish` samples tokens, or pools. A multi-step decode is one program, `multi_step`, in their place. None: the step
    has no such program. Before these, `adapters` loads and probes what gets a slot, and `encode` computes pictures."""

    draft: ProgramKey | None = None
    forward: ProgramKey | None = None
    finish: ProgramKey | None = None
    multi_step: ProgramKey | None = None
    encode: tuple[ProgramKey, ...] = ()
    adapters: tuple[ProgramKey, ...] = ()

    @property
    def keys(self) -> list[ProgramKey]:
        """The programs that the step has."""
        one_each = (self.draft, self.forward, self.finish, self.multi_step)
        return [*self.adapters, *self.encode, *(key for key in one_each if key is not None)]


class SchedulerOutput(msgspec.Struct):
    """One step: which requests compute how many tokens. The five lists have one entry for each request.

    A request computes at most `num_scheduled_tokens[i]` tokens, behind those that are computed. While steps before this
    one are in flight, their number and the newest token may be known to the device alone.

    A request gets at most `max_sampled_tokens[i]` tokens: none while the step computes only a part of its prompt,
    otherwise one or several. In a multi-step decode of `num_steps` steps each token but the last is computed, too, and
    gives the next one. With drafts all tokens but the first are drafts, each of which may be the next one.

    The requests of `removed_request_ids` finished, were aborted, or were preempted since the last step, and their rows
    are free. They are removed before `new_requests` are added. The entry of a new request in `new_block_ids` is None,
    since `NewRequestData` has the whole table.

    `masked`: a request that samples follows a grammar. The step samples when it is given masks, which follow from the
    tokens of all steps before it. `programs`: chosen by the executor, once for all workers, which must launch the same.
    `ranks`: the part of each attention rank, where there are several. Then the lists are those of all parts, one after
    the other, and each rank has rows and blocks of its own.

    `encoder_pages` has (request id, index of the feature, its pages) for each feature of which the step computes a
    token, unless a step before it said so since the request's row was taken.

    `lora_loads` has (slot, number of the adapter) for each adapter that the host gives to the devices before the step.
    """

    step_id: int
    new_requests: list[NewRequestData]
    removed_request_ids: list[str]
    request_ids: list[str]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]  # before this step, if steps in flight give their maximum number of tokens
    max_sampled_tokens: list[int]
    new_block_ids: list[tuple[list[int], ...] | None]  # to append, per KV group
    total_num_scheduled_tokens: int = 0
    num_steps: int = 1
    masked: bool = False
    programs: StepPrograms = StepPrograms()
    ranks: list["SchedulerOutput"] = []
    kv_connector_metadata: KVConnectorMetadata | None = None  # None: nothing is kept besides the device, or changes
    encoder_inputs: list[EncoderInput] = []
    encoder_pages: list[tuple[str, int, list[int]]] = []
    lora_loads: list[tuple[int, int]] = []

    @property
    def parts(self) -> Sequence["SchedulerOutput"]:
        """The part of each attention rank, of which there are one or several."""
        return self.ranks or (self,)


# ---- ModelRunner -> Scheduler ------------------------------------------------------------------


class SamplingMasks(msgspec.Struct):
    """The tokens that limits left to be drawn: `token_ids` of all lines, and how many each has, 0 without limits."""

    token_ids: np.ndarray
    counts: np.ndarray


class SampledLogprobs(msgspec.Struct):
    """Log probabilities of one step, a line for every request that sampled.

    `token_ids` and `logprobs` are `[n, 1 + k]`: the sampled token first, then the k most likely in order.
    `ranks` is `[n]`: 1 + the number of tokens strictly more likely than the sampled one.
    `processed` is `[n, 2]`, see `ProcessedLogprob`, where an engine tells raw and processed ones. `masks`: where it
    tells what limits left.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    processed: np.ndarray | None = None
    masks: SamplingMasks | None = None


class PromptLogprobs(msgspec.Struct):
    """Log probabilities of consecutive prompt tokens; the layout is that of `SampledLogprobs`.

    Line i is the distribution from which prompt token `start + i` would have been sampled (`start` >= 1).
    """

    start: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


class StepBuckets(msgspec.Struct, array_like=True):
    """The padded sizes of one step: tokens of `forward`, and rows of `sample`, 0 if no request sampled.

    Each step of a multi-step decode has these sizes. Attention ranks are counted together.
    """

    token_bucket: int
    sample_bucket: int = 0
    full_sampler: bool = False  # penalties, masks or log probabilities were asked for
    program_wait: float = 0.0  # seconds until programs were compiled that this step had to wait for
    num_encoded: int = 0  # embeddings of pictures that the step computed
    encoded_at: float = 0.0  # when the host heard that they were, as `StepRecord` has times


NOTHING_TO_DRAW = "no token can be drawn: what limits this request leaves none. Other requests are unharmed."
"""The reason of a request that failed because no token was allowed next."""


class ModelRunnerOutput(msgspec.Struct):
    """The output of one step. `request_ids` are the requests that could get tokens, in the order of the step.

    `sampled_token_ids[i]` are the tokens that each got, `max_sampled_tokens` of them at most. `logprobs` has a
    line for every token, request after request.

    `failed` maps a request to the reason why its own computation failed (for example logits that are not a
    number); the tokens that it got before are good. Other requests of the step are unharmed.

    A pooling engine gives `pooled`, a float32 line per request, in place of tokens. Where drafts were verified,
    `num_drafts[i]` is how many each request had: a drafter may make fewer than it was asked for.

    `corrupted` are those of the failed ones for which the model computed no finite numbers.

    Where experts are told, `routed_experts` is int16 [tokens, blocks of experts, experts of a token], of the step's
    tokens, request after request; those of tokens that were computed in vain mean nothing.
    """

    step_id: int
    request_ids: list[str]
    sampled_token_ids: list[list[int]] = []
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    failed: dict[str, str] = {}
    buckets: StepBuckets | None = None  # None where nothing is padded
    pooled: np.ndarray | None = None
    num_drafts: list[int] | None = None
    corrupted: list[str] = []
    routed_experts: np.ndarray | None = None
    kv_connector_output: KVConnectorOutput | None = None


# ---- Scheduler -> front end --------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Candidates of one sampled position: the sampled token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the sampled token


class ProcessedLogprob(NamedTuple):
    """Of a drawn token: its log probability among those that it was drawn from, after temperature, penalties, limits;
    and the log of the probability that cuts of the sampler left, 0 without them. Their sum is its log probability as
    if there were no limits."""

    logprob: float
    log_kept_mass: float


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request, and whether it ended."""

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt tokens 1, 2, ...; once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with finish_reason "error"
    error_parameter: str | None = None  # the field of the request that is to blame
    pooled: np.ndarray | None = None  # float32, of a pooling request that is done
    times: tuple[float, float] | None = None  # of queuing and of the first step, s since the epoch; told once
    kv_transfer_params: dict[str, Any] | None = None  # with the end: where another engine finds the prompt's pages
    loaded: dict[str, int] | None = None  # of its cached tokens those from tiers, by the tiers' names; told once
    weight_spans: list[tuple[int, str]] | None = None  # see `CompletionOutput`; told when they have changed
    processed_logprobs: list[ProcessedLogprob] | None = None  # of the new tokens
    sampling_mask: list[list[int]] | None = None  # of the new tokens
    old_kv_from: int | None = None  # see `CompletionOutput`; told with `weight_spans`
    routed_experts: list[np.ndarray] | None = None  # of tokens that were computed, one piece behind the other


class LoRAStats(msgspec.Struct, array_like=True):
    """Adapters by name with how many requests of theirs run, and wait, of those that wait the ones that began first;
    and what was counted since the engine started."""

    max_loras: int = 0
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}
    num_loads: int = 0  # into slots
    num_evictions: int = 0  # from slots
    num_host_hits: int = 0  # requests whose adapter was in host memory, or in a slot, when they came
    num_host_misses: int = 0
    num_host_evictions: int = 0


class WeightStats(msgspec.Struct, array_like=True):
    """What outputs call the weights that compute now, "" for those that the engine loaded; and how many came since."""

    version: str
    num_updates: int


class SchedulerStats(msgspec.Struct, array_like=True):
    """The state of the queues and of the KV cache after a step."""

    step_id: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # 0..1
    prefix_cache_queries: int = 0  # tokens, since the engine started
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_corrupted_reqs: int = 0  # that failed since what the model computed were no finite numbers
    num_scheduled_tokens: int = 0  # of this step
    num_steps: int = 1  # that ran in one program
    sleep_level: int | None = None  # None: the engine is awake
    num_drafts: int = 0  # how often tokens were drafted for a request and verified, since the engine started
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = []  # the first draft, the second, ...
    external_prefix_cache_queries: int = 0  # tokens that were looked for in tiers besides the device
    external_prefix_cache_hits: int = 0
    num_kv_fetches: list[int] = []  # requests whose keys and values are asked for, come, have come and they wait
    mm_cache_queries: int = 0  # pictures that requests looked for in the encoder cache, since the engine started
    mm_cache_hits: int = 0
    mm_cache_usage: float = 0.0  # 0..1, of the encoder cache, by pictures that requests still read
    lora: LoRAStats | None = None  # None: no request has an adapter
    weights: WeightStats | None = None  # None: there were no others than those that the engine loaded


class StepRecord(msgspec.Struct, gc=False):
    """What one finished step held, what it was padded to, and when which part of it happened.

    Times are seconds of `time.perf_counter`. `result_ready` is when the host had the result: the device may have
    been done earlier if nobody waited yet. Buckets are the sizes themselves where nothing is padded.
    A `num_steps` above 1 is a multi-step decode: its tokens are those of all steps, each padded to the buckets.
    """

    step_id: int
    num_tokens: int
    token_bucket: int
    num_requests: int
    num_sampled: int
    sample_bucket: int
    full_sampler: bool
    num_unfinished: int  # requests, after this step
    schedule_begin: float
    schedule_end: float
    dispatch_end: float
    wait_begin: float
    result_ready: float
    update_end: float
    num_steps: int = 1
    program_wait: float = 0.0  # seconds between schedule_end and dispatch_end until programs were compiled
    pages_saved: int = 0  # blocks whose copies off the device were dispatched since the record before
    pages_loaded: int = 0  # whose copies to the device were
    num_encoded: int = 0  # embeddings of pictures that were computed before its tokens
    encoded_at: float = 0.0  # when the host heard that they were; 0: there were none


class WeightInfo(msgspec.Struct):
    """Which weights an engine computes with: `version` is the name of the update that brought them, "" for those that
    it loaded. `num_bytes` have come of the update that is under way, or came with the last one."""

    version: str
    num_updates: int = 0
    is_updating: bool = False
    num_bytes: int = 0


FREE, CACHED, SHARED = -1, -2, -3
"""What a KV block is that is not held by a single request."""


class KVBlockMap(msgspec.Struct):
    """Who holds which KV block at one moment. The arrays are `[B]`, indexed by block id; block 0 is the null block. The
    blocks of further pools, without null blocks, follow those of the first, whose blocks have `block_size` tokens.

    `owner` is an index into `request_ids` and, behind them, `holds`: the oldest request that holds the block, or why
    it is held without one; -1 when nobody does. `num_owners` above 1 is a shared beginning. `cached` blocks hold
    content that a later request can reuse.
    With a `stride` above 1 only the null block and blocks 1, 1 + stride, 1 + 2 * stride, ... are in the arrays. Blocks
    at the end that were never used may be left out.

    Where the engine sees, `picture` has the index in `picture_keys` of the picture that a held block has tokens of, the
    last one if it has several, and -1 for the others. `encoder_picture` has the same for each page of the encoder
    cache, -1 where it is free, and `encoder_held` says whether a request still reads it.
    """

    block_size: int
    request_ids: list[str]  # running, oldest first
    owner: np.ndarray
    num_owners: np.ndarray
    cached: np.ndarray
    stride: int = 1
    holds: list[str] = []
    picture_keys: list[bytes] = []
    picture: np.ndarray | None = None
    encoder_picture: np.ndarray | None = None
    encoder_held: np.ndarray | None = None

    @property
    def kinds(self) -> np.ndarray:
        """What every block is, but the null block: the index of its owner, or SHARED, CACHED or FREE."""
        held = np.where(self.owner >= 0, self.owner, np.where(self.cached, CACHED, FREE))
        return np.where(self.num_owners > 1, SHARED, held)[1:]


class RequestState(msgspec.Struct, array_like=True):
    """How far one unfinished request is. `num_cached_tokens` is -1 before it was first admitted."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    loaded: dict[str, int] = {}  # of the cached tokens those that came from tiers besides the device
    is_loading: bool = False  # it waits for such
    pictures: list[bytes] = []  # the keys of those in its prompt, in their order


class EngineSnapshot(msgspec.Struct):
    """What an engine core does at one moment, as much of it as was asked for.

    `steps` are the newest finished ones, oldest first, and `num_steps_before` came before them since the start.
    `running` are the oldest requests that run, `waiting` some of those that wait, those at the front first.
    `seconds` is the processor's time that it took the core.
    """

    stats: SchedulerStats
    executor: dict[str, Any]
    steps: list[StepRecord]
    num_steps_before: int
    blocks: KVBlockMap
    num_blocks: int
    running: list[RequestState]
    waiting: list[RequestState]
    seconds: float


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """Everything that one engine step tells the front end: at most one output of each request."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats


# ---- front end -> user ---------------------------------------------------------------------------


class Logprob(Result, gc=False):
    """The log probability of one candidate token, its 1-based rank, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class SamplingMask(Result, gc=False):
    """For each token of an output the ids of those that limits left to be drawn, in their order."""

    token_ids: list[list[int]]


class CompletionOutput(Result, gc=False):
    """One generated sequence. `stop_reason` is the stop string or stop token id that ended it, or None.

    `weight_spans`: which weights drew its tokens, as (number of the first token, name of the update); "" for those that
    the engine loaded, and None where they drew all of it. `old_kv_from`: the number of the first token that was drawn
    over keys and values of older weights (`pause_generation` with `clear_cache` False); None: there is none.
    `processed_logprobs`: with `logprobs_mode` raw_and_processed_logprobs, of each token if `logprobs` were asked for.
    `sampling_mask`: with `return_sampling_mask`, if the request had limits.
    `routed_experts`: with `enable_return_routed_experts`, once it is finished: int16 [tokens, blocks of experts,
    experts of a token], of the prompt from `routed_experts_prompt_start` on and of all behind it but the last token.
    -1: nobody knows any more.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_spans: list[tuple[int, str]] | None = None
    processed_logprobs: list[ProcessedLogprob] | None = None
    sampling_mask: SamplingMask | None = None
    old_kv_from: int | None = None
    routed_experts: np.ndarray | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(Result, gc=False):
    """Times of one request in seconds since the epoch; None until reached."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


class RequestOutput(Result, gc=False):
    """The result of one prompt: `outputs` holds `n` sequences, ordered by index.

    `mm_hashes` has the keys of a prompt's pictures in hexadecimal, in order, under "image", and those of the moments of
    its videos under "video"; None without any.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    mm_hashes: dict[str, list[str]] | None = None

"""The seam between the engine and a connector, which keeps keys and values besides the device.

A connector is one object with two sides, named as vLLM's `KVConnectorBase_V1` names them. The scheduler calls
`KVConnectorScheduler` while it decides, so its methods return at once. The worker calls `KVConnectorWorker` around
steps; bytes move in threads. What the first says to the second travels as plain data: `build_connector_meta` returns
it, `SchedulerOutput.kv_connector_metadata` carries it, and `start_load_kv` gets it. What has become of loads and saves
comes back in `ModelRunnerOutput.kv_connector_output`.

A connector never sees blocks of the device. It sees *pages*: the keys and values of `page_tokens` tokens in the layers
of one KV group, as numpy arrays, named by a content hash that covers all tokens before them too. Copying blocks off the
device and back, and cutting blocks into pages, is the engine's. Copies are links of the chain that the steps form, so
a block may be given out again as soon as its copy is dispatched: there is no delayed free, and `request_finished` has
nothing to say about it.

The moments, in the order of a request's life:

    on_new_request              it was queued
    get_num_new_matched_tokens  it could be admitted: how much of it could be loaded, beyond what the device has
    update_state_after_alloc    a load was decided (some tokens), or its first step is scheduled (0 tokens)
    build_connector_meta        the step is complete
      start_load_kv             the worker has the step: begin to fetch, in threads of one's own
      KVLoad.give, finish       a page has come; nothing more will. This is what vLLM's `get_finished` and
                                `get_block_ids_with_load_errors` say: a page that was not given, or whose digest is
                                wrong when it is given, is a load error
      save_kv                   pages that a finished step computed, in one of the engine's threads
    load_finished               its load has ended
    request_finished            it ended

A load that lacks pages is not used beyond them: the rest is computed, or the request fails, as
`kv_load_failure_policy` says. Pages carry digests (`kv_store/page.py`), and only what they confirm reaches the device.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import Piece
from jaxpaged.kv_store.tier import ChunkTiers, Lookup
from jaxpaged.kv_store.tier_events import TierEvent

# ---- what pages look like ----------------------------------------------------------------------


class KVGroupLayout(msgspec.Struct, frozen=True):
    """One KV group: layers whose blocks are allocated together."""

    kind: str
    """ "full_attention", "sliding_window", ..., as in KV events."""
    layer_idxs: tuple[int, ...]
    block_size: int
    """Tokens of a block on the device."""
    sliding_window: int | None
    """Tokens that a layer sees; None: all."""
    page_shape: tuple[int, ...]
    """Of a page's values: [layers, 2, page tokens, KV heads, head dim]; 1 in place of 2 for latents. Of layers with a
    recurrent state: [layers, 1, 1, 1, bytes], a snapshot behind the page's last token."""
    dtype: str
    """numpy's name of the type of a page's values."""
    has_scales: bool = False
    """Whether a page has scales, float32 [layers, 2, page tokens, KV heads]: values were rounded to 8 bits."""


class KVPoolLayout(msgspec.Struct, frozen=True):
    """One pool of blocks, of some groups: how many pieces a copy off the device has, and the bytes of each size. A
    piece is the smallest run of tokens that both blocks and pages end with (`kv_store/pieces.py`)."""

    group_idxs: tuple[int, ...]
    copy_sizes: tuple[int, ...]
    copy_bytes: tuple[int, ...]


class KVCacheLayout(msgspec.Struct, frozen=True):
    """What the pages of an engine look like. `PageKey.group` is an index into `groups`."""

    namespace: str
    """Digest of all that keys and values depend on besides tokens. Engines with equal namespaces may share pages."""
    model: str
    page_tokens: int
    groups: tuple[KVGroupLayout, ...]
    pools: tuple[KVPoolLayout, ...]


# ---- the scheduler's side ----------------------------------------------------------------------

LookUp = Callable[[Sequence[PageKey]], Sequence[Lookup]]
"""For each key whether its page can be loaded. PENDING: not known yet, ask again."""


class KVRequest(Protocol):
    """What a connector sees of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """All that are known: the prompt and what was generated."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client said with the request."""
        ...

    def num_matched_tokens(self, look_up: LookUp) -> int | None:
        """How many tokens of its beginning would be there if all pages that `look_up` finds were loaded, beside what
        the device has. It minds sliding windows, which need their last pages only. None: it may be more once `look_up`
        knows what is PENDING."""
        ...

    def prompt_pieces(self) -> tuple[int, Sequence[Piece]]:
        """(tokens, pieces) of its prompt as far as it fills whole pages: what a request needs that goes on behind it. A
        piece without block ids is not computed yet."""
        ...

    def save_prompt(self) -> None:
        """Save these pages as soon as they are computed, those too that the device had before."""
        ...


class KVConnectorScheduler(Protocol):
    """The scheduler's side. Nothing here waits or moves bytes."""

    name: str
    """For metrics, and for the log."""
    others_wait: bool
    """Whether other engines wait for what is saved, so that it should go sooner and have more room."""

    @property
    def chunk_tiers(self) -> ChunkTiers | None:
        """What is told of texts, where pages are kept in larger chunks that are named by their tokens."""
        ...

    @property
    def outlives_engine(self) -> bool:
        """Whether pages are there when this engine has ended, so that its end is worth waiting for the last of them."""
        ...

    def on_new_request(self, request: KVRequest) -> None:
        """A request was queued."""
        ...

    def expect_request(self, params: Mapping[str, Any], is_coming: bool) -> None:
        """A request with these `kv_transfer_params` may come; not `is_coming`: it will not, or was refused."""
        ...

    def before_look_up(self, request: KVRequest, pages: Sequence[tuple[PageKey, int]]) -> None:
        """These pages, which the device lacks, are looked up for a request next. The number is where the page ends in
        the request, in tokens."""
        ...

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        """How many tokens behind the first `num_computed_tokens`, which the device has, could be loaded. None: ask
        again later; the request waits, and others may overtake it. It changes nothing."""
        ...

    def look_up(self, keys: Sequence[PageKey]) -> Sequence[Lookup]:
        """Whether pages can be loaded. By this several connectors are joined page by page."""
        ...

    def lacks(self, keys: Sequence[PageKey], under_way: Set[PageKey]) -> Sequence[bool]:
        """Whether each page is to be saved: it is not here, nor `under_way`."""
        ...

    def where(self, keys: Sequence[PageKey]) -> Sequence[str]:
        """The name of the place that each page would come from. Loading from it is timed, and compared with
        computing."""
        ...

    def must_load(self, request: KVRequest) -> bool:
        """Whether to load even what could be computed sooner."""
        ...

    def update_state_after_alloc(
        self, request: KVRequest, pages: Sequence[PageContent], num_external_tokens: int
    ) -> None:
        """These pages will be loaded for `num_external_tokens` tokens. Or, with 0, the request has blocks and its next
        step is scheduled. In place of vLLM's blocks there are pages: blocks are given when all pages have come."""
        ...

    def load_finished(self, request: KVRequest) -> None:
        """Its load has ended, is not waited for any longer, or will not be."""
        ...

    def build_connector_meta(self) -> Any:
        """What the worker's side is to know with the next step: plain data, which msgspec encodes. None: nothing."""
        ...

    def request_finished(self, request: KVRequest, is_computed: bool) -> dict[str, Any] | None:
        """A request has ended; `is_computed`: by a stop or by its length, so that its pages are good. Returns the
        `kv_transfer_params` of its last output, if it has any."""
        ...

    def take_params(self) -> dict[str, dict[str, Any]]:
        """`kv_transfer_params` of requests, by id, that clients are to hear of before the end."""
        ...

    def take_events(self) -> Sequence[TierEvent]:
        """What can be loaded since the last call, and what cannot any more. The first call: all that is there."""
        ...


# ---- the worker's side -------------------------------------------------------------------------


class KVPage(Protocol):
    """A page that is saved."""

    @property
    def content(self) -> PageContent:
        """Its key, the hash before it, and its tokens."""
        ...

    @property
    def values(self) -> np.ndarray:
        """Keys and values, of the group's `page_shape`."""
        ...

    @property
    def scales(self) -> np.ndarray | None: ...

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The whole page as bytes, in pieces that belong one behind the other: a safetensors file, whose header has the
        digests. `KVLoad.give` takes them back, as they are or joined."""
        ...


class KVLoad(Protocol):
    """Pages that a request waits for. Any threads may use it."""

    @property
    def request_id(self) -> str: ...

    @property
    def missing(self) -> Sequence[PageContent]:
        """Those that have not come, in the order in which they would be computed."""
        ...

    def give(self, key: PageKey, page: Buffer | Sequence[Buffer], source: str, *, is_checked: bool = False) -> bool:
        """A page has come from the place `source`: the buffers that `save_kv` got, one or several. They are copied.
        `is_checked`: its checksums were compared already. Whether it is the right one; if not, the page did not come,
        and should be removed where it came from."""
        ...

    def finish(self) -> None:
        """Nothing more comes. It must be called in bounded time, whatever fails."""
        ...


class KVConnectorWorker(Protocol):
    """The worker's side."""

    name: str

    def register_kv_caches(self, layout: KVCacheLayout) -> None:
        """Called once, before anything else: what pages look like."""
        ...

    def start_load_kv(self, loads: Sequence[KVLoad], metadata: Any) -> None:
        """Begin to fetch, and return at once. `metadata`: what `build_connector_meta` said. Called by the engine's
        thread; behind another connector in one of that one's."""
        ...

    def save_kv(self, pages: Sequence[KVPage]) -> Sequence[bool]:
        """Keep pages. Called in threads of the engine, several at a time, so it may block. Whether each is kept, or was
        there before. Arrays and buffers are the engine's again when it returns. Takes the place of vLLM's
        `save_kv_layer`."""
        ...

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget these pages: what computed them was wrong. Called in a thread of the engine."""
        ...

    def get_kv_connector_stats(self) -> dict[str, Any]:
        """Counters since the start, by name."""
        ...

    def shutdown(self) -> None:
        """Wait for what `save_kv` has accepted, in bounded time, as vLLM's `wait_for_save` does, and let go of threads
        and files."""
        ...


class KVConnector(KVConnectorScheduler, KVConnectorWorker, Protocol):
    """Both sides. Where scheduler and worker are one process, they are one object."""


class KVConnection(NamedTuple):
    """A connector, and what the pages look like that it was told of."""

    connector: KVConnector
    layout: KVCacheLayout


class KVConnectorBase:
    """What a connector may derive from: all but `look_up`, `start_load_kv`, `save_kv` and `discard` has a default."""

    name = "connector"
    others_wait = False
    layout: KVCacheLayout

    @property
    def chunk_tiers(self) -> ChunkTiers | None:
        return None

    @property
    def outlives_engine(self) -> bool:
        return True

    def on_new_request(self, request: KVRequest) -> None:
        pass

    def expect_request(self, params: Mapping[str, Any], is_coming: bool) -> None:
        pass

    def before_look_up(self, request: KVRequest, pages: Sequence[tuple[PageKey, int]]) -> None:
        pass

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        found = request.num_matched_tokens(self.look_up)
        return None if found is None else max(found - num_computed_tokens, 0)

    def look_up(self, keys: Sequence[PageKey]) -> Sequence[Lookup]:
        raise NotImplementedError

    def lacks(self, keys: Sequence[PageKey], under_way: Set[PageKey]) -> Sequence[bool]:
        states = zip(keys, self.look_up(keys))
        return [state is not Lookup.HIT and key not in under_way for key, state in states]

    def where(self, keys: Sequence[PageKey]) -> Sequence[str]:
        return [self.name] * len(keys)

    def must_load(self, request: KVRequest) -> bool:
        return False

    def update_state_after_alloc(
        self, request: KVRequest, pages: Sequence[PageContent], num_external_tokens: int
    ) -> None:
        pass

    def load_finished(self, request: KVRequest) -> None:
        pass

    def build_connector_meta(self) -> Any:
        return None

    def request_finished(self, request: KVRequest, is_computed: bool) -> dict[str, Any] | None:
        return None

    def take_params(self) -> dict[str, dict[str, Any]]:
        return {}

    def take_events(self) -> Sequence[TierEvent]:
        return ()

    def register_kv_caches(self, layout: KVCacheLayout) -> None:
        self.layout = layout

    def get_kv_connector_stats(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


# ---- what travels ------------------------------------------------------------------------------


class KVSave(msgspec.Struct, tag="save"):
    """Blocks of one pool to copy off the device. Their pages may be kept once step `step_id` is confirmed."""

    save_id: int
    step_id: int
    pool: int
    pages: list[PageContent | None]
    """In the order of the blocks; None: one that is kept already."""
    block_ids: list[int]


class KVWrite(msgspec.Struct, tag="write"):
    """Where the pages of a load go that has come."""

    load_id: int
    block_ids: list[list[int]]
    """Of each piece of the load the ids of its blocks; 0: written nowhere."""


class KVFetch(msgspec.Struct):
    """Pages to fetch into host memory. A piece is as many pages as are whole blocks; `ends`: of each page in the
    request, in tokens."""

    load_id: int
    request_id: str
    pieces: list[list[PageContent]]
    ends: list[int]


class KVConnectorMetadata(msgspec.Struct, omit_defaults=True):
    """What the scheduler says to the worker's side, with a step or between steps."""

    confirmed: int = 0
    """The steps before this number are done: what they computed may be kept."""
    discarded: list[PageKey] = []
    """What must not be kept: a request computed it that failed."""
    given_up: list[PageKey] = []
    """What will not be saved: its blocks are needed sooner than there is room."""
    before_step: list[KVSave | KVWrite] = []
    """Copies ahead of the step, in this order."""
    after_step: list[KVSave] = []
    fetches: list[KVFetch] = []
    connector: Any = None
    """What the connector's `build_connector_meta` returned."""


class FinishedFetch(msgspec.Struct):
    """The end of a fetch: for each page where it came from, "" if it did not come, and how many seconds all took."""

    load_id: int
    sources: list[str]
    seconds: float


class KVConnectorOutput(msgspec.Struct, omit_defaults=True):
    """What has become of loads and saves since the last one."""

    finished_fetches: list[FinishedFetch] = []
    progressed: list[int] = []
    """Fetches that are under way and of which a page has come."""
    finished_saves: list[int] = []
    """Saves whose memory is free again."""

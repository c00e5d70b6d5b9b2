"""Opens stores that are shared with LMCache, for models whose keys and values it lays out as this engine does."""

import hashlib
import logging
import math
from dataclasses import replace

from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_store.lmcache.keys import check_model_name, check_name_length
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.lmcache.lm import LMStore
from jaxpaged.kv_store.lmcache.multiprocess.calls import Calls, UnfitServerError
from jaxpaged.kv_store.lmcache.multiprocess.settings import address_of
from jaxpaged.kv_store.lmcache.multiprocess.store import MPStore
from jaxpaged.kv_store.lmcache.redis_store import RedisChunkStore
from jaxpaged.kv_store.lmcache.settings import DEFAULT_CHUNK_SIZE, ChunkSettings
from jaxpaged.kv_store.lmcache.store import ChunkStore
from jaxpaged.kv_store.lmcache.tier import LMCacheTier
from jaxpaged.kv_store.options import EXACT
from jaxpaged.kv_store.secrets import Secrets
from jaxpaged.kv_store.tier_options import TierWish
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.kv_transfer.forms import PageForm

logger = logging.getLogger(__name__)

MAX_CHUNK_SIZE = 1 << 16
"""Tokens that a server may say a chunk has."""
VLLMS = "fp8_e4m3"
"""The one type of 8 bits whose chunks are shared with vLLM, by the scales that the checkpoint has."""


def agreed_lmcache(
    wish: TierWish, pages: str, engine_spec: EngineSpec, kv_cache: KVCacheConfig, secrets: Secrets
) -> ChunkSettings:
    """The settings of a store, with the tokens of a chunk. Raises ConfigError, before any weight is read, where nothing
    can be shared with LMCache."""
    if secrets.page_secret is not None:
        raise ConfigError(
            "kv_offload_secrets has a page_secret, and LMCache's chunks cannot be signed: whoever can write to the "
            "store writes answers. Leave one of them out."
        )
    if pages != EXACT:
        raise ConfigError(
            f"kv_offload has pages={pages}, and LMCache's chunks hold keys and values as they are cached. Leave one of "
            "them out."
        )
    if engine_spec.draft is not None:
        raise ConfigError("LMCache's chunks have no place for the keys and values of what drafts tokens.")
    settings = agreed_settings(wish)
    layout = layout_of(settings, kv_cache, engine_spec.page_form)
    warn_of_windows(layout.chunk_tokens, kv_cache)
    model = model_of(settings, engine_spec, kv_cache)
    check_model_name(model)
    if not is_multiprocess(wish):
        check_name_length(model, settings.world_size, layout.chunk_dtype.name)
    elif len(layout.groups) > 1:
        raise ConfigError(
            f"LMCache's multi-process server is used for models whose layers all cache alike; this one has "
            f"{len(layout.groups)} groups of layers, which vLLM's connector for it lays out otherwise. An lm:// server "
            "or Redis takes such models."
        )
    return settings


def warn_of_windows(chunk_tokens: int, kv_cache: KVCacheConfig) -> None:
    """Say what is not kept of a model with layers that see fewer tokens than a chunk has."""
    seen = [group.spec.most_seen for group in kv_cache.groups]
    windows = [each for each in seen if each is not None]
    if windows and min(windows) < chunk_tokens:
        logger.warning(
            "LMCache's chunks have %d tokens, and some layers of this model see %d only. Chunks of prompts are stored; "
            "one that an answer fills is stored only if none of its blocks was needed by others before its end. "
            "A chunk_size of at most %d stores all, for engines that have the same.",
            chunk_tokens,
            min(windows),
            largest_fitting(min(windows), kv_cache),
        )


def largest_fitting(window: int, kv_cache: KVCacheConfig) -> int:
    """Tokens of the largest chunk that a window holds, of whole blocks."""
    unit = math.lcm(*kv_cache.block_sizes)
    return max(window // unit * unit, unit)


def is_multiprocess(wish: TierWish) -> bool:
    return wish.place.startswith("grpc:")


def agreed_settings(wish: TierWish) -> ChunkSettings:
    """The settings of a store, with the tokens of a chunk as the server has them, which is asked unless they are
    given; LMCache's default where it does not answer."""
    settings = wish.chunks
    assert settings is not None
    if settings.chunk_size is not None:
        return settings
    calls = Calls(address_of(wish.place), settings.timeout_s)
    try:
        size = calls.ask("GetChunkSize").chunk_size
    except OSError:
        size = DEFAULT_CHUNK_SIZE
    finally:
        calls.close()
    if not 0 < size <= MAX_CHUNK_SIZE:
        raise ConfigError(f"LMCache's server at {wish.place} says that a chunk has {size} tokens.")
    return replace(settings, chunk_size=size)


def model_of(settings: ChunkSettings, engine_spec: EngineSpec, kv_cache: KVCacheConfig) -> str:
    """The model's name in LMCache's names. What vLLM does not cache so has names of its own: LMCache's say of 8 bits
    neither which numbers they are, nor what they are multiplied with."""
    model, cache = engine_spec.config.model.model, engine_spec.config.cache
    name = settings.model if settings.model is not None else model
    if not kv_cache.content or (cache.kv_cache_dtype == VLLMS and not cache.kv_cache_scales):
        return name
    return f"{name}#{hashlib.sha256(kv_cache.content.encode()).hexdigest()[:16]}"


def layout_of(settings: ChunkSettings, kv_cache: KVCacheConfig, form: PageForm) -> ChunkLayout:
    """Raises ConfigError for what LMCache lays out otherwise, or not at all."""
    specs = [group.spec for group in kv_cache.groups]
    heads = {spec.page_heads for spec in specs if spec.page_heads is not None}
    if len(heads) != 1 or any(spec.page_heads is None for spec in specs):
        raise ConfigError(
            "LMCache's chunks are shared for models whose layers all have keys and values of as many heads of one "
            f"size; this one has {', '.join(sorted({type(spec).__name__ for spec in specs}))} with {sorted(heads)}."
        )
    assert settings.chunk_size is not None
    for size in kv_cache.block_sizes:
        if settings.chunk_size % size:
            raise ConfigError(
                f"LMCache's chunk_size is {settings.chunk_size} tokens, and blocks have {size}: it must be a multiple. "
                "Give another block_size."
            )
    forms = {form.of(spec) for spec in specs}
    if len(forms) > 1:
        raise ConfigError(
            "LMCache's chunks have one type, and some layers of this model are cached in 8 bits, others not. Leave "
            "kv_cache_dtype_skip_layers out."
        )
    ((num_heads, head_dim),), (cached,) = heads, forms
    groups = tuple(tuple(group.layer_idxs) for group in kv_cache.groups)
    return ChunkLayout(
        num_layers=sum(map(len, groups)),
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=cached.dtype,
        chunk_tokens=settings.chunk_size,
        groups=groups,
        page_tokens=form.page_tokens,
        num_parts=settings.world_size,
        has_scales=cached.has_scales,
    )


def open_lmcache(
    wish: TierWish, space: str, secrets: Secrets, engine_spec: EngineSpec, kv_cache: KVCacheConfig
) -> LMCacheTier:
    """A tier of pages of the namespace `space` that are shared as LMCache's chunks, as `agreed_lmcache` said."""
    settings = wish.chunks
    assert settings is not None
    layout, model = layout_of(settings, kv_cache, engine_spec.page_form), model_of(settings, engine_spec, kv_cache)
    store: ChunkStore
    if wish.place.startswith("lm:"):
        store = LMStore(wish.place, layout, model, timeout_s=settings.timeout_s)
    elif is_multiprocess(wish):
        store = open_multiprocess(MPStore(wish.place, layout, model, timeout_s=settings.timeout_s))
    else:
        login = secrets.redis_username, secrets.redis_password
        store = RedisChunkStore(wish.place, layout, model, ttl_s=wish.ttl_s, login=login)
    return LMCacheTier(store, settings.hasher(), space)


def open_multiprocess(store: MPStore) -> MPStore:
    """Raises ConfigError for a server that cannot be used as it was started; one that is not there may come."""
    try:
        store.connect()
    except UnfitServerError as error:
        store.close()
        raise ConfigError(f"{store.calls.address}: {error}") from None
    except OSError as error:
        logger.warning(
            "LMCache's server at %s is not there: %.300s. The engine starts without it, for chunks of %d tokens.",
            store.calls.address,
            error,
            store.layout.chunk_tokens,
        )
    return store

"""Opens the tiers that the options name, for the keys and values of one engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import ConfigError, how_to_install, is_installed
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_connector.base import KVConnector
from jaxpaged.kv_connector.guarded import GuardedConnector, check_class, is_connector, open_connector
from jaxpaged.kv_connector.multi import MultiConnector
from jaxpaged.kv_connector.offloading import OffloadingConnector, offloading_to
from jaxpaged.kv_connector.peers import PeersConnector
from jaxpaged.kv_store.connector_options import load_class
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.custom_store import CustomTier, open_store
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.options import EXACT, KVOffload
from jaxpaged.kv_store.page import MAX_HEADER_BYTES, namespace
from jaxpaged.kv_store.peering import Peering
from jaxpaged.kv_store.producer import KVProducer
from jaxpaged.kv_store.redis_tier import RedisTier
from jaxpaged.kv_store.s3 import S3Tier
from jaxpaged.kv_store.secrets import Secrets, read_secrets
from jaxpaged.kv_store.tier import Tier
from jaxpaged.kv_store.tier_options import TierWish
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.layers.rope import inverse_frequencies
from jaxpaged.models.config import DecoderConfig, facts_text
from jaxpaged.params.forms import forms_in_words
from jaxpaged.worker.device import Device
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.lmcache import agreed_lmcache, open_lmcache
from jaxpaged.worker.kv_transfer.transfer import KVTransferWorker

SCAN_SECONDS = 5.0
"""How long the start waits for the disk tier to find its pages; those that it finds later are there later."""
PACKAGES = {"redis": "redis", "s3": "obstore", "grpc": "grpc"}
"""What the stores need that are named so, and the modules that are looked for."""

LEAST_TO_LEND = 1 << 30
"""Bytes that may be lent at a time where no tier says how much there is."""


def check_offload(offload: KVOffload, engine_spec: EngineSpec, kv_cache: KVCacheConfig) -> KVOffload:
    """Raise ConfigError, before any weight is read, for a cache that has no pages of this form, for stores whose
    packages are missing, for strangers' classes that are no connectors, and for files of secrets and certificates that
    are none. Returns the options for `open_transfer`, with what servers said of themselves."""
    if offload.pages != EXACT and not all(group.spec.has_one_scale for group in kv_cache.groups):
        raise ConfigError(
            f"kv_offload has pages={offload.pages}, but this model caches latents or recurrent states, whose parts "
            f"differ too much in size for one scale. Leave it out: pages={EXACT}."
        )
    if offload.pages != EXACT and kv_cache.content:
        raise ConfigError(
            f"kv_offload has pages={offload.pages}, but kv_cache_dtype is {engine_spec.config.cache.kv_cache_dtype}: "
            "pages of such a cache have 8 bits already. Leave pages out."
        )
    for wish in offload.tiers:
        if wish.kind == "custom" and is_connector(made := load_class(wish.place, wish.module)):
            check_class(wish.place, made)
        store = wish.place.partition(":")[0] if wish.kind == "lmcache" else wish.kind
        extra = {"rediss": "redis", "unix": "redis"}.get(store, store)
        if extra in PACKAGES and not is_installed(PACKAGES[extra]):
            raise ConfigError(
                f"kv_offload names a {wish.kind} tier, which needs the package {PACKAGES[extra]}. To install "
                f"it, {how_to_install(extra)}."
            )
    secrets = read_secrets(offload.secrets_file)
    tiers = [
        wish
        if wish.chunks is None
        else replace(wish, chunks=agreed_lmcache(wish, offload.pages, engine_spec, kv_cache, secrets))
        for wish in offload.tiers
    ]
    if offload.peering is not None and (tls := offload.peering.tls) is not None:
        tls.check(lends=offload.peering.lends)
    return replace(offload, tiers=tuple(tiers))


def open_transfer(
    offload: KVOffload, engine_spec: EngineSpec, kv_cache: KVCacheConfig, device: Device, weights_version: str
) -> KVTransferWorker:
    """What carries keys and values to the connectors that the options name, as `check_offload` returned them. Raises
    ConfigError for a folder that can hold no pages, an address that is none, or a stranger's connector that cannot be
    opened."""
    space, secrets = namespace_of(engine_spec, kv_cache, weights_version), read_secrets(offload.secrets_file)
    form, model = engine_spec.page_form, engine_spec.config.model.model
    connectors = open_connectors(offload, engine_spec, kv_cache, space, secrets)
    if offload.peering is not None:
        connectors.append(open_peers(offload, offload.peering, connectors, form, kv_cache, space, secrets))
    if len(connectors) > 1:
        for each in connectors:
            if isinstance(each, GuardedConnector):
                each.check_joined()
    connector = MultiConnector(connectors) if len(connectors) > 1 else connectors[0]
    return KVTransferWorker(device, kv_cache, connector, space, form, secret=secrets.signing, model=model)


def open_connectors(
    offload: KVOffload, engine_spec: EngineSpec, kv_cache: KVCacheConfig, space: str, secrets: Secrets
) -> list[KVConnector]:
    """Those that the options name, in their order. Tiers that follow each other are one connector."""
    form = engine_spec.page_form
    facts = {"model": engine_spec.config.model.model, "page_tokens": form.page_tokens, **form.facts}
    connectors: list[KVConnector] = []
    tiers: list[Tier] = []
    for number, wish in enumerate(offload.tiers):
        made = load_class(wish.place, wish.module) if wish.kind == "custom" else None
        if made is not None and is_connector(made):
            if tiers:
                connectors.append(offloading_to(Tiers(tiers)))
            connectors.append(open_connector(wish.place, made, wish.config))
            tiers = []
        elif wish.chunks is not None:
            tiers.append(open_lmcache(wish, space, secrets, engine_spec, kv_cache))
        else:
            tiers.append(open_tier(wish, space, secrets, facts, is_first=not number))
    return [*connectors, offloading_to(Tiers(tiers))] if tiers else connectors


def open_peers(
    offload: KVOffload,
    peering: Peering,
    connectors: Sequence[KVConnector],
    form: PageForm,
    kv_cache: KVCacheConfig,
    space: str,
    secrets: Secrets,
) -> PeersConnector:
    """The connector between engines, which lends what the tiers among `connectors` have."""
    producer = consumer = None
    if peering.lends:
        stores = [each.tiers for each in connectors if isinstance(each, OffloadingConnector)]
        if not stores:
            raise ConfigError("the engine lends pages, and has no tier to lend from. Add one: kv_offload host=8G.")
        producer = KVProducer(
            stores[0],
            peering.address,
            space,
            lease_s=peering.lease_seconds,
            capacity=max(wish.capacity for wish in offload.tiers) or LEAST_TO_LEND,
            secret=secrets.signing,
            tls=peering.tls,
            shares=peering.shares,
            page_tokens=form.page_tokens,
        )
    if peering.borrows:
        sizes = [
            form.of(group.spec).num_bytes((len(group.layer_idxs), *group.spec.page_shape(form.page_tokens)))
            for group in kv_cache.groups
        ]
        consumer = KVConsumer(
            space,
            max(sizes) + MAX_HEADER_BYTES,
            secrets.signing,
            peers=peering.peers,
            tls=peering.tls,
            shares=peering.shares,
            page_tokens=form.page_tokens,
        )
    return PeersConnector(producer, consumer)


def open_tier(wish: TierWish, space: str, secrets: Secrets, facts: dict[str, Any], *, is_first: bool) -> Tier:
    """One tier of pages of the namespace `space`, of which people are told `facts`. The first has nothing before it
    that keeps pages in memory."""
    secret = secrets.signing
    if wish.kind == "host":
        return HostTier(wish.capacity)
    if wish.kind == "redis":
        login = secrets.redis_username, secrets.redis_password
        return RedisTier(wish.place, space, secret=secret, ttl_s=wish.ttl_s, login=login)
    if wish.kind == "custom":
        store = open_store(wish.place, load_class(wish.place, wish.module), wish.config, space)
        return CustomTier(wish.place.rpartition(":")[2], store, space, secret)
    if wish.kind == "s3":
        return S3Tier(wish.place, space, secret=secret, endpoint=wish.endpoint)
    disk = DiskTier(wish.place, wish.capacity, space, facts=facts, secret=secret, around_cache=not is_first)
    disk.wait_ready(SCAN_SECONDS)
    return disk


def namespace_of(engine_spec: EngineSpec, kv_cache: KVCacheConfig, weights_version: str) -> str:
    """Of all that keys and values depend on besides tokens, and how they are cut into pages. `matmul_backend` says how
    sums are computed on one machine, not what they are. It counts where an engine promises bits. The longest sequence
    counts where angles go by it. Exact pages have no fact about their form."""
    config, form = engine_spec.config, engine_spec.page_form
    bits = config.compile.deterministic
    return namespace(
        weights=(weights_version, config.load.load_format, config.model.seed if not weights_version else 0),
        decoders=tuple(
            facts_text(as_named(each if bits else replace(each, matmul_backend=""))) for each in engine_spec.decoders
        ),
        quantization=weights_fact(engine_spec),
        groups=tuple(str((group.spec.in_pages(form.page_tokens), group.layer_idxs)) for group in kv_cache.groups),
        dtype=engine_spec.kv_dtype.name,
        speculation=str(engine_spec.speculation),
        **({"kv_cache": kv_cache.content} if kv_cache.content else {}),
        **form.facts,
    )


def weights_fact(engine_spec: EngineSpec) -> str | None:
    """How weights were rounded when they were loaded: as the option says, or into the forms that stored ones have."""
    in_few_bits = [spec for spec in jax.tree.leaves(engine_spec.specs) if spec.quantized]
    return engine_spec.config.model.quantization or ", ".join(sorted(forms_in_words(in_few_bits))) or None


def as_named(decoder: DecoderConfig) -> DecoderConfig:
    """Without the limit of an engine, unless the angles of its keys depend on that."""
    ropes = {layer.rope for layer in decoder.layers if layer.rope is not None}
    length = max(decoder.max_model_len, 1)
    differs = any(
        not np.array_equal(inverse_frequencies(rope, length), inverse_frequencies(rope, other))
        for rope in ropes
        for other in (1, decoder.max_position_embeddings, length + 1)
    )
    return decoder if differs else replace(decoder, max_model_len=0)

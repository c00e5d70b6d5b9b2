"""What `kv_transfer_params` of requests and answers say, by vLLM's names: who computed a prompt, and who goes on.

A request with `do_remote_decode` has its prompt's pages lent out when it ends, and its answer says where. That object
goes, unchanged, into the request with `do_remote_prefill` that another engine gets. It knows no sockets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.errors import ConfigError, RequestError

PARAMS = "kv_transfer_params"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
PRODUCES, CONSUMES = ("kv_producer", "kv_both"), ("kv_consumer", "kv_both")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_ADDRESS, DEFAULT_LEASE_SECONDS, DEFAULT_PEERS = "127.0.0.1:0", 30.0, ",".join(LOOPBACK)


NOT_HERE = ("max_load_tokens", "max_offload_tokens", "kv_load_tiers")
"""What vLLM lets a request say of its tiers."""


class TransferParams(msgspec.Struct, frozen=True):
    """The fields that are read; what else there is belongs to others."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None


class RemoteSource(msgspec.Struct, frozen=True):
    """Where pages of a prompt's first `num_tokens` tokens are lent out, and under which lease."""

    host: str
    port: int
    lease: str
    num_tokens: int


def transfer_params(extra_args: Mapping[str, Any] | None) -> TransferParams | None:
    """What a request says. Raises RequestError for what cannot be."""
    given = (extra_args or {}).get(PARAMS)
    if not given:
        return None
    try:
        params = msgspec.convert(given, TransferParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"{PARAMS}: {error}.", PARAMS) from None
    for name in NOT_HERE:
        if given.get(name) is not None:
            raise RequestError(
                f"{PARAMS} has {name}, which this engine does not heed: it loads what is sooner loaded than computed, "
                "and keeps all that is computed. Leave it out.",
                PARAMS,
            )
    if params.do_remote_decode and params.do_remote_prefill:
        raise RequestError(f"{PARAMS} has do_remote_decode and do_remote_prefill. Give one of them.", PARAMS)
    return params


def source_of(params: TransferParams | None) -> RemoteSource | None:
    """Where to pull from, if anywhere. Raises RequestError where that is not said."""
    if params is None or not params.do_remote_prefill:
        return None
    host, port, lease, num_tokens = (
        params.remote_host,
        params.remote_port,
        params.remote_request_id,
        params.remote_num_tokens,
    )
    if not host or port is None or not 0 < port < 1 << 16 or not lease or num_tokens is None or num_tokens < 0:
        raise RequestError(
            f"{PARAMS} has do_remote_prefill, remote_host {host!r:.80}, remote_port {port}, remote_request_id "
            f"{lease!r:.80} and remote_num_tokens {num_tokens}. Pass on the object of the prefill engine's answer as "
            "it is.",
            PARAMS,
        )
    return RemoteSource(host, port, lease[:64], num_tokens)


def check_request(extra_args: Mapping[str, Any] | None, role: str | None, peers: str) -> None:
    """Raise RequestError for a request that an engine of this role does not serve, or a peer that is not allowed."""
    params = transfer_params(extra_args)
    if params is None:
        return
    if role is None:
        raise RequestError(f"{PARAMS} is given, but the engine has no kv_role. Give it one, or leave it out.", PARAMS)
    wanted = {PRODUCES: params.do_remote_decode, CONSUMES: params.do_remote_prefill}
    for roles, is_wanted in wanted.items():
        if is_wanted and role not in roles:
            name = "do_remote_decode" if roles is PRODUCES else "do_remote_prefill"
            raise RequestError(
                f"{PARAMS} has {name}, and the engine's kv_role is {role}. Start it with --kv-role "
                f"{' or '.join(roles)}, or leave it out.",
                PARAMS,
            )
    source = source_of(params)
    if source is not None and not is_allowed(source, peers):
        raise RequestError(
            f"{PARAMS} has remote_host {source.host!r:.80} and remote_port {source.port}, which kv_peers does not "
            f"name. It names {peers}.",
            PARAMS,
        )


def is_allowed(source: RemoteSource, peers: str) -> bool:
    """Whether the operator has named this peer: HOST, for every port of it, or HOST:PORT."""
    names = [name.strip() for name in peers.split(",")]
    return source.host in names or f"{source.host}:{source.port}" in names


def answer_params(
    source: RemoteSource, engine_id: str, block_ids: Sequence[Sequence[int]], expiry: float, tp_size: int = 1
) -> dict[str, Any]:
    """What the answer of a prefill engine says, with all fields that vLLM's has."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(ids) for ids in block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": source.lease,
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_num_tokens": source.num_tokens,
        "remote_blocks_expiry_time": expiry,
        "tp_size": tp_size,
        "transfer_mode": "pull",
    }


def checked_address(address: str) -> tuple[str, int]:
    """HOST:PORT; port 0 is any that is free. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16 or host in ("0.0.0.0", "::", "[::]"):
        raise ConfigError(
            f"kv_address is {address!r}; it must be HOST:PORT, with a host by which other engines reach this one, "
            "such as 127.0.0.1:0, where 0 is any port that is free."
        )
    return host.strip("[]"), int(port)

"""Calls of LMCache's multi-process server over gRPC, each with a time limit. What goes wrong is a ConnectionError.

Nothing here knows what a chunk is. gRPC's own errors do not leave this module.
"""

from typing import Any

from jaxpaged.kv_store.lmcache.multiprocess.settings import HOW_TO_START

MAX_ANSWER_BYTES = 1 << 20
OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # it is on this machine
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_reconnect_backoff_ms", 1000),  # how long it is left alone is for a breaker to say
    ("grpc.use_local_subchannel_pool", 1),  # two engines in one process do not share a connection
)


class UnfitServerError(ConnectionError):
    """The server is there, and cannot be used as it was started."""


class Calls:
    """A connection, which is made when it is first used. `ask` may be used by any number of threads."""

    def __init__(self, address: str, timeout_s: float):
        """`address` is HOST:PORT."""
        import grpc  # an extra: looked for by whoever opens tiers

        from jaxpaged.kv_store.lmcache.multiprocess import lmcache_mp_pb2

        self.messages: Any = lmcache_mp_pb2
        """The module of messages."""
        self.address, self.timeout_s = address, timeout_s
        self._grpc = grpc
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._methods = {
            method.name: self._channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=getattr(lmcache_mp_pb2, method.input_type.name).SerializeToString,
                response_deserializer=getattr(lmcache_mp_pb2, method.output_type.name).FromString,
            )
            for service in lmcache_mp_pb2.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        }

    def ask(self, name: str, timeout_s: float | None = None, **fields: Any) -> Any:
        """The answer of one method, whose request has these fields. Raises ConnectionError, or TimeoutError."""
        request = getattr(self.messages, f"{name}Request")(**fields)
        code = self._grpc.StatusCode
        try:
            return self._methods[name](request, timeout=self.timeout_s if timeout_s is None else timeout_s)
        except self._grpc.RpcError as error:
            if error.code() is code.DEADLINE_EXCEEDED:
                raise TimeoutError(f"it did not answer {name} in time") from None
            if error.code() is code.UNIMPLEMENTED:
                raise UnfitServerError(f"LMCache's server does not know {name}. {HOW_TO_START}") from None
            raise ConnectionError(f"{name} failed, {error.code().name}: {error.details()!s:.200}") from None
        except ValueError as error:  # the channel was closed
            raise ConnectionError(f"{name} was not asked: {error}") from None

    def close(self) -> None:
        """Calls under way end with a ConnectionError."""
        self._channel.close()

"""What a call can fail with, and whether another try may go well."""

import grpc
from google.rpc import error_details_pb2, status_pb2

DETAILS = "grpc-status-details-bin"
FIRST_WAIT = 0.2
LONGEST_WAIT = 10.0


class ClientError(Exception):
    """A call that failed. `code` is gRPC's status, such as "INVALID_ARGUMENT"; `field` names what was wrong with the
    request, and `retry_after` says in how many seconds another try may go well, where the server said so."""

    def __init__(self, code: str, message: str, field: str | None = None, retry_after: float | None = None):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after

    @property
    def may_pass(self) -> bool:
        """Whether the same request may go well later."""
        return self.code == "UNAVAILABLE" or self.retry_after is not None


def client_error(error: grpc.RpcError) -> ClientError:
    """What a gRPC error says, its details read."""
    field, retry_after = None, None
    for name, value in error.trailing_metadata() or ():
        if name == DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                    violations = error_details_pb2.BadRequest.FromString(detail.value).field_violations
                    field = violations[0].field if violations else None
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                    retry_after = delay.seconds + delay.nanos / 1e9
    return ClientError(error.code().name, error.details() or "no reason was given", field, retry_after)


def wait_before(attempt: int, error: ClientError) -> float:
    """Seconds to wait after try `attempt` (0: the first): what the server says, or twice as long each time."""
    return min(error.retry_after or FIRST_WAIT * 2**attempt, LONGEST_WAIT)

"""Errors as gRPC clients see them: a status code, a message, and details of google.rpc.

What a client is told of an exception is decided in `serving/errors.py`; here its kind becomes a code.
"""

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import ErrorKind, as_serving_error

CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.UNFETCHABLE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorKind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
DETAILS = "grpc-status-details-bin"
"""The trailer in which clients look for google.rpc.Status."""
SECTIONS = {"sampling_params": pb.SamplingParams, "chat": pb.Chat}
"""Fields of a request that hold most of what can be wrong, and their messages."""


def told(error: BaseException) -> tuple[grpc.StatusCode, pb.Error]:
    """What a client is told of an exception."""
    refusal = as_serving_error(error)
    code = CODES[refusal.kind]
    message = pb.Error(code=code.value[0], message=refusal.message, retry_after_seconds=refusal.retry_after or 0)
    if refusal.parameter is not None:
        message.field = field_path(refusal.parameter)
    return code, message


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Code, message and trailing metadata of a response that is this error."""
    code, message = told(error)
    status = status_pb2.Status(code=message.code, message=message.message, details=details_of(message))
    return code, message.message, ((DETAILS, status.SerializeToString()),)


def details_of(error: pb.Error) -> list[AnyMessage]:
    details: list[Any] = []
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for each in details:
        packed.append(AnyMessage())
        packed[-1].Pack(each)
    return packed


def field_path(parameter: str) -> str:
    """The path of a field in its request: with the section that it is in, if it is in one."""
    first = parameter.split(".")[0].split("[")[0]
    section = next((name for name, kind in SECTIONS.items() if first in kind.DESCRIPTOR.fields_by_name), None)
    return parameter if section is None else f"{section}.{parameter}"

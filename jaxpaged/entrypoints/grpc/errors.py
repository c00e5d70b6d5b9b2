"""Errors as gRPC clients see them: a status code, a message, and details of google.rpc.

What an exception is to a client is decided for HTTP (`http/errors.py`); here its status becomes a code.
"""

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from jaxpaged.entrypoints.grpc.requests import NAMES
from jaxpaged.entrypoints.http.errors import HttpError, as_http_error, error_message, renamed
from jaxpaged.proto import jaxpaged_pb2 as pb

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
DETAILS = "grpc-status-details-bin"
"""The trailer in which clients look for google.rpc.Status."""
SECTIONS = {"sampling_params": pb.SamplingParams, "chat": pb.Chat}
"""Fields of a request that hold most of what can be wrong, and their messages."""


def told(error: BaseException) -> tuple[grpc.StatusCode, pb.Error]:
    """What a client is told of an exception."""
    as_http = as_http_error(error)
    if as_http.parameter in NAMES:
        as_http = HttpError(as_http.status, *renamed(as_http, NAMES), as_http.headers)
    code = CODES.get(as_http.status, grpc.StatusCode.INTERNAL)
    retry = float(as_http.headers.get("Retry-After", 0))
    message = pb.Error(code=code.value[0], message=error_message(as_http), retry_after_seconds=retry)
    if as_http.parameter is not None:
        message.field = field_path(as_http.parameter)
    return code, message


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Code, message and trailing metadata of an answer that is this error."""
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
    """The field of a request that the HTTP server calls `parameter`, with the section that it is in."""
    first = parameter.split(".")[0].split("[")[0]
    parameter = NAMES.get(first, first) + parameter[len(first) :]
    first = NAMES.get(first, first)
    section = next((name for name, kind in SECTIONS.items() if first in kind.DESCRIPTOR.fields_by_name), None)
    return parameter if section is None else f"{section}.{parameter}"

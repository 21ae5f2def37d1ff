"""Which status and body each error becomes, in each protocol. One table; nothing else in the
server knows one.

A message is passed on as the error wrote it: those of `OsaurusError` never quote prompt text.
Any other exception is answered without its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec
from starlette.responses import Response

from osaurus.errors import (
    AmbiguousModel,
    BundleError,
    Cancelled,
    ContextLengthExceeded,
    DamagedBundle,
    DeviceLost,
    DownloadError,
    EngineError,
    EngineShutdown,
    IncompleteBundle,
    InsufficientResources,
    InvalidField,
    InvalidMaxBatchSize,
    LimitError,
    ModelNotFound,
    ModelNotLoaded,
    NoChatTemplate,
    OsaurusError,
    PayloadTooLarge,
    RateLimited,
    RequestFailed,
    RequestTimedOut,
    ServerOverloaded,
    TemplateError,
    ToolChoiceUnsatisfied,
    ToolsUnsupported,
    UnsupportedBundle,
    UserError,
)
from osaurus.server.paths import Protocol
from osaurus.settings.files import SettingsFileError


class RequestRefused(UserError):
    """A fault of the HTTP request itself. `code` is one of `_KINDS`."""

    def __init__(self, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Kind:
    """`openai_type` and `anthropic_type` are the words those protocols have for it."""

    status: int
    openai_type: str
    anthropic_type: str


_BAD_REQUEST = Kind(400, "invalid_request_error", "invalid_request_error")
_NOT_FOUND = Kind(404, "invalid_request_error", "not_found_error")
_FORBIDDEN = Kind(403, "forbidden", "permission_error")
_INTERNAL = Kind(500, "internal_error", "api_error")
_NO_RESOURCES = Kind(503, "insufficient_resources", "overloaded_error")
_UNAVAILABLE = Kind(503, "service_unavailable", "api_error")

#: By `OsaurusError.code`. A broken bundle is a 400: trying again cannot help, and clients
#: retry what begins with 5.
_KINDS: Mapping[str, Kind] = {
    UserError.code: _BAD_REQUEST,
    InvalidField.code: _BAD_REQUEST,
    ContextLengthExceeded.code: _BAD_REQUEST,
    TemplateError.code: _BAD_REQUEST,
    NoChatTemplate.code: _BAD_REQUEST,
    ToolsUnsupported.code: _BAD_REQUEST,
    ToolChoiceUnsatisfied.code: _BAD_REQUEST,
    InvalidMaxBatchSize.code: _BAD_REQUEST,
    IncompleteBundle.code: _BAD_REQUEST,
    DamagedBundle.code: _BAD_REQUEST,
    UnsupportedBundle.code: _BAD_REQUEST,
    ModelNotFound.code: _NOT_FOUND,
    AmbiguousModel.code: _NOT_FOUND,
    ModelNotLoaded.code: _NOT_FOUND,
    "unknown_path": _NOT_FOUND,
    "response_not_found": _NOT_FOUND,
    "previous_response_not_found": _BAD_REQUEST,
    "method_not_allowed": Kind(405, "invalid_request_error", "invalid_request_error"),
    "unsupported_endpoint": Kind(501, "invalid_request_error", "invalid_request_error"),
    "override_active": Kind(409, "invalid_request_error", "invalid_request_error"),
    "invalid_api_key": Kind(401, "authentication_error", "authentication_error"),
    "request_incomplete": Kind(408, "invalid_request_error", "timeout_error"),
    "forbidden_host": _FORBIDDEN,
    "forbidden_origin": _FORBIDDEN,
    "local_only": _FORBIDDEN,
    "headers_too_large": Kind(431, "invalid_request_error", "invalid_request_error"),
    PayloadTooLarge.code: Kind(413, "payload_too_large", "request_too_large"),
    Cancelled.code: Kind(499, "request_cancelled", "request_cancelled"),
    LimitError.code: _NO_RESOURCES,
    ServerOverloaded.code: Kind(503, "server_overloaded", "overloaded_error"),
    RateLimited.code: Kind(429, "rate_limit_exceeded", "rate_limit_error"),
    RequestTimedOut.code: Kind(504, "timeout_error", "timeout_error"),
    InsufficientResources.code: _NO_RESOURCES,
    BundleError.code: _UNAVAILABLE,
    DownloadError.code: _UNAVAILABLE,
    EngineShutdown.code: _UNAVAILABLE,
    DeviceLost.code: _UNAVAILABLE,
    SettingsFileError.code: _UNAVAILABLE,
    EngineError.code: _INTERNAL,
    RequestFailed.code: _INTERNAL,
}


def status_of(error: OsaurusError) -> int:
    return _KINDS.get(error.code, _INTERNAL).status


def error_body(error: OsaurusError, protocol: Protocol) -> bytes:
    """The error in the protocol's own shape, as one line of JSON."""
    return msgspec.json.encode(_envelope(error, protocol))


def error_response(error: OsaurusError, protocol: Protocol) -> Response:
    headers = dict(error.headers) if isinstance(error, RequestRefused) else {}
    if isinstance(error, ServerOverloaded):
        headers["retry-after"] = str(error.retry_after_s)
    return Response(
        error_body(error, protocol),
        status_of(error),
        headers=headers,
        media_type="application/json",
    )


def _envelope(error: OsaurusError, protocol: Protocol) -> dict[str, Any]:
    kind = _KINDS.get(error.code, _INTERNAL)
    match protocol:
        case "openai" | "responses":
            body = {
                "code": error.code,
                "message": error.message,
                "param": param_of(error, protocol),
                "type": kind.openai_type,
            }
            return {"error": body}
        case "anthropic":
            body = {"type": kind.anthropic_type, "message": error.message}
            return {"type": "error", "error": body}
        case "ollama":
            return {"error": error.message}
        case _:
            assert_never(protocol)


def param_of(error: OsaurusError, protocol: Protocol) -> str | None:
    """The field of the request that the error is about, where one is."""
    match error:
        case InvalidField():
            return error.field
        case ModelNotFound() | ModelNotLoaded() | BundleError() | NoChatTemplate():
            return "model"
        case ToolsUnsupported():
            return "tools"
        case ToolChoiceUnsatisfied():
            return "tool_choice"
        case ContextLengthExceeded():
            return "input" if protocol == "responses" else error.field
        case TemplateError():
            return "input" if protocol == "responses" else "messages"
        case _:
            return None

"""Which status and body each error becomes. One table; nothing else in the server knows one.

A message is passed on as the error wrote it: those of `OsaurusError` never quote prompt text.
Any other exception is answered without its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from osaurus.errors import (
    AmbiguousModel,
    BundleError,
    Cancelled,
    ContextLengthExceeded,
    DownloadError,
    EngineError,
    EngineShutdown,
    IncompleteBundle,
    InsufficientResources,
    InvalidField,
    InvalidMaxBatchSize,
    LimitError,
    ModelNotFound,
    NoChatTemplate,
    OsaurusError,
    PayloadTooLarge,
    RequestFailed,
    ServerOverloaded,
    TemplateError,
    ToolChoiceUnsatisfied,
    ToolsUnsupported,
    UnsupportedBundle,
    UserError,
)
from osaurus.settings.files import SettingsFileError


class RequestRefused(UserError):
    """A fault of the HTTP request itself. `code` is one of `_KINDS`."""

    def __init__(self, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Kind:
    status: int
    openai_type: str


_BAD_REQUEST = Kind(400, "invalid_request_error")
_NOT_FOUND = Kind(404, "invalid_request_error")
_INTERNAL = Kind(500, "internal_error")

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
    UnsupportedBundle.code: _BAD_REQUEST,
    ModelNotFound.code: _NOT_FOUND,
    AmbiguousModel.code: _NOT_FOUND,
    "unknown_path": _NOT_FOUND,
    "method_not_allowed": Kind(405, "invalid_request_error"),
    "override_active": Kind(409, "invalid_request_error"),
    "forbidden_host": Kind(403, "forbidden"),
    "forbidden_origin": Kind(403, "forbidden"),
    "local_only": Kind(403, "forbidden"),
    "headers_too_large": Kind(431, "invalid_request_error"),
    PayloadTooLarge.code: Kind(413, "payload_too_large"),
    Cancelled.code: Kind(499, "request_cancelled"),
    LimitError.code: Kind(503, "insufficient_resources"),
    ServerOverloaded.code: Kind(503, "server_overloaded"),
    InsufficientResources.code: Kind(503, "insufficient_resources"),
    BundleError.code: Kind(503, "service_unavailable"),
    DownloadError.code: Kind(503, "service_unavailable"),
    EngineShutdown.code: Kind(503, "service_unavailable"),
    SettingsFileError.code: Kind(503, "service_unavailable"),
    EngineError.code: _INTERNAL,
    RequestFailed.code: _INTERNAL,
}


def status_of(error: OsaurusError) -> int:
    return _KINDS.get(error.code, _INTERNAL).status


def openai_body(error: OsaurusError) -> bytes:
    """`{"error": {message, type, param, code}}`, the last two null where they say nothing."""
    body: dict[str, Any] = {
        "error": {
            "code": error.code,
            "message": error.message,
            "param": _param_of(error),
            "type": _KINDS.get(error.code, _INTERNAL).openai_type,
        }
    }
    return msgspec.json.encode(body)


def error_response(error: OsaurusError) -> Response:
    headers = dict(error.headers) if isinstance(error, RequestRefused) else {}
    if isinstance(error, ServerOverloaded):
        headers["retry-after"] = str(error.retry_after_s)
    return Response(
        openai_body(error), status_of(error), headers=headers, media_type="application/json"
    )


def _param_of(error: OsaurusError) -> str | None:
    match error:
        case InvalidField():
            return error.field
        case ModelNotFound() | BundleError() | NoChatTemplate():
            return "model"
        case ToolsUnsupported():
            return "tools"
        case ToolChoiceUnsatisfied():
            return "tool_choice"
        case ContextLengthExceeded() | TemplateError():
            return "messages"
        case _:
            return None

"""Every error osaurus raises on purpose, as one tree; each leaf has a stable `code`.

    OsaurusError
    ├── UserError            the request, flag or file is wrong: change it        (HTTP 4xx)
    │   ├── InvalidField         a field's type, range or combination
    │   ├── ContextLengthExceeded
    │   ├── ModelNotFound
    │   ├── AmbiguousModel
    │   ├── ModelNotLoaded       it is there, and the settings let no request load it
    │   ├── TemplateError        the bundle's chat template refused the messages
    │   │   ├── NoChatTemplate       the bundle has none: it completes raw text only
    │   │   └── ToolsUnsupported     it has no place for tools, and nothing can stand in
    │   └── ToolChoiceUnsatisfied    a call was required and the model made none
    ├── LimitError           correct, but more than this process may take         (HTTP 413/429/50x)
    │   ├── PayloadTooLarge
    │   ├── ServerOverloaded
    │   │   └── RateLimited          more requests in a minute than the settings allow
    │   ├── RequestTimedOut          an answer that took longer than the settings allow
    │   └── InsufficientResources
    │       └── LoadRefused          a load that would disturb what others use
    ├── BundleError          the model folder is damaged, unfinished or unsupported
    │   ├── IncompleteBundle
    │   ├── DamagedBundle
    │   ├── UnsupportedBundle
    │   └── DownloadError
    ├── EngineError          the engine refused or failed
    │   ├── EngineShutdown
    │   ├── DeviceLost           the device answers nothing more in this process
    │   ├── InvalidMaxBatchSize
    │   └── RequestFailed        one request failed; the engine goes on
    └── Cancelled            the request was cancelled by its consumer

A message says what was given, which limit or rule it met (with the number) and what to
change. It never quotes prompt text. HTTP statuses live in `server/errors.py`.
"""

from __future__ import annotations


class OsaurusError(Exception):
    """Base of the tree. `code` is stable and may be matched by programs."""

    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UserError(OsaurusError):
    code = "invalid_request_error"


class InvalidField(UserError):
    """A field of a request or setting is missing, of the wrong type or out of range."""

    code = "invalid_value"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextLengthExceeded(UserError):
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"prompt is too long: {prompt_tokens} tokens > {max_tokens} maximum; "
            "shorten the messages or load a model with a longer context"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.field = "messages"  #: of the request; a raw prompt has another name


#: Of a name that leads nowhere, what an error repeats.
_LONGEST_NAME = 200


class ModelNotFound(UserError):
    code = "model_not_found"

    def __init__(self, model: str, hint: str = "") -> None:
        shown = model if len(model) <= _LONGEST_NAME else f"{model[:_LONGEST_NAME]}..."
        super().__init__(f"model {shown!r} not found" + (f"; {hint}" if hint else ""))
        self.model = model


class AmbiguousModel(ModelNotFound):
    def __init__(self, model: str, candidates: list[str]) -> None:
        super().__init__(model, "the name fits several models: " + ", ".join(candidates))
        self.candidates = candidates


class ModelNotLoaded(UserError):
    """Models load by hand only; `model` is not one that is loaded."""

    code = "model_not_loaded"

    def __init__(self, model: str, setting: str) -> None:
        super().__init__(
            f"model {model!r} is not loaded and {setting} is false; load it with "
            f"`POST /admin/preload`, or set {setting} to true"
        )
        self.model = model


class TemplateError(UserError):
    code = "chat_template_error"


class NoChatTemplate(TemplateError):
    code = "no_chat_template"


class ToolsUnsupported(TemplateError):
    code = "tools_unsupported_by_template"


class ToolChoiceUnsatisfied(UserError):
    code = "tool_choice_unsatisfied"


class LimitError(OsaurusError):
    code = "limit_exceeded"


class PayloadTooLarge(LimitError):
    code = "payload_too_large"


class ServerOverloaded(LimitError):
    """The queue is full. `retry_after_s` is advice for the client."""

    code = "server_overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(ServerOverloaded):
    code = "rate_limit_exceeded"


class RequestTimedOut(LimitError):
    code = "answer_timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the answer took longer than the {limit_s:g} s that network.timeoutSeconds allows; "
            "ask for fewer tokens or raise it"
        )
        self.limit_s = limit_s


class InsufficientResources(LimitError):
    code = "insufficient_resources"


class LoadRefused(InsufficientResources):
    """Not now: loading this model would take memory that others use."""


class BundleError(OsaurusError):
    code = "bundle_error"


class IncompleteBundle(BundleError):
    code = "incomplete_bundle"


class DamagedBundle(BundleError):
    """Files that contradict themselves or their format."""

    code = "damaged_bundle"


class UnsupportedBundle(BundleError):
    code = "unsupported_bundle"


class DownloadError(BundleError):
    code = "download_error"


class EngineError(OsaurusError):
    code = "engine_error"


class EngineShutdown(EngineError):
    code = "engine_shutdown"


class DeviceLost(EngineError):
    code = "device_lost"

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"the device {device} answers no more in this process ({reason}); restart the server, "
            "or set performance.device to another device"
        )
        self.device = device


class InvalidMaxBatchSize(EngineError):
    code = "invalid_max_batch_size"

    def __init__(self, given: int) -> None:
        super().__init__(f"max_batch_size must be at least 1, got {given}")
        self.given = given


class RequestFailed(EngineError):
    code = "request_failed"


class Cancelled(OsaurusError):
    code = "request_cancelled"

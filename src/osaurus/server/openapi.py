"""`GET /openapi.json`: what is served, as one OpenAPI document made from the wire structs.

A path stands here once, under the spelling that its clients use; `paths.py` has the others. A
test holds the table to the routes of the running app.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from osaurus import __version__
from osaurus.server.apis.admin_cache import ClearBody
from osaurus.server.apis.admin_generation import GenerationSettings
from osaurus.server.apis.admin_models import PreloadBody, UnloadBody
from osaurus.server.apis.admin_prompt import RenderedPrompt
from osaurus.server.apis.admin_settings import OverrideBody
from osaurus.server.apis.anthropic_wire import AnswerMessage as AnthropicAnswer
from osaurus.server.apis.anthropic_wire import MessagesBody, TokenCount
from osaurus.server.apis.embeddings import EmbeddingList, EmbeddingsBody
from osaurus.server.apis.images import UNSUPPORTED
from osaurus.server.apis.models import WireModel, WireModelList
from osaurus.server.apis.ollama_embed import EmbedAnswer, EmbedBody
from osaurus.server.apis.ollama_models import ModelName
from osaurus.server.apis.ollama_pull import PullBody, PullLine
from osaurus.server.apis.ollama_request import ChatBody, GenerateBody
from osaurus.server.apis.ollama_show import ShownModel
from osaurus.server.apis.ollama_wire import Line
from osaurus.server.apis.openai_completions_wire import CompletionAnswer, CompletionBody
from osaurus.server.apis.openai_wire import ChatCompletion, ChatCompletionBody
from osaurus.server.apis.responses_wire import (
    CompactBody,
    CompactedConversation,
    DeletedResponse,
    ItemList,
    ResponseObject,
    ResponsesBody,
)
from osaurus.server.apis.tokenize import DetokenizeBody, TokenizeBody, Tokens
from osaurus.server.paths import Protocol, normalize, protocol_of_path
from osaurus.types.sampling import INTEGER_FIELDS, RANGES

_JSON = "application/json"
_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`path` is the published spelling. `body` and `answer` are wire types; an answer of `Any`
    is an object that grows, of None no JSON. `stream` is the media type of a streamed answer."""

    method: str
    path: str
    summary: str
    body: Any = None
    answer: Any = Any
    stream: str = ""
    is_unsupported: bool = False

    @property
    def protocol(self) -> Protocol:
        return protocol_of_path(*normalize(self.path))


def _post(path: str, summary: str, body: Any, answer: Any = Any, stream: str = "") -> Operation:
    return Operation(
        method="POST", path=path, summary=summary, body=body, answer=answer, stream=stream
    )


def _get(path: str, summary: str, answer: Any = Any) -> Operation:
    return Operation(method="GET", path=path, summary=summary, answer=answer)


def _unsupported(path: str) -> Operation:
    return Operation(
        method="POST", path=path, summary="Not served: 501 with the reason.", is_unsupported=True
    )


OPERATIONS: tuple[Operation, ...] = (
    _post("/v1/chat/completions", "OpenAI chat.", ChatCompletionBody, ChatCompletion, _EVENTS),
    _post("/v1/completions", "OpenAI text completion.", CompletionBody, CompletionAnswer, _EVENTS),
    _post("/v1/embeddings", "OpenAI embeddings.", EmbeddingsBody, EmbeddingList),
    _post("/v1/responses", "Open Responses.", ResponsesBody, ResponseObject, _EVENTS),
    _post("/v1/responses/compact", "A shorter conversation.", CompactBody, CompactedConversation),
    _post("/v1/responses/input_tokens", "Tokens of a response's input.", ResponsesBody),
    _get("/v1/responses/{response_id}", "A stored response.", ResponseObject),
    Operation(
        method="DELETE",
        path="/v1/responses/{response_id}",
        summary="Forget a stored response.",
        answer=DeletedResponse,
    ),
    _post("/v1/responses/{response_id}/cancel", "End a response that runs.", None, ResponseObject),
    _get("/v1/responses/{response_id}/input_items", "What a response was made from.", ItemList),
    _post("/v1/messages", "Anthropic Messages.", MessagesBody, AnthropicAnswer, _EVENTS),
    _post("/v1/messages/count_tokens", "Tokens of a Messages request.", MessagesBody, TokenCount),
    _get("/v1/models", "Every model on this machine.", WireModelList),
    _get("/v1/models/{model_id}", "One model.", WireModel),
    _post("/tokenize", "Text or a chat to token ids.", TokenizeBody, Tokens),
    _post("/detokenize", "Token ids to text.", DetokenizeBody),
    _post("/api/chat", "Ollama chat.", ChatBody, Line, _LINES),
    _post("/api/generate", "Ollama completion.", GenerateBody, Line, _LINES),
    _post("/api/embed", "Ollama embeddings.", EmbedBody, EmbedAnswer),
    _get("/api/version", "The version of Ollama's protocol."),
    _get("/api/tags", "Every model on this machine, as Ollama lists them."),
    _get("/api/ps", "What is loaded."),
    _post("/api/show", "What is known of one model.", ModelName, ShownModel),
    _post("/api/pull", "Download a model.", PullBody, PullLine, _LINES),
    Operation(
        method="DELETE", path="/api/delete", summary="Delete a model.", body=ModelName, answer=None
    ),
    *(_unsupported(f"/v1{path}") for path in UNSUPPORTED),
    *(_unsupported(f"/api/{name}") for name in ("create", "copy", "push", "blobs/{digest}")),
    _get("/", "What Ollama's clients look for.", None),
    _get("/health", "Alive, and what is held."),
    _get("/health/ready", "Whether to send requests."),
    _get("/metrics", "Figures for Prometheus.", None),
    _get("/openapi.json", "This document."),
    _get("/admin/cache-stats", "What the prompt caches hold."),
    _post("/admin/cache/clear", "Empty them.", ClearBody),
    _get("/admin/runtime-settings", "The settings."),
    Operation(
        method="PUT",
        path="/admin/runtime-settings",
        summary="Replace the settings.",
        body=dict[str, Any],
    ),
    Operation(
        method="PATCH",
        path="/admin/runtime-settings",
        summary="Change some settings.",
        body=dict[str, Any],
    ),
    _post("/admin/runtime-overrides", "Settings for a while.", OverrideBody),
    Operation(
        method="DELETE",
        path="/admin/runtime-overrides/{token}",
        summary="End that.",
    ),
    _post(
        "/admin/render-prompt",
        "The prompt of a chat that is not run.",
        ChatCompletionBody,
        RenderedPrompt,
    ),
    _get(
        "/admin/generation-settings",
        "Each model's sampling settings and last request.",
        GenerationSettings,
    ),
    _post("/admin/preload", "Load a model.", PreloadBody),
    _post("/admin/unload", "Unload one model, or all.", UnloadBody),
)

_ERRORS: Mapping[Protocol, Mapping[str, Any]] = {
    "openai": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "anthropic": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
    "ollama": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
}


async def openapi(request: Request) -> Response:
    return Response(msgspec.json.encode(document()), media_type=_JSON)


@functools.cache
def document() -> dict[str, Any]:
    types = [each for op in OPERATIONS for each in (op.body, op.answer) if _is_struct(each)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    _name_ranges(components)
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "osaurus", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(op: Operation, known: Mapping[Any, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in op.path.split("/") if part.startswith("{")]
    error = _ERRORS["openai" if op.protocol == "responses" else op.protocol]
    answers: dict[str, Any] = {"default": {"description": "What went wrong.", **_content(error)}}
    if op.is_unsupported:
        answers["501"] = answers["default"]
    else:
        answers["200"] = {"description": "Done.", **_answer(op, known)}
    described: dict[str, Any] = {"summary": op.summary, "responses": answers}
    if op.path == "/health/ready":
        answers["503"] = {"description": "Not now.", **_content({"type": "object"})}
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if op.body is not None:
        schema = known[op.body] if _is_struct(op.body) else {"type": "object"}
        described["requestBody"] = {"required": True, **_content(schema)}
    return described


def _answer(op: Operation, known: Mapping[Any, Any]) -> dict[str, Any]:
    if op.answer is None:
        return {}
    schema = known[op.answer] if _is_struct(op.answer) else {"type": "object"}
    found = _content(schema)
    if op.stream:
        found["content"][op.stream] = {"schema": {"type": "string"}}
    return found


def _content(schema: Any) -> dict[str, Any]:
    return {"content": {_JSON: {"schema": schema}}}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _name_ranges(components: Mapping[str, Any]) -> None:
    """Sampling numbers are checked behind the wire, so that the structs say nothing of them."""
    for component in components.values():
        for name, schema in component.get("properties", {}).items():
            if name in RANGES and set(schema) <= {"default"}:
                kind = "integer" if name in INTEGER_FIELDS else "number"
                schema |= {"type": [kind, "null"], "description": str(RANGES[name])}

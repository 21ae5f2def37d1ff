"""The ASGI application: what every request passes, and the one table of routes.

    exchange (id, log line) -> header limits -> Host and Origin -> declared body length -> key
    -> path spelling -> route -> handler;   every error, wherever it was raised, -> `errors.py`

Handlers raise; only this file turns an exception into a response.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from osaurus.chat.service import ChatEngine
from osaurus.errors import Cancelled, OsaurusError
from osaurus.server.apis.admin_cache import CacheAdmin
from osaurus.server.apis.admin_generation import GenerationAdmin
from osaurus.server.apis.admin_models import ModelAdmin
from osaurus.server.apis.admin_prompt import PromptAdmin
from osaurus.server.apis.admin_settings import SettingsAdmin
from osaurus.server.apis.anthropic import AnthropicMessages
from osaurus.server.apis.anthropic_signature import ThinkingSigner
from osaurus.server.apis.embeddings import OpenAIEmbeddings
from osaurus.server.apis.images import UNSUPPORTED, unsupported
from osaurus.server.apis.models import ModelCatalog
from osaurus.server.apis.ollama_chat import OllamaChat
from osaurus.server.apis.ollama_embed import OllamaEmbed
from osaurus.server.apis.ollama_models import OllamaModels, refusal
from osaurus.server.apis.ollama_pull import OllamaPull
from osaurus.server.apis.openai_chat import OpenAIChat
from osaurus.server.apis.openai_completions import OpenAICompletions
from osaurus.server.apis.responses import Responses
from osaurus.server.apis.tokenize import Tokenization
from osaurus.server.auth import KeyGuard
from osaurus.server.errors import RequestRefused, error_response
from osaurus.server.exchange import Exchange
from osaurus.server.health import Health, Readiness
from osaurus.server.limits import Admission, bounded_body, check_headers
from osaurus.server.metrics import Metrics
from osaurus.server.openapi import openapi
from osaurus.server.origins import OriginPolicy, preflight_headers
from osaurus.server.paths import protocol_of, rewrite
from osaurus.server.slow_clients import impatient_send, patient_body
from osaurus.server.sse import PING_INTERVAL_S
from osaurus.settings.paths import signing_key

logger = logging.getLogger(__name__)

_Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """`inference_limit` counts requests that run or wait, over all models; None is eight batches
    and a few, of the batch size that holds now."""

    origins: OriginPolicy = field(default_factory=lambda: OriginPolicy(bound_host="127.0.0.1"))
    guard: KeyGuard = field(default_factory=KeyGuard)
    max_body_bytes: int = 32 * 1024 * 1024
    inference_limit: int | None = None
    ping_interval_s: float = PING_INTERVAL_S
    signing_key: Path = field(default_factory=lambda: signing_key().path)


def build_app(chat: ChatEngine, config: AppConfig, readiness: Readiness | None = None) -> App:
    """Paths are normal ones (`paths.py`): every route also answers under its prefixes."""
    admission = Admission(
        lambda: config.inference_limit or 8 * chat.runtime.capacity + 4,
        per_minute=lambda: None if chat.live is None else chat.live.requests_per_minute,
    )
    metrics = Metrics(chat.runtime, admission)
    chat.observe = metrics.observe
    health = Health(chat.runtime, admission, readiness or Readiness(), chat.live)
    residents = ModelAdmin(chat.runtime)
    openai = OpenAIChat(chat, admission, ping_interval_s=config.ping_interval_s)
    anthropic = AnthropicMessages(
        chat,
        admission,
        ThinkingSigner(config.signing_key),
        ping_interval_s=config.ping_interval_s,
    )
    ollama = OllamaChat(chat, admission)
    ollama_models = OllamaModels(chat.runtime)
    completions = OpenAICompletions(chat, admission, ping_interval_s=config.ping_interval_s)
    embeddings = OpenAIEmbeddings(chat, admission)
    ollama_embed = OllamaEmbed(chat, admission, embeddings.embeddings)
    tokens = Tokenization(chat)
    responses = Responses(chat, admission, ping_interval_s=config.ping_interval_s)
    models = ModelCatalog(chat.runtime)
    cache = CacheAdmin(chat.runtime, chat.live)
    settings = SettingsAdmin(chat.runtime, chat.live)
    generation = GenerationAdmin(chat.runtime, chat.records)
    table: tuple[tuple[str, str, _Handler], ...] = (
        ("POST", "/chat/completions", openai.chat_completions),
        ("POST", "/completions", completions.completions),
        ("POST", "/embeddings", ollama_embed.embeddings),
        ("POST", "/embed", ollama_embed.embed),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        *(("POST", path, unsupported(needs)) for path, needs in UNSUPPORTED.items()),
        ("POST", "/messages", anthropic.messages),
        ("POST", "/messages/count_tokens", anthropic.count_tokens),
        ("POST", "/chat", ollama.chat),
        ("POST", "/generate", ollama.generate),
        ("GET", "/", ollama_models.banner),
        ("GET", "/version", ollama_models.version),
        ("GET", "/tags", ollama_models.tags),
        ("GET", "/ps", ollama_models.ps),
        ("POST", "/show", ollama_models.show),
        ("DELETE", "/delete", ollama_models.delete),
        ("POST", "/pull", OllamaPull().pull),
        ("POST", "/create", refusal("making models", "put their files into the models directory")),
        ("POST", "/copy", refusal("copying models", "settings give a model a second name")),
        ("POST", "/push", refusal("pushing models", "upload them with the hub's own tools")),
        ("POST", "/blobs/{digest}", refusal("uploading files", "pull the model instead")),
        ("POST", "/responses", responses.create),
        ("POST", "/responses/compact", responses.compact),
        ("POST", "/responses/input_tokens", responses.count_input_tokens),
        ("GET", "/responses/{response_id}", responses.retrieve),
        ("DELETE", "/responses/{response_id}", responses.delete),
        ("POST", "/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/responses/{response_id}/input_items", responses.input_items),
        ("GET", "/models", models.list_models),
        ("GET", "/models/{model_id:path}", models.get_model),
        ("GET", "/health", health.health),
        ("GET", "/health/ready", health.ready),
        ("GET", "/metrics", metrics.show),
        ("GET", "/openapi.json", openapi),
        ("GET", "/admin/cache-stats", cache.cache_stats),
        ("POST", "/admin/cache/clear", cache.clear),
        ("GET", "/admin/runtime-settings", settings.read),
        ("PUT", "/admin/runtime-settings", settings.replace),
        ("PATCH", "/admin/runtime-settings", settings.change),
        ("POST", "/admin/runtime-overrides", settings.override),
        ("DELETE", "/admin/runtime-overrides/{token}", settings.restore),
        ("POST", "/admin/render-prompt", PromptAdmin(chat).render_prompt),
        ("GET", "/admin/generation-settings", generation.generation_settings),
        ("POST", "/admin/preload", residents.preload),
        ("POST", "/admin/unload", residents.unload),
    )
    routes = [Route(path, handler, methods=[method]) for method, path, handler in table]
    return App(routes, config, metrics)


class App:
    def __init__(self, routes: list[Route], config: AppConfig, metrics: Metrics) -> None:
        self.routes = routes
        self._config = config
        self._metrics = metrics
        self._paths = {route.endpoint: route.path for route in routes}
        self._router = Router(routes, redirect_slashes=False, default=_unknown_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP only, got {scope['type']!r}")
        exchange = Exchange(scope, impatient_send(send))
        scope["app"] = self  # makes the router raise what it would answer by itself
        try:
            await self._serve(scope, receive, exchange)
        except Cancelled:
            exchange.note_gone()
        except OsaurusError as error:
            await self._answer_error(error, scope, receive, exchange)
        except HTTPException as error:
            refusal = _refusal_of(error, scope)
            await self._answer_error(refusal, scope, receive, exchange)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            if exchange.is_started:
                raise  # the connection is closed, so that the client sees the break
            failure = OsaurusError(f"internal error; the log has it under {exchange.request_id}")
            await self._answer_error(failure, scope, receive, exchange)
        finally:
            exchange.log()
            handler = self._paths.get(scope.get("endpoint", _unknown_path), "none")
            self._metrics.count_http(handler, scope["method"], exchange.status or 500)

    async def _serve(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        check_headers(scope)
        exchange.headers += self._config.origins.check(scope)
        if (preflight := preflight_headers(scope)) is not None:
            exchange.headers += preflight
            await Response(status_code=204)(scope, receive, exchange.send)
            return
        receive = bounded_body(scope, patient_body(receive), self._config.max_body_bytes)
        self._config.guard.admit(scope)
        rewrite(scope)
        if scope["method"] == "HEAD" and self._knows(scope):
            await Response(status_code=204)(scope, receive, exchange.send)
            return
        await self._router(scope, receive, exchange.send)

    def _knows(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self.routes)

    async def _answer_error(
        self, error: OsaurusError, scope: Scope, receive: Receive, exchange: Exchange
    ) -> None:
        exchange.facts["error"] = error.code
        if not exchange.is_started:
            await error_response(error, protocol_of(scope))(scope, receive, exchange.send)


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise RequestRefused("unknown_path", f"{scope['method']} {scope['path'][:200]}: no such path")


def _refusal_of(error: HTTPException, scope: Scope) -> OsaurusError:
    if error.status_code == 405:
        return RequestRefused(
            "method_not_allowed",
            f"{scope['method']} is not allowed for {scope['path'][:200]}",
            error.headers,
        )
    return RequestRefused("invalid_request_error", error.detail)

"""`/admin/runtime-settings` and `/admin/runtime-overrides`: the settings of a running server.

For programs of this machine. A change goes to the file, or for a while into this process's
memory, and counts as `effects` says.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.errors import InvalidField, UserError
from osaurus.runtime.configure import check_settings
from osaurus.runtime.live import Effects, LiveSettings
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.server.errors import RequestRefused
from osaurus.settings.files import Document, find, leaves, with_value, without_value
from osaurus.settings.load import Settings, assign, resolve
from osaurus.settings.migrate import first_document
from osaurus.settings.rules import find_issues
from osaurus.settings.schema import BY_KEY, SETTINGS

_MAX_TTL_S = 3600.0


class OverrideBody(Struct, kw_only=True):
    settings: dict[str, Any]
    ttl_seconds: float = _MAX_TTL_S


class SettingsAdmin:
    """`live` is None for a server that was started without a settings file."""

    def __init__(self, runtime: ModelRuntime, live: LiveSettings | None) -> None:
        self._runtime = runtime
        self._live = live
        self._token: str | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._restoring: set[asyncio.Task[Effects]] = set()

    async def read(self, request: Request) -> Response:
        require_owner(request)
        live = self._settings()
        await live.refresh(self._runtime)
        settings = live.store.snapshot()
        return _json(
            {
                **_stamp(),
                "settings": _document(settings),
                "effects": {},
                "origins": {key: one.origin for key, one in settings.resolved.items()},
                "resolved": {"max_concurrent_sequences": self._runtime.capacity},
                "file": str(live.store.path),
                "problem": live.store.problem or None,
                "override_active": live.store.is_overridden,
            }
        )

    async def replace(self, request: Request) -> Response:
        """A whole document takes the place of the file's."""
        require_owner(request)
        live = self._settings()
        given = _object(await read_json(request, dict[str, Any]))
        unknown = {key: value for key, value in live.store.document.items() if key not in given}
        kept = {key: value for key, value in unknown.items() if not _is_section(key)}
        return await self._save(live, {**kept, **given})

    async def change(self, request: Request) -> Response:
        """Only the keys that are given; null unsets one that may be unset."""
        require_owner(request)
        live = self._settings()
        given = _object(await read_json(request, dict[str, Any]))
        document: Document = live.store.document
        if find(given, BY_KEY["memorySafety.mode"].path)[0]:
            given = without_value(given, BY_KEY["memorySafety.slider"].path)
        for setting in SETTINGS:
            has, value = find(given, setting.path)
            if has:
                document = assign(document, setting, setting.check(value))
                given = without_value(given, setting.path)
        for path, value in _rest(given):
            document = with_value(document, path, value)
        return await self._save(live, document)

    async def override(self, request: Request) -> Response:
        """Values for a while, in this process's memory."""
        require_owner(request)
        live = self._settings()
        body = await read_json(request, OverrideBody)
        if not 0 < body.ttl_seconds <= _MAX_TTL_S:
            raise InvalidField(
                "ttl_seconds",
                f"must be greater than 0 and at most {_MAX_TTL_S:g}, got {body.ttl_seconds:g}",
            )
        if self._token is not None:
            raise RequestRefused(
                "override_active", "settings are overridden already; delete that override first"
            )
        _refuse_network(live.store.snapshot(), body.settings)
        live.store.override_in_memory(body.settings)
        token = self._token = secrets.token_hex(16)
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(body.ttl_seconds, self._expire, token)
        effects = await live.refresh(self._runtime)
        return _json({**_stamp(), "token": token, "effects": _effects(effects)})

    async def restore(self, request: Request) -> Response:
        require_owner(request)
        live = self._settings()
        if request.path_params["token"] != self._token:
            raise RequestRefused("unknown_path", "no override has this token")
        return _json({**_stamp(), "effects": _effects(await self._restore(live))})

    def _expire(self, token: str) -> None:
        if token == self._token and self._live is not None:
            task = asyncio.get_running_loop().create_task(self._restore(self._live))
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)

    async def _restore(self, live: LiveSettings) -> Effects:
        self._token = None
        if self._expiry is not None:
            self._expiry.cancel()
        live.store.override_in_memory(None)
        return await live.refresh(self._runtime)

    async def _save(self, live: LiveSettings, document: Document) -> Response:
        await live.refresh(self._runtime)
        before = live.store.snapshot()
        document = _with_secrets(document, before)
        _refuse_network(before, document)
        issues = _issues(document)
        if any(issue["severity"] == "error" for issue in issues):
            return _json({"error": _invalid(issues)}, status=400)
        document = {**document, "migrations": first_document()["migrations"]}
        settings = live.store.save(document)
        effects = await live.refresh(self._runtime)
        return _json(
            {
                **_stamp(),
                "settings": _document(settings),
                "previous_settings": _document(before),
                "effects": {**_effects(effects), "validation_warnings": issues},
            }
        )

    def _settings(self) -> LiveSettings:
        if self._live is None:
            raise UserError("this server was started without a settings file")
        return self._live


def _issues(document: Document) -> list[dict[str, str]]:
    """Everything that is wrong or unwise in it, so that all can be mended at once."""
    found: list[dict[str, str]] = []
    good = document
    for setting in SETTINGS:
        has, value = find(document, setting.path)
        try:
            if has:
                setting.check(value)
        except InvalidField as error:
            severity = "warning" if setting.kind == "word" else "error"
            found.append({"field": setting.key, "severity": severity, "message": _words(error)})
            good = with_value(good, setting.path, setting.default)
    settings = resolve(good)
    together = [asdict(issue) for issue in find_issues(settings)]
    if not any(issue["severity"] == "error" for issue in (*found, *together)):
        try:
            check_settings(settings)
        except InvalidField as error:
            found.append({"field": error.field, "severity": "error", "message": _words(error)})
    return found + together


def _words(error: InvalidField) -> str:
    return error.message.removeprefix(f"{error.field}: ")


def _invalid(issues: list[dict[str, str]]) -> dict[str, Any]:
    first = next(issue for issue in issues if issue["severity"] == "error")
    return {
        "message": f"{first['field']}: {first['message']}",
        "type": "invalid_request_error",
        "param": first["field"],
        "code": InvalidField.code,
        "issues": issues,
    }


def _refuse_network(settings: Settings, document: Document) -> None:
    """A server cannot move itself to another address."""
    for setting in SETTINGS:
        has, value = find(document, setting.path)
        if has and setting.live == "restart" and setting.path[0] == "network":
            now = settings[setting.key]
            given = tuple(value) if isinstance(value, list) else value
            if given != now:
                raise InvalidField(
                    setting.key,
                    "cannot be changed while the server runs; use `osaurus config set` and "
                    "start it again",
                )


def _object(given: dict[str, Any]) -> dict[str, Any]:
    if not given:
        raise UserError("the body is empty; send the settings as a JSON object")
    return given


def _is_section(key: str) -> bool:
    return any(setting.path[0] == key for setting in SETTINGS)


def _rest(document: Document) -> list[tuple[tuple[str, ...], Any]]:
    """What no setting is called: kept as it was sent."""
    paths = [tuple(key.split(".")) for key in leaves(document)]
    return [(path, find(document, path)[1]) for path in paths]


def _document(settings: Settings) -> Document:
    document = settings.document()
    for key, setting in BY_KEY.items():
        if setting.is_secret:
            document = with_value(document, setting.path, setting.shown(settings[key]))
    return document


def _with_secrets(document: Document, settings: Settings) -> Document:
    """A secret that comes back as it was shown is the one that is there."""
    for key, setting in BY_KEY.items():
        has, value = find(document, setting.path)
        if has and setting.is_secret and value == setting.shown(value):
            document = with_value(document, setting.path, settings[key])
    return document


def _effects(effects: Effects) -> dict[str, Any]:
    return {
        "loaded_model_refresh_needed": bool(effects.next_load),
        "runtime_config_invalidated": bool(effects.live),
        "compiled_decode_restart_required": False,
        "network_restart_rejected": False,
        "changed": [*effects.live, *effects.next_load, *effects.restart],
        "needs_restart": list(effects.restart),
    }


def _stamp() -> dict[str, str]:
    return {"status": "ok", "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds")}


def _json(body: dict[str, Any], *, status: int = 200) -> Response:
    data = msgspec.json.encode(body, order="sorted")
    return Response(data, media_type="application/json", status_code=status)

"""A running server as the verbs see it: is it there, and one streamed chat answer.

In: a base address without `/v1`. Out: values; every failure is an `OsaurusError` with the
server's own words. Never imports torch and knows nothing of how the server was started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx2

from osaurus.errors import EngineError, ModelNotFound, OsaurusError, UserError
from osaurus.settings.places import configured

#: A server on this machine answers /health in a few ms; one that is busy computing in tens.
_PROBE_TIMEOUT_S = 2.0


def configured_host_and_port() -> tuple[str, int]:
    """OSAURUS_SERVER__HOST and OSAURUS_SERVER__PORT, else those of the settings file.

    Raises `InvalidField` for a variable that is wrong.
    """
    return configured("network.host", os.environ), configured("network.port", os.environ)


def configured_address() -> str:
    """Where a running server is looked for."""
    host, port = configured_host_and_port()
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"  # listening everywhere is reached here
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One piece of an answer. `usage` comes with the last piece; `prefill_percent` before the
    first, while a long prompt is read."""

    prefill_percent: float | None = None
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class ServerClient:
    """One server at `address`. Use as a context manager or call `close`."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OSAURUS_API_KEY")
        self._http = httpx2.Client(
            base_url=self.address,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # A cold model may load and prefill for minutes before the first byte.
            timeout=httpx2.Timeout(None, connect=_PROBE_TIMEOUT_S),
            trust_env=False,  # a proxy has no business between a terminal and its own machine
        )

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def health(self) -> Mapping[str, Any] | None:
        """What `/health` says; None when nothing answers or it is not such a server."""
        try:
            response = self._http.get("/health", timeout=_PROBE_TIMEOUT_S)
            body = response.json()
        except (httpx2.HTTPError, ValueError):
            return None
        is_ours = isinstance(body, dict) and body.get("status") == "healthy"
        return body if is_ours else None

    def has_model(self, model: str) -> bool:
        """False only when the server says that it knows no such model."""
        with self._plain_failures():
            response = self._http.get(f"/v1/models/{quote(model)}", timeout=_PROBE_TIMEOUT_S)
        if response.status_code != 404:
            return True
        return refusal(404, response.content).code != ModelNotFound.code

    def stream_chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> Generator[Delta]:
        """Yield the answer as it grows. Closing the iterator cancels the request.

        `options` are further fields of the request body, under their OpenAI names.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True, "include_progress": True},
            **options,
        }
        with (
            self._plain_failures(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise refusal(response.status_code, response.content)
            for event in httpx2.EventSource(response):
                if event.data == "[DONE]":
                    return
                yield _delta(json.loads(event.data))
        raise EngineError(f"the server at {self.address} closed the answer before its end")

    @contextmanager
    def _plain_failures(self) -> Generator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise EngineError(
                f"no server answers at {self.address}; start one with `osaurus serve`"
            ) from error
        except httpx2.HTTPError as error:
            raise EngineError(f"the connection to {self.address} failed: {error}") from error


def refusal(status: int, body: bytes) -> OsaurusError:
    """The error a server reported, with its message and stable code."""
    message, code = f"the server answered {status}", ""
    try:
        reported = json.loads(body)["error"]
        message, code = str(reported["message"]), str(reported.get("code") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        message += ": " + body[:200].decode("utf-8", "replace")
    error = UserError(message) if 400 <= status < 500 else EngineError(message)
    if code:
        error.code = code
    return error


def _delta(frame: Mapping[str, Any]) -> Delta:
    if "error" in frame:
        raise refusal(500, json.dumps(frame).encode())
    choice = (frame.get("choices") or [{}])[0]
    piece = choice.get("delta") or {}
    return Delta(
        prefill_percent=(frame.get("osaurus_prefill") or {}).get("percent"),
        text=piece.get("content") or "",
        reasoning=piece.get("reasoning_content") or piece.get("reasoning") or "",
        finish_reason=choice.get("finish_reason"),
        usage=frame.get("usage") or {},
    )

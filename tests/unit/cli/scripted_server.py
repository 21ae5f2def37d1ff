"""An OpenAI-shaped server that says what a test tells it to, on a loopback port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Frames = Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any] | str]]


def text_frame(text: str, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}}]}


def end_frames(prompt_tokens: int = 5, completion_tokens: int = 3, cached: int = 0):
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
        "[DONE]",
    ]


class ScriptedServer:
    """`frames` answers a chat body; `requests` holds the bodies that came; `refuse_with` is
    (status, error body) for every chat; `models` are the ids it knows (None: all)."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.requests: list[dict[str, Any]] = []
        self.refuse_with: tuple[int, dict[str, Any]] | None = None
        self.models: set[str] | None = None
        self.health: dict[str, Any] = {"status": "healthy"}
        self.disconnects = threading.Semaphore(0)
        self.address = ""


@contextmanager
def scripted_server(frames: Frames):
    script = ScriptedServer(frames)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            name = self.path.removeprefix("/v1/models/")
            if self.path == "/health":
                self._send(200, script.health)
            elif script.models is not None and name not in script.models:
                self._send(404, {"error": {"message": "no", "code": "model_not_found"}})
            else:
                self._send(200, {"id": name})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.requests.append(body)
            if script.refuse_with:
                return self._send(*script.refuse_with)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for frame in script.frames(body):
                    data = frame if isinstance(frame, str) else json.dumps(frame)
                    self.wfile.write(f"data: {data}\n\n".encode())
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                script.disconnects.release()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Settings of the socket and of the log: what `osaurus serve` makes of a file, in a process of
its own, and what the running server then lets in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

SOURCE = Path(__file__).parents[2] / "src"


@contextmanager
def _serve(home: Path, *flags: str, **sections: Any) -> Generator[tuple[str, list[str]]]:
    """A server over a file of those sections: its address, and its log once it has ended."""
    (home / "config").mkdir(parents=True, exist_ok=True)
    (home / "config/server-runtime.json").write_text(json.dumps(sections))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(SOURCE),
        "OSAURUS_HOME": str(home),
        "HOME": str(home),
    }
    log: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "osaurus", "serve", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: log.extend(process.stderr or ()))
        reader.start()
        try:
            line = process.stdout.readline()
            yield line.split()[-1] if line else "", log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            reader.join()


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_serve_listens_where_the_file_says(tmp_path: Path) -> None:
    port = _free_port()
    with _serve(tmp_path, network={"host": "127.0.0.2", "port": port}) as (url, _):
        assert url == f"http://127.0.0.2:{port}"
        assert httpx2.get(f"{url}/health").status_code == 200
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"http://127.0.0.1:{port}/health")


def test_an_address_that_others_reach_must_be_meant(tmp_path: Path) -> None:
    network = {"host": "0.0.0.0", "port": _free_port()}
    with _serve(tmp_path, network=network) as (url, log):
        assert url == ""
    assert "keys" in "".join(log)
    with _serve(tmp_path, network={**network, "expose": True}) as (url, _):
        assert httpx2.get(url.replace("0.0.0.0", "127.0.0.1") + "/health").status_code == 200


def test_names_and_origins_are_those_of_the_file(tmp_path: Path) -> None:
    network = {
        "port": _free_port(),
        "allowedHosts": ["models.house"],
        "corsOrigins": ["https://page.example"],
    }
    with _serve(tmp_path, network=network) as (url, _):

        def ask(**headers: str) -> httpx2.Response:
            return httpx2.get(f"{url}/v1/models", headers=headers)

        assert ask(host="models.house").status_code == 200
        assert ask(host="other.house").status_code == 403
        allowed = ask(origin="https://page.example").headers
        assert allowed["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-origin" not in ask(origin="https://other.example").headers


@pytest.mark.parametrize("level", ["info", "warning"])
def test_the_log_says_what_the_level_lets_through(tmp_path: Path, level: str) -> None:
    network = {"port": _free_port(), "logLevel": level}
    with _serve(tmp_path, network=network) as (url, log):
        httpx2.get(f"{url}/v1/models")
    assert any("GET /v1/models" in line for line in log) == (level == "info")


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_is_written_as_the_file_says(tmp_path: Path, form: str) -> None:
    network = {"port": _free_port(), "logFormat": form}
    with _serve(tmp_path, network=network) as (url, log):
        httpx2.get(f"{url}/v1/models")
    lines = [line for line in log if "/v1/models" in line]
    assert lines
    assert all(line.startswith("{") == (form == "json") for line in lines)


def test_a_key_of_the_file_opens_the_server_and_this_machine_needs_none_if_trusted(
    tmp_path: Path,
) -> None:
    network = {"port": _free_port(), "apiKey": "sesame-0123456789", "trustLoopback": False}
    with _serve(tmp_path, network=network) as (url, _):
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer sesame-0123456789"}
        assert httpx2.get(f"{url}/v1/models", headers=headers).status_code == 200
    with _serve(tmp_path, network={**network, "trustLoopback": True}) as (url, _):
        assert httpx2.get(f"{url}/v1/models").status_code == 200

"""What several command-line tests need of the machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import osaurus
from osaurus.settings.paths import models_dir


@pytest.fixture(autouse=True)
def processes_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a test starts imports the code under test, installed or not."""
    source = str(Path(osaurus.__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{source}{os.pathsep}{known}" if known else source)


@pytest.fixture
def free_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(autouse=True)
def settings_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes this machine's settings; models are found where they are."""
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(models_dir().path))
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))

"""A process that a test starts imports the code under test, installed or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import osaurus


@pytest.fixture(autouse=True)
def processes_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(Path(osaurus.__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{source}{os.pathsep}{known}" if known else source)

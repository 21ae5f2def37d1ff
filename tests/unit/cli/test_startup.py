"""What a cold start must not wait for."""

from __future__ import annotations

import subprocess
import sys

_BEFORE_TORCH = """
import sys
import osaurus.cli.run, osaurus.runtime.live, osaurus.runtime.load, osaurus.server.serve
heavy = {"torch", "transformers", "tokenizers", "scipy", "openai", "pydantic", "safetensors"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""

_WITH_TORCH = """
import gc, sys
from osaurus.runtime.imports import import_engine
import_engine()
assert "torch" in sys.modules and "osaurus.engine.core" in sys.modules
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
heavy = {"transformers", "scipy", "openai", "pandas", "sklearn"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_run_has_its_server_imported_before_anything_that_only_a_model_needs() -> None:
    done = _run(_BEFORE_TORCH)
    assert done.returncode == 0, done.stderr


def test_an_engine_is_imported_without_transformers_and_left_alone_by_the_collector() -> None:
    done = _run(_WITH_TORCH)
    assert done.returncode == 0, done.stderr

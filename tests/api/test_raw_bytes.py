"""Whatever comes over a socket, the next good request is answered: 20 s of `fuzz_http.py`."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_http.py"


@pytest.mark.slow
def test_raw_bytes_and_half_closed_sockets_leave_the_server_as_it_was() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_http", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    seed = random.randrange(2**32)
    found = module.fuzz(20.0, seed)
    assert found.faults == [], f"seed {seed}"
    assert found.requests > 100
    assert found.slowest_s < 20, "the server stood still"

"""Claim: under twenty clients for a minute nothing leaks, breaks or answers for another.

The script does the work (`scripts/soak.py`); ten minutes of it are run by hand and recorded in
docs/performance.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[1]


def test_a_minute_of_twenty_clients_leaves_nothing_behind(default_bundle: object) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/soak.py"), "--seconds", "60"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads(done.stdout)
    # It was a load: every kind of act came to its end.
    acts = {name.partition(":")[0] for name in figures["done"]}
    assert {"ask", "stream", "hang_up", "hang_up_early", "change", "unload", "preload"} <= acts
    assert figures["done"]["compared with the answer alone"] > 20

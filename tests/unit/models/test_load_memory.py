"""Claim: loading the default model takes at most 15 % or 200 MB more than it keeps, and the
file's pages are not kept beside the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import osaurus
from osaurus.bundle.bundle import Bundle

#: Peak and remaining resident bytes; the peak is the kernel's own, cleared before the load.
PROGRAM = """
import gc, json, re, sys
from pathlib import Path
import torch
from osaurus.bundle.bundle import open_bundle
from osaurus.kernels.heap import trim_heap
from osaurus.models.registry import load_model
import osaurus.models.llama

def status(name):
    found = re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024

bundle = open_bundle(sys.argv[1], "default")
torch.randn(64, 64) @ torch.randn(64, 64)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load_model(bundle, compute_mode="bfloat16")
peak = status("VmHWM")
gc.collect()
trim_heap()
print(json.dumps(dict(before=before, peak=peak, after=status("VmRSS"), weights=model.nbytes)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_peak_of_a_load_is_bounded(default_bundle: Bundle) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(default_bundle.path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(osaurus.__file__).parents[1])},
    )
    figures = json.loads(done.stdout)
    after, peak = figures["after"], figures["peak"]
    assert peak <= after + max(0.15 * after, 200e6), figures
    # Not the weights and the file: some megabytes are the tables of both.
    assert after - figures["before"] < figures["weights"] + 40e6, figures

"""A peer measured in the same run: its own process, its own libraries, our workloads.

The peer's script lives in `benchmarks/` of the source tree (and inside the wheel beside this
file), so that no module of the package imports the peer's library. One line of JSON in, one
out; the process sleeps on its stdin between runs, so rounds can alternate with ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from osaurus.bench.workloads import DidNotRun, Sample, Workload
from osaurus.errors import UserError

#: Peers by the name `--peer` takes: script and the packages it needs.
PEERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "transformers": ("transformers_peer.py", ("transformers", "gguf", "accelerate")),
}


class Peer:
    """One running peer process on `threads`, None for as many as it takes by itself. `facts` say
    what it runs. A context manager."""

    def __init__(self, name: str, model_path: Path, *, threads: int | None = None) -> None:
        self.name = name
        self.rss_bytes = 0
        limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, str(_script(name)), str(model_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **limit, "TQDM_DISABLE": "1"},
        )
        try:
            self.facts: Mapping[str, Any] = self._read()
        except DidNotRun:
            self.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_once(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Sample:
        """One run. Raises `DidNotRun` when the peer's process ended instead of answering."""
        assert self._process.stdin is not None
        work = {"kind": workload.kind, "new_tokens": workload.new_tokens, "prompts": prompts}
        try:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DidNotRun(f"the {self.name} process has ended") from error
        reply = self._read()
        self.rss_bytes = int(reply["rss_bytes"])
        return Sample(ttft_s=reply["ttft_s"], tokens_per_s=reply["tokens_per_s"])

    def close(self) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DidNotRun(f"the {self.name} process ended; its error output says why")
        return json.loads(line)


def _script(name: str) -> Path:
    """Where the peer's script is. Raises `UserError` for an unknown or uninstalled peer."""
    if name not in PEERS:
        raise UserError(f"--peer: {name!r} is not one of {', '.join(sorted(PEERS))}")
    script, packages = PEERS[name]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(f"--peer {name} needs: pip install {' '.join(missing)}")
    here = Path(__file__).resolve().parent
    for path in (here / script, here.parents[2] / "benchmarks" / script):
        if path.is_file():
            return path
    raise UserError(f"--peer {name}: {script} is missing from this installation")

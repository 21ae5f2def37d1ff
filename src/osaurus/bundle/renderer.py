"""Chat templates rendered in processes of their own, which can be stopped whatever they do.

The sandbox's hooks see loops, calls and operators, but one single operation on a cleverly
nested list can take for ever, and no thread can be killed. A child process can: it kills itself
by a timer of the kernel's, its memory is bounded, and it holds nothing worth keeping. Rendering
also leaves the interpreter of this process to the engine.

    parent: 8 bytes length, pickle of a `Job`   ->   child
    child:  1 byte status, 8 bytes length, text ->   parent    (never unpickled)

Children are started when first needed, or ahead of that, and kept idle; one that died is
replaced.
"""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from osaurus.bundle.sandbox import RenderLimits
from osaurus.errors import TemplateError

LENGTH = struct.Struct("!Q")
READY, RENDERED, REFUSED = b"!", b"+", b"-"

#: Lone surrogates, which JSON can carry, travel too.
ENCODING = ("utf-8", "surrogatepass")

_MAX_IDLE = 2


@dataclass(frozen=True, slots=True)
class Job:
    """Render `source` with `variables`, or only compile it where they are None."""

    source: str
    variables: Mapping[str, Any] | None
    limits: RenderLimits


class RenderPool:
    """Hands jobs to idle children. Any number of threads may call it.

    The lock guards the list of idle children alone; a child serves one thread at a time.
    """

    def __init__(self) -> None:
        self._idle: list[_Child] = []
        self._lock = threading.Lock()

    def run(self, job: Job) -> str:
        """The rendered text. Raises `TemplateError` with the template's words, or with the limit
        that it met."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is None or not child.is_alive:
            child = _Child()
        try:
            status, text = child.ask(job)
        except (EOFError, OSError) as error:
            child.close()
            raise TemplateError(
                f"the chat template was stopped: it took more than {job.limits.timeout_s:g} s or "
                "too much memory"
            ) from error
        except BaseException:
            child.close()
            raise
        with self._lock:
            keeps = len(self._idle) < _MAX_IDLE
            if keeps:
                self._idle.append(child)
        if not keeps:
            child.close()
        if status == RENDERED:
            return text
        raise TemplateError(text)

    def prepare(self) -> None:
        """Start a child where none is idle, without waiting until it reads."""
        with self._lock:
            if not self._idle:
                with suppress(OSError):  # whoever needs one is told
                    self._idle.append(_Child())

    def forget(self) -> None:
        """After a fork: the children are the parent's."""
        self._idle, self._lock = [], threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()


class _Child:
    def __init__(self) -> None:
        """Starts it. Whether it came up is seen when it is asked."""
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            # -P: no module is taken from the folder that this process happens to run in.
            [sys.executable, "-P", "-m", "osaurus.bundle.render_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt at the terminal is the parent's affair
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: Job) -> tuple[bytes, str]:
        """Raises `EOFError` or `OSError` when the child died over it, and `TemplateError` when it
        never came up."""
        if not self._is_ready:
            if self._answers.read(1) != READY:
                raise TemplateError("the process that renders chat templates could not be started")
            self._is_ready = True
        data = pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL)
        self._requests.write(LENGTH.pack(len(data)) + data)
        self._requests.flush()
        status = _exactly(self._answers, 1)
        (length,) = LENGTH.unpack(_exactly(self._answers, LENGTH.size))
        return status, _exactly(self._answers, length).decode(*ENCODING)

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._requests, self._answers):
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what it had not read went with it
        self._process.wait()


def _exactly(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


_pool = RenderPool()
atexit.register(_pool.close)
os.register_at_fork(after_in_child=_pool.forget)


def run(job: Job) -> str:
    """Through the pool of this process; see `RenderPool.run`."""
    return _pool.run(job)


def prepare_child() -> None:
    """Through the pool of this process; see `RenderPool.prepare`."""
    _pool.prepare()

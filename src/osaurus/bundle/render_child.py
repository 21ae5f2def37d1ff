"""The process in which chat templates run: `python -m osaurus.bundle.render_child`.

In: `Job`s on stdin, one after another, until it closes. Out: text or the reason of a refusal on
stdout. The kernel ends it when a job takes too long, even inside one operation of the
interpreter's, and refuses it memory beyond a bound. Imports no torch and opens no file.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from typing import IO

from osaurus.bundle.renderer import ENCODING, LENGTH, READY, REFUSED, RENDERED, Job
from osaurus.bundle.template import compile_here, render_here
from osaurus.errors import TemplateError

#: On top of what the interpreter itself takes.
_MAX_MEMORY_BYTES = 1 << 30

#: The sandbox's own deadline comes first: it says more than a dead process.
_GRACE_S = 0.1


def main() -> None:
    requests, answers = os.fdopen(0, "rb"), os.fdopen(1, "wb")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":  # elsewhere the bound is not kept by the kernel
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, hard))
    answers.write(READY)
    answers.flush()
    while header := requests.read(LENGTH.size):
        (length,) = LENGTH.unpack(header)
        _serve(pickle.loads(requests.read(length)), answers)


def _serve(job: Job, answers: IO[bytes]) -> None:
    signal.setitimer(signal.ITIMER_REAL, job.limits.timeout_s + _GRACE_S)
    try:
        template = compile_here(job.source)
        text = "" if job.variables is None else render_here(template, job.variables, job.limits)
        status = RENDERED
    except TemplateError as error:
        status, text = REFUSED, error.message
    data = text.encode(*ENCODING)
    signal.setitimer(signal.ITIMER_REAL, 0)
    answers.write(status + LENGTH.pack(len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main()

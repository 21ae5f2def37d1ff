"""Downloads under way, each shared by whoever asks for the same model.

    absent --first watcher--> running --ends--> absent
                                 |
                                 +--last watcher leaves--> stopping --thread lets go--> absent

A download goes on as long as somebody watches it; what it fetched by then is kept, and the next
one resumes. Who comes while one is stopping waits for its end: two must not write the same files.
One event loop owns it; the work is a thread's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from osaurus.bundle.progress import IsStopped, ProgressCallback, PullProgress
from osaurus.errors import Cancelled
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.registry import RunBlocking

#: Fetches a model; blocks, reports, and asks whether to stop. Raises `DownloadError`.
Fetch = Callable[[ProgressCallback, IsStopped], Path]

#: A watcher hears of each file and stage at most this often.
_REPORT_INTERVAL_S = 0.1


class Downloads:
    def __init__(self, run: RunBlocking = on_thread) -> None:
        self._run = run
        self._running: dict[str, _Download] = {}

    async def watch(self, name: str, fetch: Fetch) -> AsyncGenerator[PullProgress]:
        """What is known of the download called `name`, begun with `fetch` unless it runs; then
        what becomes of it. Ends when the model is there; raises why it failed."""
        while (download := self._running.get(name)) is not None and download.is_stopping:
            await download.ended.wait()
        if download is None:
            download = self._running[name] = _Download()
            download.task = asyncio.create_task(self._fetch(name, download, fetch))
        download.num_watchers += 1
        try:
            async for report in download.reports():
                yield report
        finally:
            download.num_watchers -= 1
            if not download.num_watchers:
                download.stop()

    @property
    def names(self) -> list[str]:
        """Those that run or are stopping."""
        return sorted(self._running)

    async def _fetch(self, name: str, download: _Download, fetch: Fetch) -> None:
        report = download.reporter(asyncio.get_running_loop())
        try:
            await self._run(lambda: fetch(report, lambda: download.is_stopping))
        except Exception as error:  # noqa: BLE001 - raised again where it is watched
            download.failure = error
        finally:
            del self._running[name]
            download.end()


class _Download:
    def __init__(self) -> None:
        self.num_watchers = 0
        self.failure: Exception | None = None
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._reports: dict[tuple[str, str], PullProgress] = {}  # by stage and file
        self._changed = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        self._stopping.set()

    def end(self) -> None:
        self.ended.set()
        self._wake()

    def reporter(self, loop: asyncio.AbstractEventLoop) -> ProgressCallback:
        """For the thread: passes on the first report of a file's stage, the whole one, and now
        and then one in between."""
        last_s: dict[tuple[str, str], float] = {}

        def report(progress: PullProgress) -> None:
            key, now = (progress.stage, progress.file), time.monotonic()
            is_whole = progress.completed >= progress.total
            if not is_whole and now - last_s.get(key, -1.0) < _REPORT_INTERVAL_S:
                return
            last_s[key] = now
            loop.call_soon_threadsafe(self._note, progress)

        return report

    async def reports(self) -> AsyncGenerator[PullProgress]:
        seen: dict[tuple[str, str], PullProgress] = {}
        while True:
            has_ended, changed = self.ended.is_set(), self._changed
            for key, progress in list(self._reports.items()):
                if seen.get(key) is not progress:
                    seen[key] = progress
                    yield progress
            if has_ended:
                break
            await changed.wait()
        if self.failure is not None:
            raise self.failure
        if self.is_stopping:
            raise Cancelled("the download was stopped")

    def _note(self, progress: PullProgress) -> None:
        self._reports[progress.stage, progress.file] = progress
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

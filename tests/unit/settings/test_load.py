"""Proves which layer's value holds, where it says it is from, and what is kept and named."""

from __future__ import annotations

import random
from typing import Any

import pytest

from osaurus.errors import InvalidField
from osaurus.settings.capacity import Capacity, capacity_of
from osaurus.settings.files import leaves, with_value
from osaurus.settings.load import Flag, Settings, assign, resolve
from osaurus.settings.rules import check_together, find_issues
from osaurus.settings.schema import BY_KEY, SETTINGS

PORT = "network.port"


def _settings(**sections: Any) -> Settings:
    return resolve(sections, file="f.json")


def test_each_layer_wins_over_those_below_and_says_so() -> None:
    layers: dict[str, Any] = {}
    seen = [resolve({}, **layers)]
    document = {"network": {"port": 1}}
    for name, value in (
        ("file", "f.json"),
        ("environment", {"OSAURUS_SERVER__PORT": "2"}),
        ("flags", {PORT: Flag(name="--port", value=3)}),
        ("override", {"network": {"port": 4}}),
    ):
        layers[name] = value
        seen.append(resolve(document, **layers))
    assert [one[PORT] for one in seen] == [1337, 1, 2, 3, 4]
    assert [one.origin(PORT) for one in seen] == [
        "default", "file", "environment", "flag", "override",
    ]  # fmt: skip
    assert [one.resolved[PORT].source for one in seen] == [
        "", "f.json", "OSAURUS_SERVER__PORT", "--port", "",
    ]  # fmt: skip


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one.kind == "switch"], ids=str)
def test_an_empty_variable_is_none_at_all(setting: Any) -> None:
    found = resolve({}, environment={setting.environment: " "})
    assert found.origin(setting.key) in ("default",)


def test_a_wrong_value_names_the_layer_it_is_from() -> None:
    for layers, field, words in (
        ({"document": {"network": {"port": 0}}, "file": "/f.json"}, PORT, "/f.json"),
        ({"environment": {"OSAURUS_SERVER__PORT": "0"}}, "OSAURUS_SERVER__PORT", "65535"),
        ({"flags": {PORT: Flag(name="--port", value=0)}}, "--port", "65535"),
    ):
        with pytest.raises(InvalidField, match=words) as caught:
            resolve(**{"document": {}, **layers})
        assert caught.value.field == field


def test_an_unknown_word_and_a_bad_unused_value_are_defaults_with_a_notice() -> None:
    found = _settings(memorySafety={"mode": "cautious"}, mtp={"explicitDepth": "deep"})
    assert found["memorySafety.mode"] == "safe_auto"
    assert found["mtp.explicitDepth"] is None
    assert "memorySafety.mode" in found.notices[0] or "memorySafety.mode" in found.notices[1]
    assert len(found.notices) == 2


def test_unknown_keys_and_variables_are_named() -> None:
    found = resolve(
        {"schemaVersion": 3, "network": {"prt": 1}, "mine": {"x": 2}},
        environment={"OSAURUS_SERVER__PRT": "1", "OSAURUS_HOME": "/x"},
    )
    text = "\n".join(found.notices)
    assert "network.prt is not known and was kept; network.port is" in text
    assert "mine.x" in text
    assert "OSAURUS_SERVER__PRT is set and no setting is called so; OSAURUS_SERVER__PORT" in text
    assert len(found.notices) == 3


def test_the_whole_document_reads_back_as_itself() -> None:
    settings = resolve({}, flags={PORT: Flag(name="--port", value=7)})
    again = resolve(settings.document())
    assert not settings.differing(again)
    assert sorted(leaves(settings.document())) == sorted(BY_KEY)


def test_the_slider_is_the_mode() -> None:
    found = _settings(memorySafety={"mode": "strict", "slider": 0})
    assert (found["memorySafety.mode"], found["memorySafety.slider"]) == ("strict", 3)
    document = assign({}, BY_KEY["memorySafety.slider"], 1)
    assert document == {"memorySafety": {"mode": "balanced", "slider": 1}}


def test_no_automatic_limits_lets_go_of_the_fraction_set_before_but_not_after() -> None:
    fraction = BY_KEY["memorySafety.customPhysicalMemoryFraction"]
    document = assign({}, fraction, 0.5)
    document = assign(document, BY_KEY["memorySafety.mode"], "diagnostic_dangerous")
    assert resolve(document)[fraction.key] is None
    assert resolve(assign(document, fraction, 0.4))[fraction.key] == 0.4


@pytest.mark.parametrize(
    ("sections", "requests", "reason"),
    [
        ({}, 1, "the profile safe_auto"),
        ({"memorySafety": {"mode": "balanced"}}, 2, "the profile balanced"),
        ({"memorySafety": {"mode": "performance"}}, 2, "the profile performance"),
        ({"memorySafety": {"mode": "strict"}}, 1, "the profile strict"),
        ({"memorySafety": {"mode": "diagnostic_dangerous"}}, 1, "diagnostic_dangerous"),
        ({"concurrency": {"maxConcurrentSequences": None}}, 1, "the profile safe_auto"),
        ({"concurrency": {"maxConcurrentSequences": 5}}, 5, "maxConcurrentSequences"),
        ({"concurrency": {"maxConcurrentSequences": 99}}, 32, "maxConcurrentSequences"),
        ({"concurrency": {"maxConcurrentSequences": "auto"}}, "auto", "maxConcurrentSequences"),
        (
            {
                "concurrency": {"maxConcurrentSequences": 5},
                "memorySafety": {"customMaxConcurrentSequences": 7},
            },
            7,
            "customMaxConcurrentSequences",
        ),
        (
            {"concurrency": {"maxConcurrentSequences": 5, "continuousBatching": False}},
            1,
            "continuousBatching is off",
        ),
    ],
)
def test_the_capacity_comes_from_one_order(
    sections: dict[str, Any], requests: int | str, reason: str
) -> None:
    found = capacity_of(_settings(**sections))
    assert found.requests == requests
    assert reason in found.reason


def test_auto_takes_eight_on_a_cpu_and_thirty_two_on_cuda_at_most() -> None:
    auto = Capacity(requests="auto", reason="")
    assert [auto.limit(on_accelerator=on) for on in (False, True)] == [8, 32]
    assert Capacity(requests=3, reason="").limit(on_accelerator=True) == 3


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"cache": {"liveKVCodec": "turboquant"}}, "cache.turboQuantKeyBits"),
        (
            {"cache": {"pagedKV": {"enabled": True}, "legacyDisk": {"enabled": True}}},
            "cache.legacyDisk.enabled",
        ),
        (
            {"multimodal": {"requireMediaSaltForCache": False}},
            "multimodal.requireMediaSaltForCache",
        ),
        (
            {"power": {"lightSleepAfterSeconds": 9, "deepSleepAfterSeconds": 9}},
            "power.deepSleepAfterSeconds",
        ),
        ({"mtp": {"keepDraftCacheSeparate": False}}, "mtp.keepDraftCacheSeparate"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    sections: dict[str, Any], field: str
) -> None:
    settings = _settings(**sections)
    assert [issue.severity for issue in find_issues(settings)].count("error") >= 1
    with pytest.raises(InvalidField) as caught:
        check_together(settings)
    assert caught.value.field == field


def test_what_is_only_unwise_is_a_warning() -> None:
    settings = _settings(
        concurrency={"continuousBatching": False}, generation={"diffusionMaxDenoisingSteps": 3}
    )
    assert [issue.severity for issue in find_issues(settings)] == ["warning", "warning"]
    check_together(settings)


def test_random_documents_either_load_or_name_a_key() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    values = (None, True, -1, 0, 1, 7, 0.5, 1e9, "auto", "x", "", [], ["a"], {}, {"a": 1})
    for _ in range(300):
        document: dict[str, Any] = {}
        for setting in dice.sample(SETTINGS, 4):
            document = with_value(document, setting.path, dice.choice(values))
        try:
            resolve(document)
            named = PORT
        except InvalidField as error:
            named = error.field
        assert named in BY_KEY, f"seed {seed}"

"""Thinking switches: an explicit choice wins, then the bundle's, then the family's row."""

from __future__ import annotations

from typing import Any

import pytest

from osaurus.chat.profiles import profile_of
from osaurus.chat.switches import OFF_WORDS, template_switches
from osaurus.errors import InvalidField
from osaurus.parsing.selection import BundleFacts, FormatChoice
from osaurus.runtime.conventions import Conventions

THINK = FormatChoice(
    tool_format=None, tool_origin="none", reasoning="think", reasoning_origin="template"
)


def _bundle(model_type: str = "", template: str = "", **declared: Any) -> Conventions:
    return Conventions(
        formats=THINK, facts=BundleFacts(model_type=model_type, template=template), **declared
    )


def _switches(model_type: str, model_id: str = "m", **given: Any) -> dict[str, Any]:
    return dict(template_switches(_bundle(model_type), model_id, given).kwargs)


@pytest.mark.parametrize(
    ("enable", "effort", "switches"),
    [
        (None, None, {}),
        (True, None, {"enable_thinking": True}),
        (None, "none", {"enable_thinking": False}),
        (None, "high", {"enable_thinking": True, "reasoning_effort": "high"}),
        (False, "high", {"enable_thinking": False, "reasoning_effort": "high"}),
        (True, "none", {"enable_thinking": True}),
    ],
)
def test_only_explicit_choices_become_template_switches(
    enable: bool | None, effort: str | None, switches: dict[str, object]
) -> None:
    given = {"enable_thinking": enable, "reasoning_effort": effort}
    assert _switches("llama", **given) == switches


@pytest.mark.parametrize("word", sorted(OFF_WORDS))
def test_every_word_for_off_turns_thinking_off(word: str) -> None:
    assert _switches("qwen3", reasoning_effort=word.upper()) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("model_type", "unset"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3_5_moe", {"enable_thinking": False}),
        ("nemotron_h", {"enable_thinking": False}),
        ("minimax_m2", {"enable_thinking": False}),
        ("gemma4", {"enable_thinking": False}),
        ("zaya", {"enable_thinking": False}),
        ("zaya1_vl", {}),
        ("bailing_moe", {}),
        ("laguna", {}),
        ("deepseek_v4", {}),
        ("hy_v3", {}),
        ("lfm2", {}),
        ("step3p5", {}),
        ("gpt_oss", {}),
        ("llama", {}),
    ],
)
def test_without_a_choice_a_template_gets_its_familys_row(
    model_type: str, unset: dict[str, Any]
) -> None:
    assert _switches(model_type) == unset


@pytest.mark.parametrize("model_type", ["qwen3", "zaya", "bailing_moe", "gemma4", "minimax_m2"])
@pytest.mark.parametrize("wanted", [True, False])
def test_an_explicit_choice_always_wins(model_type: str, wanted: bool) -> None:
    assert _switches(model_type, enable_thinking=wanted)["enable_thinking"] is wanted
    effort = "high" if wanted else "none"
    assert _switches(model_type, reasoning_effort=effort)["enable_thinking"] is wanted


def test_a_switch_is_mirrored_to_the_familys_own_name() -> None:
    for model_type in ("kimi_k25", "deepseek_v3", "granite"):
        found = _switches(model_type, enable_thinking=True)
        assert found == {"enable_thinking": True, "thinking": True}
        found = _switches(model_type, thinking=False)
        assert found == {"enable_thinking": False, "thinking": False}
    assert _switches("qwen3", thinking=True) == {"enable_thinking": True, "thinking": True}
    assert _switches("qwen3", thinking="loud") == {"enable_thinking": False, "thinking": "loud"}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k25", "granite", "qwen3", "unheard"])
@pytest.mark.parametrize("declared", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": True}, True),
        ({"thinking": False}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"enable_thinking": False, "thinking": True}, False),
    ],
)
def test_a_choice_outranks_the_bundles_default_by_whatever_name_each_is_said(
    model_type: str, declared: str, given: dict[str, Any], wanted: bool
) -> None:
    bundle = _bundle(model_type, template_defaults={declared: not wanted, "keep": 1})
    found = template_switches(bundle, "m", given)
    said = {name: found.kwargs[name] for name in ("enable_thinking", "thinking")
            if name in found.kwargs}  # fmt: skip
    assert set(said.values()) == {wanted}
    assert {"enable_thinking", declared} <= said.keys()
    assert (found.thinking, found.is_asked, found.kwargs["keep"]) == (wanted, True, 1)


@pytest.mark.parametrize(
    ("model_type", "mode", "effort", "kwargs"),
    [
        ("deepseek_v4", "thinking", "high", {"enable_thinking": True, "reasoning_effort": "high"}),
        ("deepseek_v4", "max", None, {"enable_thinking": True, "reasoning_effort": "max"}),
        ("deepseek_v4", "instruct", "high", {"enable_thinking": False}),
        ("deepseek_v4", "thinking", "medium", {"enable_thinking": True}),
        ("deepseek_v4", "", "absurd", {}),
        ("hy_v3", "thinking", None, {"enable_thinking": True, "reasoning_effort": "high"}),
        ("hy_v3", "thinking", "low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("hy_v3", "no_think", "low", {"enable_thinking": False, "reasoning_effort": "no_think"}),
        ("hy_v3", "", "absurd", {}),
        ("qwen3", "chat", None, {"enable_thinking": False}),
        ("qwen3", "thinking", "high", {"enable_thinking": True, "reasoning_effort": "high"}),
        ("qwen3", "", 5, {"enable_thinking": False}),
    ],
)
def test_a_bundles_mode_says_whether_and_its_effort_how_much_and_neither_is_a_400(
    model_type: str, mode: str, effort: Any, kwargs: dict[str, Any]
) -> None:
    defaults = {} if effort is None else {"reasoning_effort": effort}
    bundle = _bundle(model_type, default_mode=mode, template_defaults=defaults)
    assert template_switches(bundle, "m", {}).kwargs == kwargs


def test_a_default_that_cannot_be_used_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bundle = _bundle(
        "deepseek_v4",
        template_defaults={"enable_thinking": "yes", "reasoning_effort": "medium"},
    )
    for _ in range(3):
        assert template_switches(bundle, "org/odd", {}).kwargs == {}
    assert [record.getMessage() for record in caplog.records] == [
        "org/odd: the bundle's default enable_thinking 'yes' cannot be used",
        "org/odd: the bundle's default reasoning_effort 'medium' cannot be used",
    ]


def test_a_request_that_turns_thinking_on_keeps_the_bundles_effort() -> None:
    bundle = _bundle("deepseek_v4", default_mode="instruct", template_defaults={})
    assert template_switches(bundle, "m", {"enable_thinking": True}).kwargs == {
        "enable_thinking": True
    }
    bundle = _bundle("deepseek_v4", template_defaults={"reasoning_effort": "max"})
    assert template_switches(bundle, "m", {"enable_thinking": True}).kwargs == {
        "enable_thinking": True,
        "reasoning_effort": "max",
    }


@pytest.mark.parametrize(
    ("model_type", "effort", "sent"),
    [
        ("hy_v3", "none", "no_think"),
        ("hy_v3", "minimal", "low"),
        ("hy_v3", "medium", "low"),
        ("hy_v3", "high", "high"),
        ("hy_v3", "max", "high"),
        ("gpt_oss", "none", "low"),
        ("gpt_oss", "minimal", "low"),
        ("gpt_oss", "medium", "medium"),
        ("gpt_oss", "xhigh", "high"),
        ("gpt_oss", "odd", "odd"),
        ("deepseek_v4", "low", "low"),
        ("deepseek_v4", "max", "max"),
        ("qwen3", "medium", "medium"),
    ],
)
def test_effort_words_become_the_familys_own(model_type: str, effort: str, sent: str) -> None:
    assert _switches(model_type, reasoning_effort=effort)["reasoning_effort"] == sent


def test_thinking_alone_means_high_effort_where_effort_is_the_switch() -> None:
    assert _switches("hy_v3", enable_thinking=True)["reasoning_effort"] == "high"
    assert _switches("hy_v3", enable_thinking=False)["reasoning_effort"] == "no_think"


def test_a_strict_family_refuses_other_efforts() -> None:
    with pytest.raises(InvalidField, match="one of low, high, max, got 'medium'"):
        _switches("deepseek_v4", reasoning_effort="medium")


def test_what_could_not_be_met_is_said() -> None:
    found = template_switches(_bundle("gpt_oss"), "m", {"enable_thinking": False})
    assert found.kwargs == {"reasoning_effort": "low"}
    assert found.notes == ("this model cannot stop thinking: its effort is low",)


@pytest.mark.parametrize(
    ("levels", "word", "sent"),
    [
        (("low", "high"), "medium", "high"),
        (("low", "medium"), "max", "medium"),
        (("medium", "xhigh"), "none", None),
        ((), "high", None),
        (None, "high", "high"),
    ],
)
def test_declared_levels_take_the_nearest_word_upwards_on_ties(
    levels: tuple[str, ...] | None, word: str, sent: str | None
) -> None:
    bundle = _bundle("qwen3", effort_levels=levels)
    found = template_switches(bundle, "m", {"reasoning_effort": word}).kwargs
    assert found.get("reasoning_effort") == sent


def test_a_bundles_defaults_stand_between_the_request_and_the_family() -> None:
    bundle = _bundle("qwen3", template_defaults={"enable_thinking": True, "keep": 1})
    assert template_switches(bundle, "m", {}).kwargs == {"enable_thinking": True, "keep": 1}
    explicit = template_switches(bundle, "m", {"enable_thinking": False}).kwargs
    assert explicit == {"enable_thinking": False, "keep": 1}
    refused = _bundle("qwen3", template_defaults={"enable_thinking": True}, supports_thinking=False)
    assert template_switches(refused, "m", {}).kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("model_type", ["zaya", "bailing_moe"])
def test_some_families_think_only_when_the_request_says_so(model_type: str) -> None:
    bundle = _bundle(model_type, template_defaults={"enable_thinking": True})
    assert not template_switches(bundle, "m", {}).kwargs.get("enable_thinking", False)
    asked = template_switches(bundle, "m", {"enable_thinking": True}).kwargs
    assert asked["enable_thinking"] is True


@pytest.mark.parametrize("model_type", ["lfm2", "step3p5", "mimo_v2"])
def test_thinking_is_off_for_a_required_call_where_it_cannot_be_bounded(model_type: str) -> None:
    given = {"enable_thinking": True}
    found = template_switches(_bundle(model_type), "m", given, needs_call=True)
    assert found.kwargs == {"enable_thinking": False}
    assert found.notes
    assert template_switches(_bundle("qwen3"), "m", given, needs_call=True).kwargs == given


@pytest.mark.parametrize(
    ("model_id", "template", "name"),
    [
        ("org/Qwen3-Coder-30B", "", "qwen-coder"),
        ("qwen3_coder", "", "qwen-coder"),
        ("Qwen3Coder", "", "qwen-coder"),
        ("my-encoder", "", "qwen"),
        ("m", "{# for the decoder #}", "qwen"),
        ("Qwen3-Codersson", "", "qwen"),
    ],
)
def test_a_row_is_chosen_by_whole_words(model_id: str, template: str, name: str) -> None:
    assert profile_of(_bundle("qwen3", template), model_id).profile.name == name


def test_a_profile_names_its_source() -> None:
    coder = profile_of(_bundle("qwen3_moe"), "org/Qwen3-Coder-30B")
    assert (coder.profile.name, coder.source) == ("qwen-coder", "model_type qwen3_moe")
    toggle = profile_of(_bundle("unheard", "{{ enable_thinking }}"), "m")
    assert (toggle.profile.name, toggle.source) == ("toggle", "template")
    plain = profile_of(_bundle("unheard"), "m")
    assert (plain.profile.name, plain.source) == ("none", "none")

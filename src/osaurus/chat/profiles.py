"""Model profiles: what a family's template calls its thinking switches, as one table.

In: a bundle's conventions and a request's template switches. Out: the switches to render with,
and a note where a wish could not be met. A request's explicit choice always wins, then what the
bundle declares, then the family's row; nothing else is ever sent to a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osaurus.errors import InvalidField
from osaurus.runtime.conventions import Conventions

OFF_WORDS = frozenset(
    {"none", "off", "instruct", "chat", "no_think", "nothink", "disabled", "false"}
)

#: The scale on which a word is moved to the nearest level that a model knows.
_SCALE = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: The two names under which every protocol's wish arrives here.
SWITCH, EFFORT = "enable_thinking", "reasoning_effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One family's row.

    `switches` are the template variables that turn thinking on and off. `levels` are the effort
    words its template knows: None passes any word on, empty leaves effort out. `off_effort` is
    the word that means off, where effort is the switch. `unset` is sent when nobody chose.
    `is_strict` refuses other effort words; `off_for_required` turns thinking off when a call is
    required, where a block cannot be bounded. `shown` is what a client's toggle starts with.
    """

    name: str
    prefixes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  #: one of them must be in the model's id or template
    switches: tuple[str, ...] = (SWITCH,)
    levels: tuple[str, ...] | None = None
    off_effort: str | None = None
    on_effort: str | None = None
    efforts: Mapping[str, str] = field(default_factory=dict)  #: words that move elsewhere
    unset: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    off_for_required: bool = False
    follows_bundle: bool = True
    shown: Literal["off", "on", "template", "hidden"] = "off"


_OFF: Mapping[str, Any] = {SWITCH: False}

#: By compact `model_type` prefix, first fitting row. Rows with `words` stand before those without.
PROFILES: tuple[Profile, ...] = (
    Profile(name="qwen-coder", prefixes=("qwen3",), words=("coder",), switches=(), shown="hidden"),
    Profile(name="qwen", prefixes=("qwen3", "qwen35", "qwen36"), unset=_OFF),
    Profile(name="nemotron", prefixes=("nemotron",), unset=_OFF),
    Profile(name="minimax", prefixes=("minimax",), unset=_OFF),
    Profile(name="gemma4", prefixes=("gemma4", "diffusiongemma"), unset=_OFF),
    Profile(name="laguna", prefixes=("laguna",)),
    Profile(name="zaya-vl", prefixes=("zaya1vl",), switches=(), shown="hidden"),
    Profile(name="zaya", prefixes=("zaya", "zyphra"), unset=_OFF, follows_bundle=False),
    # Their templates begin with thinking off.
    Profile(name="ling", prefixes=("bailing", "ling"), follows_bundle=False),
    Profile(
        name="deepseek-v4",
        prefixes=("deepseekv4",),
        levels=("low", "high", "max"),
        is_strict=True,
    ),
    Profile(name="deepseek", prefixes=("deepseek",), switches=(SWITCH, "thinking")),
    Profile(
        name="hunyuan",
        prefixes=("hy3", "hyv3"),
        levels=("low", "high"),
        off_effort="no_think",
        on_effort="high",
        efforts={"minimal": "low", "medium": "low"},
    ),
    Profile(name="kimi", prefixes=("kimi",), switches=(SWITCH, "thinking"), shown="template"),
    Profile(
        name="gpt-oss",
        prefixes=("gptoss",),
        switches=(),
        levels=("low", "medium", "high"),
        off_effort="low",
        shown="on",
    ),
    Profile(
        name="mistral",
        prefixes=("mistral", "ministral", "pixtral"),
        words=("[model_settings]",),
        switches=(),
        levels=("high",),
        off_effort="none",
        on_effort="high",
    ),
    Profile(name="granite", prefixes=("granite",), switches=(SWITCH, "thinking")),
    Profile(name="lfm2", prefixes=("lfm2",), off_for_required=True),
    Profile(name="step", prefixes=("step3p5", "step3p7", "stepfun"), off_for_required=True),
    Profile(name="mimo", prefixes=("mimo",), off_for_required=True),
)

_TOGGLE = Profile(name="toggle", shown="template")
_PLAIN = Profile(name="none", shown="hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """`source` says which evidence chose the row, as `osaurus show` tells it."""

    profile: Profile
    source: str


def profile_of(conventions: Conventions, model_id: str) -> ProfileChoice:
    facts = conventions.facts
    about = f"{model_id}\n{facts.template}".lower()
    for model_type in (facts.model_type, facts.text_model_type):
        compact = "".join(char for char in model_type.lower() if char.isalnum())
        for profile in PROFILES:
            if compact.startswith(profile.prefixes) and (
                not profile.words or any(word in about for word in profile.words)
            ):
                return ProfileChoice(profile=profile, source=f"model_type {model_type}")
    if conventions.formats.reasoning is not None and SWITCH in facts.template:
        return ProfileChoice(profile=_TOGGLE, source="template")
    return ProfileChoice(profile=_PLAIN, source="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """`kwargs` are what the template gets; `notes` tell the client what differs from its wish."""

    kwargs: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def template_switches(
    conventions: Conventions, model_id: str, given: Mapping[str, Any], *, needs_call: bool = False
) -> Switches:
    """The switches of one render. `given` are the request's own, by their names on the wire.

    Raises `InvalidField` for an effort that a strict family does not know.
    """
    profile = profile_of(conventions, model_id).profile
    kwargs, notes = dict(given), list[str]()
    enable, effort = kwargs.pop(SWITCH, None), kwargs.pop(EFFORT, None)
    is_open = enable is None and effort is None and not _OWN_SWITCHES.intersection(kwargs)
    if profile.follows_bundle:
        declared = dict(conventions.template_defaults)
        default, default_effort = declared.pop(SWITCH, None), declared.pop(EFFORT, None)
        kwargs = {**declared, **kwargs}
        if is_open:
            enable, effort = default, default_effort
            if conventions.supports_thinking is False:
                enable, effort = False, None
            is_open = enable is None and effort is None
    if needs_call and profile.off_for_required:
        if enable or (effort is not None and not _is_off(effort)):
            notes.append("thinking is off: this model cannot think before a required call")
        enable, effort, is_open = False, None, False
    if is_open:
        return Switches(kwargs={**profile.unset, **kwargs}, notes=tuple(notes))
    if enable is not None and not isinstance(enable, bool):
        raise InvalidField(SWITCH, "must be true or false")
    if effort is not None and not isinstance(effort, str):
        raise InvalidField(EFFORT, "must be a string")
    wanted = _wanted(profile, conventions, enable, effort, notes)
    # What the request spelled in the template's own words stays as it is.
    return Switches(kwargs={**wanted, **kwargs}, notes=tuple(notes))


#: Switches of single families that a request may spell itself.
_OWN_SWITCHES = frozenset({"thinking"})


def _wanted(
    profile: Profile,
    conventions: Conventions,
    enable: bool | None,
    effort: str | None,
    notes: list[str],
) -> dict[str, Any]:
    switches: dict[str, Any] = {}
    is_on = enable if enable is not None else effort is not None and not _is_off(effort)
    if enable is not None or effort is not None:
        switches = dict.fromkeys(profile.switches, is_on)
    if not is_on:
        if profile.off_effort is not None:
            switches[EFFORT] = profile.off_effort
            if not profile.switches and profile.shown == "on":
                notes.append("this model cannot stop thinking: its effort is low")
        elif effort is not None and not _is_off(effort) and profile.levels is None:
            switches[EFFORT] = effort  # says nothing while thinking is off, but it was said
        return switches
    word = None if effort is None or _is_off(effort) else effort.strip()
    if word is None:
        if profile.on_effort is not None:
            switches[EFFORT] = profile.on_effort
        return switches
    levels = conventions.effort_levels if profile.levels is None else profile.levels
    level = profile.efforts.get(word.lower()) or _level(word, levels, is_strict=profile.is_strict)
    if level is not None:
        switches[EFFORT] = level
        if level != word:
            notes.append(f"reasoning_effort {word[:20]!r} became {level!r}")
    return switches


def _is_off(effort: object) -> bool:
    return isinstance(effort, str) and effort.strip().lower() in OFF_WORDS


def _level(word: str, levels: tuple[str, ...] | None, *, is_strict: bool) -> str | None:
    """The nearest level that is known, upwards on ties. A word off the scale is passed on, so
    that the template's own error reaches the client."""
    if levels is None or word in levels:
        return word
    if is_strict:
        raise InvalidField(EFFORT, f"must be one of {', '.join(levels)}, got {word[:20]!r}")
    if not levels:
        return None
    if word.lower() not in _SCALE:
        return word
    place = _SCALE.index(word.lower())
    known = [level for level in levels if level in _SCALE]
    if not known:
        return word
    return min(known, key=lambda each: (abs(_SCALE.index(each) - place), -_SCALE.index(each)))

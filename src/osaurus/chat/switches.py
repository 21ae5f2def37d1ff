"""The template switches of one render: what the request chose, the bundle declares, the row says.

In: a bundle's conventions and a request's switches. Out: `Switches`, with a note where a wish
could not be met. A request's explicit choice always wins, then what the bundle declares, then
the family's row (`profiles.py`); nothing else is ever sent to a template. What a bundle declares
and its family does not know is left out with a line in the log: no client can mend it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from osaurus.chat.probes import refuses, tells_apart
from osaurus.chat.profiles import EFFORT, SWITCH, Profile, profile_of
from osaurus.errors import InvalidField
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import Template

logger = logging.getLogger(__name__)

OFF_WORDS = frozenset(
    {"none", "off", "instruct", "chat", "no_think", "nothink", "disabled", "false"}
)

#: The scale on which a word is moved to the nearest level that a model knows.
_SCALE = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

#: What the template's caller supplies itself.
RESERVED_KWARGS = frozenset({"self", "messages", "tools", "add_generation_prompt"})

#: The other name of the switch, which a bundle or a request may spell itself.
_OWN_SWITCH = "thinking"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """`kwargs` are what the template gets; `notes` tell the client what differs from its wish.

    `thinking` is what was decided, None where the template decides; `is_asked` where the request
    chose. With `closes_block` a block that the prompt's end opens is closed when thinking is off.
    `text` is for the system message of a template that does not look at `kwargs`.
    """

    kwargs: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    thinking: bool | None = None
    is_asked: bool = False
    closes_block: bool = False
    text: str = ""


@dataclass(slots=True)
class _Choice:
    """A wish: on, off or open, and how much. An effort word alone says on or off too."""

    enable: bool | None = None
    effort: str | None = None

    @property
    def is_on(self) -> bool | None:
        if self.enable is None and self.effort is not None:
            return not is_off(self.effort)
        return self.enable

    @property
    def level(self) -> str | None:
        return None if self.effort is None or is_off(self.effort) else self.effort.strip()


def template_switches(
    conventions: Conventions, model_id: str, given: Mapping[str, Any], *, needs_call: bool = False
) -> Switches:
    """The switches of one render. `given` are the request's own, by their names on the wire.

    Raises `InvalidField` for an effort that a strict family does not know.
    """
    profile = profile_of(conventions, model_id).profile
    kwargs, notes = dict(given), list[str]()
    choice = _asked(kwargs)
    asked = choice.is_on
    names = list(profile.switches)
    if isinstance(given.get(_OWN_SWITCH), bool):
        names.append(_OWN_SWITCH)
    if profile.follows_bundle:
        declared = dict(conventions.template_defaults)
        if isinstance(declared.get(_OWN_SWITCH), bool):
            names.append(_OWN_SWITCH)
        default = _declared(profile, conventions, model_id, declared)
        kwargs = {**declared, **kwargs}
        if asked is None:
            choice = default
        elif choice.effort is None and choice.enable:
            choice.effort = default.level
    is_forced = needs_call and profile.off_for_required
    if is_forced:
        if choice.is_on:
            notes.append("thinking is off: this model cannot think before a required call")
        choice = _Choice(enable=False)
    thinking = choice.is_on
    if thinking is None:
        kwargs = {**profile.unset, **kwargs}
        thinking = profile.unset.get(SWITCH)
        text = ""
    else:
        wanted = _wanted(profile, conventions, choice, names, notes)
        kwargs = {**kwargs, **wanted}
        text = profile.words_in_text.get(thinking, "")
    return Switches(
        kwargs=kwargs,
        notes=tuple(notes),
        thinking=thinking,
        is_asked=asked is not None,
        closes_block=profile.closes_block or is_forced,
        text=text,
    )


def usable(conventions: Conventions, model_id: str, template: Template) -> Conventions:
    """Without the bundle's defaults where its own template refuses them, which no client can
    mend; found out by rendering."""
    if not conventions.template_defaults and not conventions.default_mode:
        return conventions
    for given in ({}, {SWITCH: True}):
        if refuses(template, template_switches(conventions, model_id, given).kwargs):
            _log_once(f"{model_id}: its template refuses the bundle's own default switches")
            return replace(conventions, template_defaults={}, default_mode="")
    return conventions


def reads_switch(conventions: Conventions, model_id: str, template: Template) -> bool:
    """Whether turning thinking on and off makes a difference to the prompt."""
    on, off = (
        template_switches(conventions, model_id, {SWITCH: value}).kwargs for value in (True, False)
    )
    return tells_apart(template, on, off)


def _asked(kwargs: dict[str, Any]) -> _Choice:
    """The request's choice, taken out of its switches."""
    enable, effort = kwargs.pop(SWITCH, None), kwargs.pop(EFFORT, None)
    if enable is not None and not isinstance(enable, bool):
        raise InvalidField(SWITCH, "must be true or false")
    if effort is not None and not isinstance(effort, str):
        raise InvalidField(EFFORT, "must be a string")
    own = kwargs.get(_OWN_SWITCH)
    if enable is None and isinstance(own, bool):
        enable = own
    return _Choice(enable, effort)


def _declared(
    profile: Profile, conventions: Conventions, model_id: str, declared: dict[str, Any]
) -> _Choice:
    """The bundle's choice, taken out of its switches: its mode says on or off, its effort how
    much. `capabilities.supports_thinking=false` means off."""
    enable, effort = declared.pop(SWITCH, None), declared.pop(EFFORT, None)
    own = declared.get(_OWN_SWITCH)
    if isinstance(own, bool):
        enable = own if enable is None else enable
        del declared[_OWN_SWITCH]
    for name in RESERVED_KWARGS & declared.keys():
        _ignore(model_id, name, declared.pop(name))
    mode = conventions.default_mode
    if mode and enable is None:
        enable = not is_off(mode)
        if effort is None and mode.strip().lower() in _SCALE:
            effort = mode
    if conventions.supports_thinking is False:
        enable, effort = False, None
    if enable is not None and not isinstance(enable, bool):
        _ignore(model_id, SWITCH, enable)
        enable = None
    if effort is not None and not _is_usable(profile, conventions, effort):
        _ignore(model_id, EFFORT, effort)
        effort = None
    return _Choice(enable, None if enable is False else effort)


def _is_usable(profile: Profile, conventions: Conventions, effort: Any) -> bool:
    """Whether a default can be sent without the template or the row refusing it."""
    if not isinstance(effort, str):
        return False
    levels = _levels(profile, conventions)
    if is_off(effort) or not levels or effort in levels:
        return True
    return not profile.is_strict and effort.strip().lower() in _SCALE


def _ignore(model_id: str, name: str, value: Any) -> None:
    _log_once(f"{model_id}: the bundle's default {name} {str(value)[:40]!r} cannot be used")


@lru_cache(maxsize=256)
def _log_once(line: str) -> None:
    logger.warning("%s", line)


def _wanted(
    profile: Profile,
    conventions: Conventions,
    choice: _Choice,
    names: Sequence[str],
    notes: list[str],
) -> dict[str, Any]:
    switches: dict[str, Any] = dict.fromkeys(names, bool(choice.is_on))
    if not choice.is_on:
        if profile.off_effort is not None:
            switches[EFFORT] = profile.off_effort
            if not profile.switches and profile.shown == "on":
                notes.append("this model cannot stop thinking: its effort is low")
        elif choice.level is not None and profile.levels is None:
            switches[EFFORT] = choice.effort  # says nothing while thinking is off, but was said
        return switches
    word = choice.level
    if word is None:
        if profile.on_effort is not None:
            switches[EFFORT] = profile.on_effort
        return switches
    levels = _levels(profile, conventions)
    level = profile.efforts.get(word.lower()) or _level(word, levels, is_strict=profile.is_strict)
    if level is not None:
        switches[EFFORT] = level
        if level != word:
            notes.append(f"reasoning_effort {word[:20]!r} became {level!r}")
    return switches


def is_off(word: str) -> bool:
    return word.strip().lower() in OFF_WORDS


def _levels(profile: Profile, conventions: Conventions) -> tuple[str, ...] | None:
    return conventions.effort_levels if profile.levels is None else profile.levels


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

"""Model profiles: what a family's template calls its thinking switches, as one table.

In: a bundle's conventions and its id. Out: the family's row and the evidence that chose it. What
a request gets by a row is decided in `switches.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osaurus.runtime.conventions import Conventions

#: The two names under which every protocol's wish arrives here.
SWITCH, EFFORT = "enable_thinking", "reasoning_effort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One family's row.

    `switches` are the template variables that turn thinking on and off. `levels` are the effort
    words its template knows: None passes any word on, empty leaves effort out. `off_effort` is
    the word that means off, where effort is the switch. `unset` is sent when nobody chose.
    `is_strict` refuses other effort words; `off_for_required` turns thinking off when a call is
    required, where a block cannot be bounded. `closes_block`: the stock template opens a block
    whatever it is told, and the model goes on from a closed one. `words_in_text` turn thinking on
    and off in the system message, for templates that look there. `shown` is what a client's
    toggle starts with.
    """

    name: str
    prefixes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  #: one of them must be in the model's id or template, whole
    switches: tuple[str, ...] = (SWITCH,)
    levels: tuple[str, ...] | None = None
    off_effort: str | None = None
    on_effort: str | None = None
    efforts: Mapping[str, str] = field(default_factory=dict)  #: words that move elsewhere
    unset: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    off_for_required: bool = False
    closes_block: bool = False
    words_in_text: Mapping[bool, str] = field(default_factory=dict)
    follows_bundle: bool = True
    shown: Literal["off", "on", "template", "hidden"] = "off"


_OFF: Mapping[str, Any] = {SWITCH: False}

#: By compact `model_type` prefix, first fitting row. Rows with `words` stand before those without.
PROFILES: tuple[Profile, ...] = (
    Profile(name="qwen-coder", prefixes=("qwen3",), words=("coder",), switches=(), shown="hidden"),
    Profile(name="qwen", prefixes=("qwen3", "qwen35", "qwen36"), unset=_OFF),
    Profile(
        name="nemotron",
        prefixes=("nemotron",),
        unset=_OFF,
        words_in_text={True: "/think", False: "/no_think"},  # before Nemotron 3
    ),
    Profile(name="minimax", prefixes=("minimax",), unset=_OFF, closes_block=True),
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
    Profile(
        name="step",
        prefixes=("step3p5", "step3p7", "stepfun"),
        off_for_required=True,
        closes_block=True,
    ),
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
                not profile.words or any(_has_word(about, word) for word in profile.words)
            ):
                return ProfileChoice(profile=profile, source=f"model_type {model_type}")
    if conventions.formats.reasoning is not None and SWITCH in facts.template:
        return ProfileChoice(profile=_TOGGLE, source="template")
    return ProfileChoice(profile=_PLAIN, source="none")


def _has_word(text: str, word: str) -> bool:
    """Whether `word` is there by itself: `Qwen3-Coder` holds "coder", an encoder does not."""
    return re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", text) is not None

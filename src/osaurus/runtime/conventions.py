"""How a bundle speaks: its output formats and what it declares of thinking, with the sources.

In: an opened bundle. Out: `Conventions`, which a resident model carries to `chat/` and which
`osaurus show` prints. Decides nothing itself: formats are `parsing/selection.py`'s choice and
switches are the model profiles' (`chat/profiles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from osaurus.bundle.config import read_optional, read_tokenizer_config
from osaurus.parsing.selection import BundleFacts, FormatChoice, choose_formats

_NO_FORMATS = FormatChoice(
    tool_format=None, tool_origin="none", reasoning=None, reasoning_origin="none"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """`template_defaults` are the bundle's own template switches; `defaults_origin` names the
    file. `default_mode` is the word for its usual way of answering ("thinking", "instruct", ...).
    `effort_levels` are the words its control of effort declares: none known is None, a control
    without words is empty. `supports_thinking` is None where the bundle does not say.
    """

    formats: FormatChoice = _NO_FORMATS
    facts: BundleFacts = field(default_factory=BundleFacts)
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults_origin: str = ""
    default_mode: str = ""
    effort_levels: tuple[str, ...] | None = None
    supports_thinking: bool | None = None


class _Tokenizer(Protocol):
    @property
    def added_tokens(self) -> Mapping[str, int]: ...


class _Bundle(Protocol):
    """What is asked of a bundle here."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_templates(self) -> Mapping[str, str]: ...
    def load_tokenizer(self) -> _Tokenizer: ...


def read_conventions(
    bundle: _Bundle,
    *,
    tool_override: str | None = None,
    reasoning_override: str | None = None,
) -> Conventions:
    """Raises `InvalidField` for an override that names no known format."""
    stamp = _Stamp.of(bundle.path)
    facts = _facts(bundle, stamp)
    defaults, mode, origin = _template_defaults(bundle, stamp)
    return Conventions(
        formats=choose_formats(
            facts, tool_override=tool_override, reasoning_override=reasoning_override
        ),
        facts=facts,
        template_defaults=defaults,
        defaults_origin=origin,
        default_mode=mode,
        effort_levels=stamp.effort_levels(),
        supports_thinking=stamp.flag("capabilities", "supports_thinking"),
    )


@dataclass(frozen=True, slots=True)
class _Stamp:
    """A bundle's `jang_config.json`: what its maker says of it. Empty where there is none."""

    entries: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        return cls(read_optional(path / "jang_config.json") if path.is_dir() else {})

    def at(self, *keys: str) -> Any:
        found: Any = self.entries
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def text(self, *keys: str) -> str | None:
        found = self.at(*keys)
        return found if isinstance(found, str) else None

    def flag(self, *keys: str) -> bool | None:
        found = self.at(*keys)
        return found if isinstance(found, bool) else None

    def mapping(self, *keys: str) -> dict[str, Any]:
        found = self.at(*keys)
        return dict(found) if isinstance(found, Mapping) else {}

    def effort_levels(self) -> tuple[str, ...] | None:
        declared = self.at("chat", "reasoning", "effort_levels")
        if declared is None:
            return None
        return tuple(filter(None, map(str, declared))) if isinstance(declared, list) else ()


def _facts(bundle: _Bundle, stamp: _Stamp) -> BundleFacts:
    config = bundle.config
    nested = config.get("text_config")
    text_config: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    rope = config.get("rope_scaling") or text_config.get("rope_scaling")
    return BundleFacts(
        model_type=_text(config.get("model_type")),
        text_model_type=_text(text_config.get("model_type")),
        vocab_size=_whole(config.get("vocab_size")) or _whole(text_config.get("vocab_size")),
        rope_type=_text(rope.get("rope_type")) if isinstance(rope, Mapping) else "",
        template="\n".join(
            filter(None, (bundle.chat_template, bundle.chat_templates.get("tool_use")))
        ),
        added_tokens=frozenset(bundle.load_tokenizer().added_tokens),
        tool_stamp=stamp.text("capabilities", "tool_parser")
        or stamp.text("chat", "tool_calling", "parser"),
        reasoning_stamp=stamp.text("capabilities", "reasoning_parser"),
        think_in_template=stamp.flag("capabilities", "think_in_template"),
    )


def _template_defaults(bundle: _Bundle, stamp: _Stamp) -> tuple[dict[str, Any], str, str]:
    """The switches, mode and name of the first source that says anything of them."""
    declared = bundle.generation_config.get("default_chat_template_kwargs")
    if isinstance(declared, Mapping) and declared:
        return dict(declared), "", "generation_config.json"
    if bundle.path.is_dir():
        declared = read_tokenizer_config(bundle.path).get("default_chat_template_kwargs")
        if isinstance(declared, Mapping) and declared:
            return dict(declared), "", "tokenizer_config.json"
    if found := stamp.mapping("chat", "template_kwargs"):
        return found, "", "jang_config.json"
    mode = stamp.text("chat", "reasoning", "default_mode") or ""
    effort = stamp.text("chat", "reasoning", "default_effort")
    defaults: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return defaults, mode, "jang_config.json" if mode or defaults else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0

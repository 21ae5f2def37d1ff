"""One setting: its key, what it may hold, its default, when a change counts.

Values only: no file, no environment is read here. A check raises `InvalidField`, which names
what was given, the rule and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from osaurus.errors import InvalidField
from osaurus.settings.keys import seal
from osaurus.types.sampling import Range

Kind = Literal["switch", "whole", "number", "text", "word", "texts"]

#: When a change counts. `live`: from the next request on. `next load`: idle models are unloaded
#: and the next request loads with it. `restart`: when the server is started again.
Liveness = Literal["live", "next load", "restart"]

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SWITCHES = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_UNSET = ("", "null", "unset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`key` is the dotted path in the file. `range` bounds a number. `words` are what a `word`
    may be; a `whole` number or `text` may be one of them instead. `parse` is a further check of
    a text, raising ValueError, and `form` what it takes, in words. None, where `default` or
    `is_optional` allows it, overrides nothing below: not the profile, not the bundle, not the
    engine. A secret is an API key: it is kept as its hash. Of a setting that is not `is_used`
    the value is kept, and nothing heeds it yet. `flag` is that of `osaurus serve`."""

    key: str
    kind: Kind
    default: Any
    live: Liveness
    help: str
    unit: str = ""
    range: Range | None = None
    words: tuple[str, ...] = ()
    parse: Callable[[str], object] | None = None
    form: str = ""
    is_optional: bool = False
    is_secret: bool = False
    is_used: bool = True
    flag: str = ""

    @property
    def may_be_unset(self) -> bool:
        return self.is_optional or self.default is None

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def environment(self) -> str:
        """The variable that overrides it: the path in capitals, `network` being SERVER."""
        parts = [_CAMEL.sub("_", part).upper() for part in self.path]
        if parts[0] == "NETWORK":
            parts[0] = "SERVER"
        return "OSAURUS_" + "__".join(parts)

    @property
    def legal(self) -> str:
        """What may be written, in words: `a whole number, at least 1 and at most 32, or auto`."""
        if self.kind == "switch":
            return "true or false"
        if self.kind == "word":
            text = ", ".join(self.words)
        else:
            noun = {
                "whole": "a whole number",
                "number": "a number",
                "text": self.form or "a text that is not empty",
                "texts": "a list of texts",
            }[self.kind]
            text = f"{noun}, {self.range}" if self.range else noun
            if self.words:
                text = f"{', '.join(self.words)} or {text}"
        return f"{text}; null leaves it unset" if self.may_be_unset else text

    def check(self, value: Any, *, label: str | None = None) -> Any:
        """The value as it is used. Raises `InvalidField` under `label`, the name that the user
        wrote it by, else under the key."""
        if value is None:
            if self.may_be_unset:
                return None
            raise self._wrong(value, label)
        if isinstance(value, str) and value in self.words:
            return value
        checked = _CHECKS[self.kind](value)
        if checked is None or (self.range is not None and not self.range.holds(checked)):
            raise self._wrong(value, label)
        if self.parse is not None:
            try:
                self.parse(checked)
            except ValueError as error:
                raise InvalidField(label or self.key, str(error)) from None
        return seal(checked) if self.is_secret else checked

    def read(self, text: str, *, label: str | None = None) -> Any:
        """A value written as text: in a variable, or on the command line."""
        text = text.strip()
        if self.may_be_unset and text.lower() in _UNSET:
            return None
        value: Any = text
        if self.kind == "switch":
            value = _SWITCHES.get(text.lower(), text)
        elif self.kind in ("whole", "number"):
            value = _number(text)
        elif self.kind == "texts":
            value = [part.strip() for part in text.split(",") if part.strip()]
        return self.check(value, label=label)

    def shown(self, value: Any) -> Any:
        return "***" if self.is_secret and value is not None else value

    def _wrong(self, value: Any, label: str | None) -> InvalidField:
        given = "null" if value is None else f"{self.shown(value)!r}"
        message = f"must be {self.legal}; got {given}"
        if label is None:
            message += f"; change it with `osaurus config set {self.key} VALUE`"
        return InvalidField(label or self.key, message)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _whole(value: Any) -> int | None:
    number = _finite(value)
    return None if number is None or number != int(number) else int(number)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _word(value: Any) -> None:
    return None  # a word that is none of `words`


def _texts(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, (list, tuple)) or not all(_text(part) for part in value):
        return None
    return tuple(value)


_CHECKS: Mapping[Kind, Callable[[Any], Any]] = {
    "switch": _switch,
    "whole": _whole,
    "number": _finite,
    "text": _text,
    "word": _word,
    "texts": _texts,
}

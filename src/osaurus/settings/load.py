"""From a document, the environment and flags to the values that hold, each with its origin.

    default < file < environment < flag < override of this process

Pure: reading the file is `files.py`, when to read it `store.py`. An illegal value raises
`InvalidField` naming the key, variable or flag; only an unknown word in the file, which a newer
program may have written, falls back to the default with a notice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from osaurus.errors import InvalidField
from osaurus.settings.fields import Setting
from osaurus.settings.files import Document, find, leaves, with_value, without_value
from osaurus.settings.profiles import SLIDER
from osaurus.settings.schema import BY_KEY, SETTINGS

Origin = Literal["default", "file", "environment", "flag", "override"]

#: Keys of the file that are about the file.
_BOOKKEEPING = ("schemaVersion", "migrations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A value given on the command line, already checked there or here, and its spelling."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """`source` names the file, the variable or the flag."""

    setting: Setting
    value: Any
    origin: Origin
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Mapping[str, Any]):
    """The values that hold, by dotted key. `notices` are for people: what was put right."""

    resolved: Mapping[str, Resolved]
    notices: tuple[str, ...] = field(default=(), compare=False)

    def __getitem__(self, key: str) -> Any:
        return self.resolved[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.resolved)

    def __len__(self) -> int:
        return len(self.resolved)

    def origin(self, key: str) -> Origin:
        return self.resolved[key].origin

    def differing(self, other: Settings) -> list[Setting]:
        """The settings whose values differ, not counting where they come from."""
        return [one.setting for key, one in self.resolved.items() if one.value != other[key]]

    def document(self) -> Document:
        """All values as a file would hold them."""
        document: Document = {}
        for key, one in self.resolved.items():
            document = with_value(document, BY_KEY[key].path, one.value)
        return document


def resolve(
    document: Mapping[str, Any],
    *,
    file: str = "",
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Flag] | None = None,
    override: Mapping[str, Any] | None = None,
    is_new: bool = False,
) -> Settings:
    """Raises `InvalidField`. `is_new`: the document stands for a file that is not there yet."""
    environment, flags = environment or {}, flags or {}
    notices: list[str] = []
    resolved: dict[str, Resolved] = {}
    for setting in SETTINGS:
        one = Resolved(setting=setting, value=setting.default, origin="default")
        has, value = find(document, setting.path)
        if has:
            one = _from_document(setting, value, one, file, notices, is_new=is_new)
        text = environment.get(setting.environment, "")
        if text.strip():
            name = setting.environment
            value = setting.read(text, label=name)
            one = Resolved(setting=setting, value=value, origin="environment", source=name)
        if (flag := flags.get(setting.key)) is not None:
            value = setting.check(flag.value, label=flag.name)
            one = Resolved(setting=setting, value=value, origin="flag", source=flag.name)
        if override is not None and (given := find(override, setting.path))[0]:
            value = setting.check(given[1])
            one = Resolved(setting=setting, value=value, origin="override")
        resolved[setting.key] = one
    _view_slider(resolved)
    notices += [f"{file}: {text}" for text in _unknown_keys(document)]
    notices += _unknown_variables(environment)
    return Settings(resolved=resolved, notices=tuple(notices))


def _from_document(
    setting: Setting, value: Any, default: Resolved, file: str, notices: list[str], *, is_new: bool
) -> Resolved:
    try:
        value = setting.check(value)
    except InvalidField as error:
        if setting.is_used and setting.kind != "word":
            raise InvalidField(setting.key, f"{_reason(error)} (in {file})") from None
        notices.append(f"{file}: {error.message}; the default holds")
        return default
    if is_new:
        return Resolved(setting=setting, value=value, origin="default", source="a new file")
    return Resolved(setting=setting, value=value, origin="file", source=file)


def _reason(error: InvalidField) -> str:
    return error.message.removeprefix(f"{error.field}: ")


def _view_slider(resolved: dict[str, Resolved]) -> None:
    """The slider shows the mode, wherever that is from."""
    mode = resolved["memorySafety.mode"]
    resolved["memorySafety.slider"] = Resolved(
        setting=BY_KEY["memorySafety.slider"],
        value=SLIDER.index(mode.value),
        origin=mode.origin,
        source=mode.source,
    )


def _unknown_keys(document: Mapping[str, Any]) -> list[str]:
    """Kept and named."""
    known = (*BY_KEY, *_BOOKKEEPING)
    unknown = [key for key in leaves(document) if key not in known]
    return [f"{key} is not known and was kept{_guess(key, BY_KEY)}" for key in unknown]


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    known = {setting.environment for setting in SETTINGS}
    return [
        f"{name} is set and no setting is called so{_guess(name, known)}"
        for name in sorted(environment)
        if name.startswith("OSAURUS_") and "__" in name and name not in known
    ]


def _guess(name: str, known: Sequence[str] | Mapping[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; {close[0]} is" if close else ""


def setting_called(key: str) -> Setting:
    """Without regard to case. Raises `InvalidField` with the nearest key."""
    found = BY_KEY.get(key) or {k.lower(): s for k, s in BY_KEY.items()}.get(key.lower())
    if found is None:
        close = difflib.get_close_matches(key, BY_KEY, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InvalidField(key, f"is no setting; {hint}`osaurus config show` lists them all")
    return found


def assign(document: Mapping[str, Any], setting: Setting, value: Any) -> Document:
    """The document with one more value. Mode and slider are one value, and choosing no
    automatic limits lets go of a fraction that was set for another mode."""
    if setting.key == "memorySafety.slider":
        setting, value = BY_KEY["memorySafety.mode"], SLIDER[value]
    changed = with_value(document, setting.path, value)
    if setting.key == "memorySafety.mode":
        changed = with_value(changed, BY_KEY["memorySafety.slider"].path, SLIDER.index(value))
        if value == "diagnostic_dangerous":
            changed = without_value(
                changed, BY_KEY["memorySafety.customPhysicalMemoryFraction"].path
            )
    return changed

"""`osaurus config`: every setting with its value, where that is from, and how to change it.

Works on the file; a server that runs sees the change at its next request. Imports no torch but
for `preview`, and there only beside a CUDA device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import App, Parameter

from osaurus.cli.app import EXIT_FAILED, EXIT_OK
from osaurus.cli.options import Json, Yes
from osaurus.cli.terminal import columns, confirm, say
from osaurus.settings.fields import Setting
from osaurus.settings.files import Document, without_value
from osaurus.settings.load import Resolved, Settings, assign, setting_called
from osaurus.settings.migrate import first_document
from osaurus.settings.paths import all_places
from osaurus.settings.places import configured_models_dir
from osaurus.settings.rules import find_issues
from osaurus.settings.store import SettingsStore

config = App(name="config")

_HEADER = ("SETTING", "VALUE", "FROM", "LEGAL", "COUNTS")
_WHEN = {
    "live": "from the next request on",
    "next load": "when a model is loaded; those that are loaded are loaded anew when idle",
    "restart": "when the server is started again",
}


@config.command
def get(key: str, /, *, as_json: Json = False) -> None:
    """Print the value that holds; where it is from is said beside it.

    Parameters
    ----------
    key
        A setting, such as network.port.
    """
    one = _load(SettingsStore()).resolved[setting_called(key).key]
    if as_json:
        print(json.dumps(_row_json(one), indent=2))
        return
    print(_shown(one))
    say(f"from {_origin(one)}")


@config.command(name="set")
def set_value(key: str, value: str, /, *, as_json: Json = False) -> None:
    """Write a value to the settings file.

    Parameters
    ----------
    key
        A setting, such as network.port.
    value
        What it shall be; null unsets one that may be unset, lists are written with commas.
    """
    setting = setting_called(key)
    _change(setting, lambda document: assign(document, setting, setting.read(value)), as_json)


@config.command
def unset(key: str, /, *, as_json: Json = False) -> None:
    """Take a value out of the settings file, so that the default holds again.

    Parameters
    ----------
    key
        A setting, such as network.port.
    """
    setting = setting_called(key)
    _change(setting, lambda document: without_value(document, setting.path), as_json)


@config.command
def show(
    section: str = "",
    /,
    *,
    changed: Annotated[bool, Parameter(show_default=False)] = False,
    as_json: Json = False,
) -> int:
    """Show every setting with its value and where that is from.

    Parameters
    ----------
    section
        Only settings that begin so, such as cache.
    changed
        Only settings that are not at their default.
    """
    store = SettingsStore()
    settings = _load(store)
    rows = [
        one
        for key, one in settings.resolved.items()
        if key.lower().startswith(section.lower()) and not (changed and one.origin == "default")
    ]
    issues = find_issues(settings)
    if as_json:
        facts = {
            "file": str(store.path),
            "exists": store.path.exists(),
            "settings": [_row_json(one) for one in rows],
            "issues": [asdict(issue) for issue in issues],
            "notices": list(settings.notices),
        }
        print(json.dumps(facts, indent=2))
    else:
        print(columns(_HEADER, [_row(one) for one in rows]))
        for issue in issues:
            say(f"{issue.severity}: {issue.field}: {issue.message}")
    return EXIT_FAILED if any(issue.severity == "error" for issue in issues) else EXIT_OK


@config.command
def paths(*, as_json: Json = False) -> None:
    """Show every place on disk, and the reason why it is there."""
    models = configured_models_dir()
    places = [models if one.name == models.name else one for one in all_places()]
    if as_json:
        facts = [{"name": p.name, "path": str(p.path), "reason": p.reason} for p in places]
        print(json.dumps(facts, indent=2))
    else:
        rows = [(place.name, str(place.path), place.reason) for place in places]
        print(columns(("PLACE", "PATH", "BECAUSE OF"), rows))


@config.command
def preview(model: str = "default", /, *, as_json: Json = False) -> None:
    """Show what the settings come to for one model, and the command line that says the same.

    Parameters
    ----------
    model
        Name, alias or path of a model.
    """
    from osaurus.runtime.preview import meta_of
    from osaurus.settings.render import preview_command, render_settings, shell_line

    settings = _load(SettingsStore())
    meta = meta_of(model, settings)
    rows = render_settings(settings, meta)
    words = preview_command(settings, meta)
    if as_json:
        facts = {"model": meta.model_id, "rows": [asdict(row) for row in rows], "command": words}
        print(json.dumps(facts, indent=2))
        return
    print(
        columns(
            ("SETTING", "VALUE", "FROM", ""),
            [(row.label, row.value, row.source, row.reason) for row in rows],
        )
    )
    print()
    print(shell_line(words))


@config.command
def reset(*, yes: Yes = False) -> int:
    """Write the settings file of a fresh install; what older programs left is not read again."""
    store = SettingsStore()
    if not yes and not confirm(f"Write the defaults to {store.path}?"):
        return EXIT_FAILED
    store.save(first_document())
    say(f"defaults written to {store.path}")
    return EXIT_OK


def _load(store: SettingsStore) -> Settings:
    settings = store.load(checks=False)
    for notice in settings.notices:
        say(notice)
    return settings


def _change(setting: Setting, change: Callable[[Document], Document], as_json: bool) -> None:
    store = SettingsStore(environment=_places_only())
    store.load(checks=False)
    store.save(change(store.document))
    one = _load(SettingsStore()).resolved[setting.key]
    if as_json:
        print(json.dumps(_row_json(one), indent=2))
        return
    when = _WHEN[setting.live] if setting.is_used else f"without effect here: {setting.help}"
    say(f"{setting.key} is {_shown(one)}, {when}")
    if one.origin == "environment":
        say(f"{one.source} is set here and wins over the file")


def _places_only() -> Mapping[str, str]:
    """The environment without values of settings: those do not go into the file."""
    return {name: value for name, value in os.environ.items() if "__" not in name}


def _row(one: Resolved) -> tuple[str, ...]:
    counts = one.setting.live if one.setting.is_used else f"no effect: {one.setting.help}"
    return (one.setting.key, _shown(one), _origin(one), one.setting.legal, counts)


def _origin(one: Resolved) -> str:
    return one.source if one.origin in ("environment", "flag") else one.origin


def _shown(one: Resolved) -> str:
    value = one.setting.shown(one.value)
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _row_json(one: Resolved) -> dict[str, Any]:
    """Stable keys."""
    setting = one.setting
    return {
        "key": setting.key,
        "value": setting.shown(one.value),
        "default": setting.default,
        "origin": one.origin,
        "source": one.source or None,
        "legal": setting.legal,
        "unit": setting.unit or None,
        "live": setting.live,
        "used": setting.is_used,
        "environment": setting.environment,
        "flag": setting.flag or None,
        "help": setting.help,
    }

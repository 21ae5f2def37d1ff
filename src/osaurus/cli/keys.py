"""`osaurus keys`: who may use this server from elsewhere.

Works on the file of hashes; a server that runs heeds a change with its next request. Imports no
torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from cyclopts import App

from osaurus.cli.options import Json
from osaurus.cli.terminal import columns, say
from osaurus.settings.keys import ApiKey, KeyRing
from osaurus.settings.paths import api_keys

keys = App(name="keys")

_HEADER = ("ID", "NAME", "STATE", "CREATED", "EXPIRES")


@keys.command
def create(name: str = "default", /, *, days: float | None = None, as_json: Json = False) -> None:
    """Make a key and print it: nothing remembers it, so keep it.

    Parameters
    ----------
    name
        What it is for.
    days
        How long it is good for; without end when it is not said.
    """
    ring = KeyRing(api_keys().path)
    key, text = ring.create(name, days=days)
    if as_json:
        print(json.dumps(_facts(key) | {"key": text}, indent=2))
        return
    say(f"osaurus: key {key.id} ({key.name}); only its hash is kept, in {ring.path}")
    print(text)


@keys.command(name="list")
def list_keys(*, as_json: Json = False) -> None:
    """List the keys, without what they say."""
    found = KeyRing(api_keys().path).keys
    if as_json:
        print(json.dumps([_facts(key) for key in found], indent=2))
        return
    rows = [
        (key.id, key.name, _state(key), key.created_at, key.expires_at or "never") for key in found
    ]
    print(columns(_HEADER, rows))


@keys.command
def revoke(key_id: str, /) -> None:
    """Let a key open nothing any more.

    Parameters
    ----------
    key_id
        As `osaurus keys list` shows it.
    """
    key = KeyRing(api_keys().path).revoke(key_id)
    say(f"osaurus: key {key.id} ({key.name}) is revoked")


def _facts(key: ApiKey) -> dict[str, Any]:
    facts = asdict(key)
    del facts["hash"]
    return facts | {"state": _state(key)}


def _state(key: ApiKey) -> str:
    return key.verdict(datetime.now(UTC))

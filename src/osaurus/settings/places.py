"""The places of `paths.py` that settings move: where models lie and where they are fetched to.

For verbs that only look: nothing is written, and a file that is wrong moves nothing. Whoever
serves from it says what is wrong with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from osaurus.errors import InvalidField
from osaurus.settings.files import find, peek_document
from osaurus.settings.paths import (
    Environment,
    ModelRoot,
    Place,
    model_roots,
    models_dir,
    server_settings,
)
from osaurus.settings.schema import BY_KEY


def configured_models_dir(env: Environment = os.environ) -> Place:
    return models_dir(env, _path(_value("models.directory", env)))


def configured_model_roots(env: Environment = os.environ) -> list[ModelRoot]:
    return model_roots(
        env,
        configured=_path(_value("models.directory", env)),
        extra=[Path(each).expanduser() for each in _value("models.extraDirectories", env)],
        hub_caches=[Path(each).expanduser() for each in _value("models.hubCaches", env)],
    )


def _value(key: str, env: Environment) -> Any:
    setting = BY_KEY[key]
    has, value = find(peek_document(server_settings(env).path), setting.path)
    try:
        if text := env.get(setting.environment, "").strip():
            return setting.read(text)
        return setting.check(value) if has else setting.default
    except InvalidField:
        return setting.default


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)

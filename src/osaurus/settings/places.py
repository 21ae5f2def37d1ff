"""Single settings for verbs that only look: the places of `paths.py` that settings move, and
where a server is.

Nothing is written, and what is wrong in the file is passed over: whoever serves from it says
what is wrong with it. What is wrong in the environment is an error.
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
    return models_dir(env, _path(configured("models.directory", env)))


def configured_model_roots(env: Environment = os.environ) -> list[ModelRoot]:
    return model_roots(
        env,
        configured=_path(configured("models.directory", env)),
        extra=[Path(each).expanduser() for each in configured("models.extraDirectories", env)],
        hub_caches=[Path(each).expanduser() for each in configured("models.hubCaches", env)],
    )


def configured(key: str, env: Environment = os.environ) -> Any:
    """The value of one setting by environment and file. Raises `InvalidField` for a variable
    that is wrong."""
    setting = BY_KEY[key]
    if text := env.get(setting.environment, "").strip():
        return setting.read(text, label=setting.environment)
    has, value = find(peek_document(server_settings(env).path), setting.path)
    try:
        return setting.check(value) if has else setting.default
    except InvalidField:
        return setting.default


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)

"""Every place on disk that osaurus reads or writes, each with the reason why it is there.

Pure functions of an environment mapping: nothing is created, nothing is looked up on disk.
Order for what osaurus writes: `OSAURUS_HOME`, else the XDG directories that are set, else
`~/.osaurus`. Weights stay where the user has them; the roots below say where to look.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory (or file), what it is for, and which rule put it there."""

    name: str
    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoot:
    """A directory with models. `folders`: `ORG/REPO/` or `REPO/`; `hub`: Hugging Face's cache."""

    layout: Literal["folders", "hub"]
    path: Path
    reason: str


def home(env: Environment = os.environ) -> Place:
    if (given := _given(env, "OSAURUS_HOME")) is not None:
        return Place(name="home", path=given, reason="OSAURUS_HOME")
    return Place(name="home", path=user_home(env) / ".osaurus", reason="the default")


def config_dir(env: Environment = os.environ) -> Place:
    return _place(env, "config", "XDG_CONFIG_HOME", under_xdg=(), under_home=("config",))


def server_settings(env: Environment = os.environ) -> Place:
    """The file of the server's live settings."""
    folder = config_dir(env)
    path = folder.path / "server-runtime.json"
    return Place(name="server settings", path=path, reason=folder.reason)


def api_keys(env: Environment = os.environ) -> Place:
    """The hashes of the keys that open the server."""
    folder = config_dir(env)
    return Place(name="API keys", path=folder.path / "api-keys.json", reason=folder.reason)


def signing_key(env: Environment = os.environ) -> Place:
    """What this install signs thinking blocks with."""
    folder = config_dir(env)
    return Place(name="signing key", path=folder.path / "signing.key", reason=folder.reason)


def cache_dir(env: Environment = os.environ) -> Place:
    """What may be deleted at any time."""
    return _place(env, "cache", "XDG_CACHE_HOME", under_xdg=(), under_home=("cache",))


def kv_cache_dir(env: Environment = os.environ) -> Place:
    return _place(env, "KV cache", "XDG_CACHE_HOME", under_xdg=("kv",), under_home=("cache", "kv"))


def runtime_dir(env: Environment = os.environ) -> Place:
    """What a running server tells other processes: its address, its process id."""
    return _state(env, "runtime")


def plugins_dir(env: Environment = os.environ) -> Place:
    return _state(env, "plugins")


def logs_dir(env: Environment = os.environ) -> Place:
    return _state(env, "logs")


def proof_dir(env: Environment = os.environ) -> Place:
    return _state(env, "proof")


def models_dir(env: Environment = os.environ, configured: Path | None = None) -> Place:
    """Where `osaurus pull` puts models that are not in Hugging Face's cache.

    `configured` is the setting's value; the environment wins over it.
    """
    for variable in _MODELS_VARIABLES:
        if folders := _given_list(env, variable):
            return Place(name="models", path=folders[0], reason=variable)
    if configured is not None:
        return Place(name="models", path=configured.expanduser(), reason="the setting modelsDir")
    base = home(env)
    return Place(name="models", path=base.path / "models", reason=base.reason)


#: The second spelling is the one of osaurus on macOS.
_MODELS_VARIABLES = ("OSAURUS_MODELS_DIR", "OSU_MODELS_DIR")


def hub_cache_dir(env: Environment = os.environ) -> Place:
    """The Hugging Face cache that downloads go to, by that library's own rules."""
    for variable in _HUB_VARIABLES:
        if (given := _given(env, variable)) is not None:
            return Place(name="Hugging Face cache", path=given, reason=variable)
    if (given := _given(env, "HF_HOME")) is not None:
        return Place(name="Hugging Face cache", path=given / "hub", reason="HF_HOME")
    return Place(name="Hugging Face cache", path=_default_hub(env), reason="the library's default")


_HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def model_roots(
    env: Environment = os.environ,
    *,
    configured: Path | None = None,
    extra: Sequence[Path] = (),
    hub_caches: Sequence[Path] = (),
) -> list[ModelRoot]:
    """Where models are looked for, first one first; the same directory never twice.

    `configured`, `extra` and `hub_caches` are settings: the models directory, further folders,
    further Hugging Face caches. Several folders in `OSAURUS_MODELS_DIR` are separated as in PATH.
    """
    main = models_dir(env, configured)
    roots = [ModelRoot(layout="folders", path=main.path, reason=main.reason)]
    for variable in _MODELS_VARIABLES:
        roots += [
            ModelRoot(layout="folders", path=path, reason=variable)
            for path in _given_list(env, variable)
        ]
    roots += [ModelRoot(layout="folders", path=p, reason="the setting for folders") for p in extra]
    legacy = user_home(env) / "MLXModels"
    roots.append(ModelRoot(layout="folders", path=legacy, reason="osaurus on macOS"))
    roots += [ModelRoot(layout="hub", path=p, reason="the setting for caches") for p in hub_caches]
    for variable in _HUB_VARIABLES:
        if (given := _given(env, variable)) is not None:
            roots.append(ModelRoot(layout="hub", path=given, reason=variable))
    if (given := _given(env, "HF_HOME")) is not None:
        roots.append(ModelRoot(layout="hub", path=given / "hub", reason="HF_HOME"))
    roots.append(ModelRoot(layout="hub", path=_default_hub(env), reason="the library's default"))
    first: dict[Path, ModelRoot] = {}
    for root in roots:
        first.setdefault(root.path, root)
    return list(first.values())


def all_places(env: Environment = os.environ) -> list[Place]:
    """Everything, in the order in which `osaurus config paths` prints it."""
    return [
        home(env),
        config_dir(env),
        server_settings(env),
        api_keys(env),
        signing_key(env),
        cache_dir(env),
        kv_cache_dir(env),
        runtime_dir(env),
        plugins_dir(env),
        logs_dir(env),
        proof_dir(env),
        models_dir(env),
        hub_cache_dir(env),
    ]


def _state(env: Environment, name: str) -> Place:
    return _place(env, name, "XDG_STATE_HOME", under_xdg=(name,), under_home=(name,))


def _place(
    env: Environment,
    name: str,
    variable: str,
    *,
    under_xdg: tuple[str, ...],
    under_home: tuple[str, ...],
) -> Place:
    base = home(env)
    # The XDG rules say that a relative directory is to be ignored.
    xdg = _given(env, variable)
    if base.reason != "OSAURUS_HOME" and xdg is not None and xdg.is_absolute():
        return Place(name=name, path=xdg.joinpath("osaurus", *under_xdg), reason=variable)
    return Place(name=name, path=base.path.joinpath(*under_home), reason=base.reason)


def _default_hub(env: Environment) -> Path:
    xdg = _given(env, "XDG_CACHE_HOME")
    return (xdg or user_home(env) / ".cache") / "huggingface" / "hub"


def user_home(env: Environment) -> Path:
    given = env.get("HOME") or env.get("USERPROFILE")
    return Path(given) if given else Path.home()


def _given(env: Environment, variable: str) -> Path | None:
    """A variable's directory; an empty one counts as not set."""
    value = env.get(variable, "").strip()
    return _expand(env, value) if value else None


def _given_list(env: Environment, variable: str) -> list[Path]:
    return [_expand(env, part) for part in env.get(variable, "").split(os.pathsep) if part.strip()]


def _expand(env: Environment, value: str) -> Path:
    """`~` by the same environment that everything else is read from."""
    path = Path(value.strip())
    if path.parts[:1] == ("~",):
        return user_home(env).joinpath(*path.parts[1:])
    return path.expanduser()

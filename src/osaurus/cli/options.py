"""Options that several verbs share, so that one spelling means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from osaurus.errors import InvalidField
from osaurus.settings.load import Flag
from osaurus.settings.schema import BY_KEY
from osaurus.types.weights import QuantizeOnLoad

Json = Annotated[
    bool, Parameter(name="--json", show_default=False, help="Print JSON with stable keys.")
]
Yes = Annotated[
    bool,
    Parameter(name=["--yes", "-y"], show_default=False, help="Answer yes to every question."),
]
Server = Annotated[
    str | None,
    Parameter(
        name="--server",
        env_var="OSAURUS_SERVER_URL",
        help="Address of a running server, e.g. http://127.0.0.1:1337.",
    ),
]
KvCacheDir = Annotated[
    Path | None,
    Parameter(
        name="--kv-cache-dir",
        help="Directory for prompts kept on disk; the cache directory when not given.",
    ),
]
NoDiskCache = Annotated[
    bool,
    Parameter(name="--no-disk-cache", show_default=False, help="Keep no prompts on disk."),
]
KvMode = Annotated[
    str | None,
    Parameter(
        name="--kv-mode",
        help="How older keys and values are kept in memory: none, engine_selected, turbo(3,3), "
        "affine(8,64).",
    ),
]
Quantize = Annotated[
    QuantizeOnLoad | None,
    Parameter(
        name="--quantize",
        help="Load matrices that are not quantized as 8- or 4-bit ones.",
    ),
]

Threads = Annotated[
    int | None,
    Parameter(
        name="--threads",
        help="Most threads that compute on the CPU; one a physical core when not given.",
    ),
]


def flag(key: str, value: object, *, name: str = "") -> dict[str, Flag]:
    """One setting's value from the command line; empty where the flag was not given. `name` is
    that of a flag which sets more than one. Raises `InvalidField` naming the flag."""
    if value is None:
        return {}
    setting = BY_KEY[key]
    name = name or setting.flag
    if isinstance(value, str):
        checked = setting.read(value, label=name)
    else:
        checked = setting.check(value, label=name)
    return {key: Flag(name=name, value=checked)}


def cache_flags(
    directory: Path | None, no_disk_cache: bool, kv_mode: str | None
) -> dict[str, Flag]:
    """What the three flags set. Raises `InvalidField` naming the flag. Creates nothing."""
    found = flag("cache.liveKVCodec", kv_mode)
    if no_disk_cache:
        found |= flag("cache.blockDisk.enabled", False)
    if directory is not None:
        name = "--kv-cache-dir"
        if no_disk_cache:
            raise InvalidField(name, "cannot be combined with --no-disk-cache")
        directory = directory.expanduser().absolute()
        if directory.exists() and not directory.is_dir():
            raise InvalidField(name, f"{directory} is no directory")
        found |= flag("cache.blockDisk.enabled", True, name=name)
        found |= flag("cache.blockDisk.directory", str(directory))
    return found

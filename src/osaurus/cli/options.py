"""Options that several verbs share, so that one spelling means one thing everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from osaurus.errors import InvalidField
from osaurus.types.cache import CacheConfig, KVMode
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoice:
    """What the three flags say; equal to the default where none is given."""

    config: CacheConfig = field(default_factory=CacheConfig)
    on_disk: bool = True


def cache_choice(directory: Path | None, no_disk_cache: bool, kv_mode: str | None) -> CacheChoice:
    """Raises `InvalidField` naming the flag. Creates nothing."""
    config = CacheConfig()
    if directory is not None:
        if no_disk_cache:
            raise InvalidField("--kv-cache-dir", "cannot be combined with --no-disk-cache")
        directory = directory.expanduser().absolute()
        if directory.exists() and not directory.is_dir():
            raise InvalidField("--kv-cache-dir", f"{directory} is no directory")
        config = replace(config, disk_dir=directory)
    if kv_mode is not None:
        try:
            config = replace(config, kv_mode=KVMode.parse(kv_mode))
        except ValueError as error:
            raise InvalidField("--kv-mode", str(error)) from None
    return CacheChoice(config=config, on_disk=not no_disk_cache)

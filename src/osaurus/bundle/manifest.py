"""`osaurus.json`: what a bundle demands of the program that loads it.

The file is optional. When it is there, both of its fields must be, and a bundle made for a
newer osaurus is refused, at the first load and at every reuse, rather than served wrongly.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import osaurus
from osaurus.errors import IncompleteBundle, UnsupportedBundle

MANIFEST_NAME = "osaurus.json"
#: Lies in a folder while its files are being replaced.
UPDATING_NAME = ".osaurus-updating"
_MAX_BYTES = 64 * 1024
_SEMVER = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?")


def check_manifest(folder: Path) -> None:
    """Raises `UnsupportedBundle` for a manifest that is damaged or wants a newer osaurus, and
    `IncompleteBundle` while an update of the folder is unfinished."""
    if (folder / UPDATING_NAME).exists():
        raise IncompleteBundle(
            f"{folder / UPDATING_NAME}: an update of this model did not finish; pull it again"
        )
    path = folder / MANIFEST_NAME
    if not path.exists():
        return
    required, model_version = _read(path)
    if not isinstance(model_version, str) or not re.fullmatch(r"\d+(\.\d+)?", model_version):
        raise UnsupportedBundle(
            f"{path}: model_version is {model_version!r}, not a decimal text such as '1.2'"
        )
    wanted = _SEMVER.fullmatch(required) if isinstance(required, str) else None
    if wanted is None:
        raise UnsupportedBundle(
            f"{path}: required_osaurus_version is {required!r}, not a version such as '1.2.3'"
        )
    have = _SEMVER.match(osaurus.__version__)
    if have is None or _numbers(wanted) > _numbers(have):
        raise UnsupportedBundle(
            f"{path}: needs osaurus {required} or newer, this is {osaurus.__version__}; upgrade it"
        )


def _read(path: Path) -> tuple[object, object]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnsupportedBundle(f"{path}: larger than {_MAX_BYTES} bytes")
        manifest = json.loads(path.read_bytes())
        return manifest["required_osaurus_version"], manifest["model_version"]
    except KeyError as error:
        raise UnsupportedBundle(f"{path}: lacks the field {error.args[0]!r}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UnsupportedBundle(f"{path}: cannot be read ({error})") from error


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in version.groups())

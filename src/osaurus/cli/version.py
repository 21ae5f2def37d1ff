"""`osaurus version`: the versions a report should carry, read from metadata without imports."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from osaurus import __version__
from osaurus.cli.options import Json

_REPORTED = ("torch", "transformers", "tokenizers", "starlette", "huggingface-hub")


def version(*, as_json: Json = False) -> None:
    """Print the versions that matter in a report."""
    facts = {"osaurus": __version__, "python": platform.python_version()}
    for package in _REPORTED:
        try:
            facts[package] = installed_version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name} {value}")

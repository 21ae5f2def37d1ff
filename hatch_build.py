"""Build hook: compiles the native kernels where there is a C++ compiler. Without one the package
is complete all the same and runs on torch's operations."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = Path("src", "osaurus", "kernels", "native")


class NativeKernelsHook(BuildHookInterface):
    """The library is the only part that depends on the platform, and on no Python version."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("OSAURUS_NATIVE") == "0":
            return
        directory = Path(self.root) / _PACKAGE
        build = runpy.run_path(str(directory / "build.py"))
        try:
            library = build["build"](directory)
        except build["CannotBuild"] as reason:
            self.app.display_warning(f"osaurus: no native kernels: {reason}")
            return
        if version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["artifacts"].append(str(library.relative_to(self.root)))

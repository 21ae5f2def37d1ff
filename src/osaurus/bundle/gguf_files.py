"""Which GGUF files of a folder are models, and which files make one model.

A folder often holds one model in several quantizations, each in one file or split into
numbered parts. Here file names become sets; whether a set is whole is checked against the
disk. Reads no header: see `gguf_reader.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from osaurus.bundle.gguf_reader import GgufFile, read_gguf
from osaurus.errors import IncompleteBundle

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.IGNORECASE)
_LABEL = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP16|FP32))(?=$|[-.])",
    re.IGNORECASE,
)
#: Beside the language model: vision projectors and calibration data.
_NOT_THE_MODEL = re.compile(r"(mmproj|imatrix).*|.*[-._](mmproj|imatrix)", re.IGNORECASE)
_ALIASES = {"FP16": "F16", "FP32": "F32"}

#: What a name without a quantization means when several are there: the best trade first.
_PREFERENCE = ("Q4_K_M", "Q4_1", "Q4_0", "Q4_K_S", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16", "F32")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSet:
    """The files of one model. `label` is its quantization as the file name says it."""

    label: str
    parts: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.parts[0]

    @property
    def name(self) -> str:
        """The file's name without ending and part number."""
        match = _PART.fullmatch(self.path.name)
        return match["stem"] if match else self.path.stem

    def missing_part(self) -> Path | None:
        return next((part for part in self.parts if not part.is_file()), None)

    @property
    def size_bytes(self) -> int:
        return sum(part.stat().st_size for part in self.parts if part.is_file())


def gguf_sets(folder: Path) -> list[GgufSet]:
    """Every model in GGUF form in `folder` or one level below, the preferred one first."""
    found: dict[tuple[Path, ...], GgufSet] = {}
    for path in sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]):
        if _NOT_THE_MODEL.fullmatch(path.stem) or path.name.startswith("."):
            continue
        one = gguf_set_of(path)
        found.setdefault(one.parts, one)
    return sorted(found.values(), key=_rank)


def gguf_set_of(path: Path) -> GgufSet:
    """The set that a file belongs to: itself, or all numbered parts."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return GgufSet(label=quantization_label(path.stem), parts=(path,))
    stem, total = match["stem"], int(match["total"])
    parts = tuple(
        path.with_name(f"{stem}-{number:05d}-of-{total:05d}.gguf") for number in range(1, total + 1)
    )
    return GgufSet(label=quantization_label(stem), parts=parts)


def quantization_label(stem: str) -> str:
    """`Q4_K_M` of `Some-Model-Q4_K_M`; empty when the name says nothing."""
    labels = _LABEL.findall(stem)
    label = labels[-1].upper() if labels else ""
    return _ALIASES.get(label, label)


def rank_of_label(label: str) -> int:
    """Place of a quantization in the order of preference; unknown ones come last."""
    return _PREFERENCE.index(label) if label in _PREFERENCE else len(_PREFERENCE)


def _rank(one: GgufSet) -> tuple[int, str]:
    return rank_of_label(one.label), one.path.name


def open_gguf_set(one: GgufSet) -> tuple[GgufFile, ...]:
    """Read the header of every part. Raises `IncompleteBundle` naming a part that lacks."""
    if missing := one.missing_part():
        raise IncompleteBundle(
            f"{missing}: the part is missing (the model has {len(one.parts)}); this looks like an "
            "unfinished download, fetch it again"
        )
    files = tuple(read_gguf(part) for part in one.parts)
    if len(files) > 1:
        _check_split(files)
    return files


def _check_split(files: Sequence[GgufFile]) -> None:
    wanted = files[0].metadata.get("split.tensors.count")
    have = sum(len(file.tensors) for file in files)
    if isinstance(wanted, int) and wanted != have:
        raise IncompleteBundle(
            f"{files[0].path}: its parts hold {have} tensors, {wanted} are announced; the parts "
            "belong to different files or the download is unfinished"
        )

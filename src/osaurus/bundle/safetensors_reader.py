"""Headers of safetensors files and the plan of which file holds which tensor.

In: a model folder. Out: a `WeightPlan` whose every range was checked against the real file
sizes, so that a download which stopped half-way is refused before a weight is used. Reads
headers only; mapping and torch are the affair of `weights.py`.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osaurus.bundle.encodings import SAFETENSORS_BITS
from osaurus.errors import BundleError, DamagedBundle, IncompleteBundle, UnsupportedBundle

_log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  #: the format's own limit
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
#: Files that lie beside the weights and are not the model: other layouts, adapters, drafts.
_NOT_THE_MODEL = re.compile(r"(consolidated|adapter)[._-].*|.*\.lora\.safetensors", re.IGNORECASE)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_UNFINISHED = "this looks like an unfinished download, fetch it again"


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where one tensor lies: bytes `[begin, end)` counted from the start of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Every tensor of a model with its place, and the files in order."""

    files: tuple[Path, ...]
    tensors: Mapping[str, SafetensorsTensor]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.end - tensor.begin for tensor in self.tensors.values())


def read_header(path: Path) -> dict[str, SafetensorsTensor]:
    """The tensors of one file by name. Raises `IncompleteBundle` when they do not fit it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise IncompleteBundle(
                    f"{path}: its header should take {length} bytes but the file has "
                    f"{size}; {_UNFINISHED}"
                )
            if length > _MAX_HEADER_BYTES:
                raise DamagedBundle(
                    f"{path}: its header takes {length} bytes; the format allows "
                    f"{_MAX_HEADER_BYTES}"
                )
            raw = file.read(length)
    except FileNotFoundError as error:
        raise IncompleteBundle(f"{path}: the file is missing; {_UNFINISHED}") from error
    except OSError as error:
        kind = DamagedBundle if error.errno == errno.ELOOP else BundleError
        raise kind(f"{path}: cannot be read: {error.strerror}") from error
    tensors = {
        name: _tensor(path, name, entry, data_start=8 + length)
        for name, entry in _parse_header(path, raw).items()
        if name != "__metadata__"
    }
    _check_ranges(path, tensors, data_start=8 + length, size=size)
    return tensors


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise IncompleteBundle(
            f"{path}: its header is not valid JSON ({error}); {_UNFINISHED}"
        ) from error
    if not isinstance(header, dict):
        raise DamagedBundle(f"{path}: its header is not a JSON object")
    return header


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedBundle(
            f"{path}: the entry of tensor {name!r} lacks dtype, shape or data_offsets"
        ) from error
    if not whole:
        raise DamagedBundle(f"{path}: tensor {name!r} has a shape or offset that is not a count")
    bits = SAFETENSORS_BITS.get(dtype)
    if bits is None:
        raise UnsupportedBundle(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    for dim in shape:
        bits *= dim
    if bits != 8 * (end - begin):
        raise DamagedBundle(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} takes {bits // 8} bytes "
            f"but its range has {end - begin}"
        )
    return SafetensorsTensor(path, dtype, tuple(shape), data_start + begin, data_start + end)


def _check_ranges(
    path: Path, tensors: Mapping[str, SafetensorsTensor], data_start: int, size: int
) -> None:
    """The ranges must tile the data exactly: no overlap, no hole, nothing past the end."""
    end, previous = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < end:
            raise IncompleteBundle(
                f"{path}: tensors {previous!r} and {name!r} overlap; the file is damaged, perhaps "
                "an unfinished download: fetch it again"
            )
        if tensor.begin > end:
            raise DamagedBundle(
                f"{path}: {tensor.begin - end} bytes between {previous!r} and {name!r} belong to "
                "no tensor; the file is damaged"
            )
        end, previous = tensor.end, name
    if end > size:
        raise IncompleteBundle(
            f"{path}: tensor {previous!r} ends at byte {end} but the file has {size} "
            f"({end - size} bytes are missing); {_UNFINISHED}"
        )
    if end < size:
        raise DamagedBundle(f"{path}: {size - end} bytes after the last tensor belong to none")


def plan_weights(folder: Path) -> WeightPlan:
    """Find and check every weight file of a model folder.

    Order: the index, then `model.safetensors`, then numbered shards, then whatever single
    layout is there. Pickled weights are refused: loading them runs code.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _plan_from_index(folder, _read_index(index))
    files = _files_without_index(folder)
    if not files:
        _refuse_empty(folder)
    return _merge(files, prefer={})


def _refuse_empty(folder: Path) -> None:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
    if pickled:
        raise UnsupportedBundle(
            f"{folder}: the weights are pickled ({pickled[0]}), and loading a pickle runs whatever "
            "code is in it; convert them to safetensors or pull a repository that has them"
        )
    raise IncompleteBundle(f"{folder}: there is no *.safetensors file with weights; {_UNFINISHED}")


def _files_without_index(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(p for p in folder.glob("*.safetensors") if not _NOT_THE_MODEL.fullmatch(p.name))
    shards = [match for p in found if (match := _SHARD.fullmatch(p.name))]
    if not shards:
        return found
    stem, total = shards[0]["stem"], int(shards[0]["total"])
    wanted = [folder / f"{stem}-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    for path in wanted:
        if not path.is_file():
            raise IncompleteBundle(f"{path}: the shard is missing; {_UNFINISHED}")
    return wanted


def _read_index(index: Path) -> dict[str, str]:
    """`weight_map`: tensor name to shard file name, each a plain name inside the folder."""
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise DamagedBundle(f"{index}: larger than {_MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except OSError as error:
        raise BundleError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise IncompleteBundle(f"{index}: holds no readable weight_map; {_UNFINISHED}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise IncompleteBundle(f"{index}: its weight_map is empty; {_UNFINISHED}")
    for shard in set(weight_map.values()):
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise UnsupportedBundle(
                f"{index}: names the shard {shard!r}; only *.safetensors files of the same folder "
                "are allowed"
            )
    return weight_map


def _refuse_link_out(folder: Path, shard: Path) -> None:
    """Links may lead into the bundle, and from a snapshot of the hub's cache to its blobs."""
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parents[1]
    if shard.is_file() and not shard.resolve().is_relative_to(home):
        raise UnsupportedBundle(
            f"{shard}: a link that leads out of the bundle; put the file itself there"
        )


def _is_plain_name(name: str) -> bool:
    return (
        name.endswith(".safetensors") and not set(name) & set("/\\:\0") and not name.startswith(".")
    )


def _plan_from_index(folder: Path, weight_map: dict[str, str]) -> WeightPlan:
    named = sorted(set(weight_map.values()))
    for name in named:
        _refuse_link_out(folder, folder / name)
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        return _plan_with_stale_names(folder, weight_map, missing)
    plan = _merge([folder / name for name in named], prefer=weight_map)
    for tensor, shard in weight_map.items():
        if tensor not in plan.tensors:
            raise IncompleteBundle(
                f"{folder / shard}: tensor {tensor!r} of {INDEX_NAME} is in no shard; {_UNFINISHED}"
            )
    return plan


def _plan_with_stale_names(
    folder: Path, weight_map: dict[str, str], missing: list[str]
) -> WeightPlan:
    """An index from before the shards were renamed still lists every tensor there must be."""
    present = sorted(
        p for p in folder.glob("*.safetensors") if not _NOT_THE_MODEL.fullmatch(p.name)
    )
    plan = _merge(present, prefer={})
    lacking = [name for name in weight_map if name not in plan.tensors]
    if lacking:
        raise IncompleteBundle(
            f"{folder / missing[0]}: the shard is missing ({len(missing)} of "
            f"{len(set(weight_map.values()))} are, with {len(lacking)} tensors such as "
            f"{lacking[0]!r}); {_UNFINISHED}"
        )
    _log.warning(
        "%s names shards that do not exist (%s); the files present hold every tensor, using them",
        folder / INDEX_NAME,
        ", ".join(missing[:3]),
    )
    return plan


def _merge(files: list[Path], prefer: Mapping[str, str]) -> WeightPlan:
    """All tensors of `files`. One that lies in several is taken from where `prefer` says."""
    tensors: dict[str, SafetensorsTensor] = {}
    for path in files:
        for name, tensor in read_header(path).items():
            if name not in tensors or prefer.get(name) == path.name:
                tensors[name] = tensor
    return WeightPlan(tuple(files), tensors)

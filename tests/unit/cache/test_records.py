"""Claim: a record comes back bit for bit or not at all, and no header is believed unchecked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from disk_records import NAMESPACE, bits, make_run, make_snapshot, same
from osaurus.cache.files import RecordFiles
from osaurus.cache.record_file import (
    MAX_HEADER_BYTES,
    CorruptRecord,
    checksum_offset,
    parse_header,
    verify_file,
)
from osaurus.cache.records import Record, encode, read_record

CREATED = "2026-11-30T10:00:00Z"


def _write(directory: Path, record: Record) -> Path:
    files = RecordFiles(directory, quarantine_bytes=0)
    header, data = encode(record, CREATED)
    size = files.write(record.key, header, data)
    path = Path(files.path(record.key))
    assert path.stat().st_size == size
    return path


def _every_dtype() -> dict[str, torch.Tensor]:
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.uint16, torch.int16, torch.float16, torch.bfloat16, torch.uint32, torch.int32,
        torch.float32, torch.uint64, torch.int64, torch.float64,
    ]  # fmt: skip
    raw = torch.arange(0, 3 * 5 * 8, dtype=torch.uint8)
    found = {str(dtype): raw.view(dtype).view(3, -1) for dtype in dtypes if dtype != torch.bool}
    return {**found, "odd": raw[:7], "bool": raw.view(3, -1) > 40}


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        **_every_dtype(),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        "deep": torch.arange(64, dtype=torch.int32).view(2, 2, 2, 2, 2, 2),
        "none": torch.empty((0, 4), dtype=torch.float16),
    }
    record = make_run("a", tensors=tensors, meta={"layers": '[{"i":0}]', "": "x", "é": "ü\ud83d"})
    path = _write(tmp_path, record)
    assert same(read_record(path, path.stat().st_size), record)
    assert verify_file(path).created == CREATED


def test_the_format_is_safetensors_and_its_own_library_agrees(tmp_path: Path) -> None:
    tensors = {"k": torch.randn(3, 5).to(torch.bfloat16), "s": torch.arange(3, dtype=torch.uint8)}
    path = _write(tmp_path, make_run("a", tensors=tensors))
    loaded = load_file(path)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    with safetensors.safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "osaurus-kv"
    assert metadata["namespace"] == NAMESPACE


def test_a_snapshot_and_a_record_without_elements_come_back(tmp_path: Path) -> None:
    for record in (
        make_snapshot("a", 4),
        make_run("b", tensors={}),
        make_run("c", tensors={"empty": torch.empty(0, 3)}),
    ):
        assert same(read_record(_write(tmp_path, record)), record)


def test_the_size_depends_on_the_record_alone(tmp_path: Path) -> None:
    record = make_run("a")
    one, other = encode(record, CREATED), encode(record, "2031-01-01T00:00:00Z")
    assert len(one[0]) == len(other[0])


def test_data_wider_than_a_piece_is_whole(tmp_path: Path) -> None:
    record = make_run("a", 6, size=260_000)
    path = _write(tmp_path, record)
    assert same(read_record(path), record)
    verify_file(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "A" * 32},
        {"key": "a" * 31},
        {"namespace": ""},
        {"namespace": "xyz"},
        {"kind": "other"},
        {"first_token": 65},
        {"first_token": -1},
        {"blocks": ()},
        {"blocks": (b"short",)},
        {"parent": b"short"},
        {"kind": "snapshot"},
    ],
)
def test_a_record_whose_identity_breaks_the_rules_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        make_run("a", **changes)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 1, 1, 1, 1, 1, 1),
        torch.zeros(262_145, dtype=torch.uint8),
        torch.zeros(2, 3).t(),
        torch.zeros(2, dtype=torch.complex64),
    ],
    ids=["seven dimensions", "too long", "not contiguous", "no name"],
)
def test_what_could_not_be_read_back_is_not_written(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        encode(make_run("a", tensors={"x": tensor}), CREATED)
    with pytest.raises(CorruptRecord):
        encode(make_run("a", tensors={"__metadata__": torch.zeros(1)}), CREATED)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = _write(tmp_path, make_run("a", size=8, tensors={"x": torch.arange(24.0)}))
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptRecord):
            read_record(path)
    path.write_bytes(whole)
    read_record(path)


def test_every_truncation_and_every_surplus_is_noticed(tmp_path: Path) -> None:
    path = _write(tmp_path, make_run("a", size=8))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptRecord):
            read_record(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptRecord):
        read_record(path)
    path.write_bytes(whole)
    with pytest.raises(CorruptRecord, match="instead of"):
        read_record(path, len(whole) + 1)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 8, 2**63, 2**64 - 1])
def test_an_oversized_header_is_refused_unread(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(length.to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES + 4096)  # sparse
    with pytest.raises(CorruptRecord, match="header of"):
        read_record(path)


def _damaged(header: bytearray, change: Any) -> bytes:
    found = json.loads(header[8:])
    changed = change(found)
    text = json.dumps(found if changed is None else changed).encode()
    return len(text).to_bytes(8, "little") + text


def _set(name: str, **fields: Any) -> Any:
    return lambda found: found[name].update(fields)


def _meta(**fields: Any) -> Any:
    return _set("__metadata__", **fields)


@pytest.mark.parametrize(
    "change",
    [
        _set("a", data_offsets=[0, 16]),
        _set("a", data_offsets=[32, 64]),
        _set("b", data_offsets=[0, 32]),
        _set("b", data_offsets=[64, 96]),
        _set("b", data_offsets=[16, 48]),
        _set("b", data_offsets=[64, 32]),
        _set("b", data_offsets=[-32, 0]),
        _set("b", data_offsets=[32.0, 64]),
        _set("b", data_offsets=[32]),
        _set("a", shape=[8, 2]),
        _set("a", shape=[-8, -1]),
        _set("a", shape=[True, 8]),
        _set("a", shape=["8"]),
        _set("a", shape=8),
        _set("a", shape=[1] * 6 + [8]),
        _set("a", shape=[262_145, 262_144, 262_144, 8]),
        _set("a", shape=[262_144] * 6),
        _set("a", dtype="F4"),
        _set("a", dtype=["F32"]),
        _set("a", dtype="I64"),
        _meta(format="pt"),
        _meta(version="0"),
        _meta(extra=1),
        _meta(kind="other"),
        _meta(key="../../etc/passwd"),
        _meta(blocks="00"),
        _meta(blocks="zz"),
        _meta(first_token="x"),
        _meta(first_token="99999"),
        _meta(absent='{"a2": ["F32", [2]]}'),
        _meta(absent='{"a2": ["F32", [0, 999999]]}'),
        _meta(absent="[1]"),
        _meta(absent="{"),
        lambda found: found.pop("b"),
        lambda found: found.pop("__metadata__"),
        lambda found: found["__metadata__"].pop("checksum"),
        lambda found: found.update(__metadata__=[]),
        lambda found: found.update(a=[1]),
        lambda found: found.update(a=None),
        lambda _: [1, 2],
        lambda _: "text",
        lambda _: 7,
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_is_refused_whatever_its_checksum(change: Any) -> None:
    tensors = {"a": torch.zeros(8), "b": torch.ones(8)}
    header, data = encode(make_run("a", tensors=tensors), CREATED)
    parse_header(_damaged(header, lambda _: None), len(_damaged(header, lambda _: None)) + 64)
    raw = _damaged(header, change)
    with pytest.raises(CorruptRecord):
        parse_header(raw, len(raw) + sum(len(part) for part in data))


def test_a_header_of_deep_nesting_or_bad_text_is_refused() -> None:
    for text in (b"[" * 100_000, b"\xff\xfe{}", b"", b"{"):
        raw = len(text).to_bytes(8, "little") + text
        with pytest.raises(CorruptRecord):
            parse_header(raw, len(raw))


def test_a_label_that_looks_like_a_checksum_does_not_misplace_it(tmp_path: Path) -> None:
    trap = f'"checksum":"{"0" * 64}"'
    record = make_run("a", model=trap, meta={"checksum": "0" * 64, trap: trap})
    header, _ = encode(record, CREATED)
    assert header[checksum_offset(header) - 12 :].startswith(b'"checksum":"0000')
    assert same(read_record(_write(tmp_path, record)), record)

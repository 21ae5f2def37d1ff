"""The GGUF header reader against the `gguf` package, and against damage of every kind."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osaurus.bundle.encodings import GGML_TYPES, GGUF_FILE_TYPES
from osaurus.bundle.gguf_reader import GgufArray, is_gguf, read_gguf
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle
from unit.bundle.made import write_gguf


def plain(value: Any) -> Any:
    """Arrays, ours or the package's, as lists."""
    return list(map(plain, value)) if isinstance(value, (list, GgufArray)) else value


def with_values(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.add_tensor("a.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw(*entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, pad: int = 64) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(entries))
    body = head + b"".join(entries) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(pad)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.slow
def test_the_default_models_header_equals_what_the_gguf_package_reads(
    default_model_path: Path,
) -> None:
    oracle = gguf.GGUFReader(default_model_path)
    ours = read_gguf(default_model_path)
    theirs = {k: f for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(theirs)
    for key, field in theirs.items():
        assert plain(ours.metadata[key]) == field.contents(), key
    assert list(ours.tensors) == [t.name for t in oracle.tensors]
    for expected in oracle.tensors:
        found = ours.tensors[expected.name]
        assert found.dims == tuple(int(d) for d in expected.shape)
        assert found.type.name == expected.tensor_type.name
        assert (found.offset, found.num_bytes) == (expected.data_offset, expected.n_bytes)


def test_the_default_models_header_is_read_in_less_than_150_ms(default_model_path: Path) -> None:
    def seconds() -> float:
        start = time.perf_counter()
        read_gguf(default_model_path)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.150


def test_every_metadata_type_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("t.u8", 255)
        writer.add_int8("t.i8", -128)
        writer.add_uint16("t.u16", 65535)
        writer.add_int16("t.i16", -32768)
        writer.add_uint32("t.u32", 2**32 - 1)
        writer.add_int32("t.i32", -(2**31))
        writer.add_uint64("t.u64", 2**64 - 1)
        writer.add_int64("t.i64", -(2**63))
        writer.add_float32("t.f32", 0.1)
        writer.add_float64("t.f64", 0.1)
        writer.add_bool("t.true", True)
        writer.add_bool("t.false", False)
        writer.add_string("t.text", "größe 日本 \U0001f600")
        writer.add_array("t.ints", [1, -2, 3])
        writer.add_array("t.floats", [0.5, -1.25])
        writer.add_array("t.flags", [True, False, True])
        writer.add_array("t.texts", ["a", "", "\n", "日本"])
        writer.add_array("t.one", ["x" * 70_000])

    path = with_values(tmp_path / "types.gguf", fill)
    oracle = gguf.GGUFReader(path)
    ours = read_gguf(path)
    for key, field in oracle.fields.items():
        if not key.startswith("GGUF."):
            assert plain(ours.metadata[key]) == field.contents(), key


values = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), min_size=1, max_size=9),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}", fullmatch=True), values))
def test_whatever_the_gguf_package_writes_comes_back(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]
) -> None:
    metadata = {k: v for k, v in metadata.items() if not k.startswith("general.")}
    path = write_gguf(tmp_path_factory.mktemp("made") / "any.gguf", metadata, {})
    read = read_gguf(path).metadata
    assert {k: plain(v) for k, v in read.items() if k != "general.architecture"} == metadata


def test_a_long_array_is_not_decoded_until_it_is_looked_into(tmp_path: Path) -> None:
    path = with_values(tmp_path / "x.gguf", lambda w: w.add_array("t.texts", ["a", "b", "c"]))
    array = read_gguf(path).metadata["t.texts"]
    assert isinstance(array, GgufArray)
    assert len(array) == 3
    assert array[1] == "b"
    assert array[1:] == ["b", "c"]


def test_an_array_of_arrays_is_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 7, -8)
    entry = text("t.nested") + struct.pack("<IIQ", 9, 9, 2) + inner + inner
    path = written(tmp_path / "x.gguf", raw(entry))
    assert plain(read_gguf(path).metadata["t.nested"]) == [[7, -8], [7, -8]]


def test_an_own_alignment_is_obeyed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", alignment=128)
    oracle = {t.name: t.data_offset for t in gguf.GGUFReader(path).tensors}
    assert {t.name: t.offset for t in read_gguf(path).tensors.values()} == oracle


def test_a_file_cut_anywhere_is_refused_as_unfinished(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    places = sorted({*range(1, 200), *range(200, len(whole), len(whole) // 150)})
    for size in places:
        path = written(tmp_path / "cut.gguf", whole[:size])
        with pytest.raises(IncompleteBundle, match="unfinished download"):
            read_gguf(path)


def test_a_file_cut_by_100_bytes_says_how_many_are_missing(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf")
    path = written(tmp_path / "cut.gguf", whole.read_bytes()[:-100])
    with pytest.raises(IncompleteBundle, match=r"cut\.gguf: .*100 bytes are missing"):
        read_gguf(path)


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_in_the_header_never_raises_anything_but_a_bundle_error(
    tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    header = read_gguf(tmp_path / "whole.gguf").tensors["token_embd.weight"].offset
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(header)] = source.randrange(256)
        path = written(tmp_path / "damaged.gguf", bytes(damaged))
        with suppress(BundleError):
            file = read_gguf(path)
            for value in file.metadata.values():
                plain(value)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"", IncompleteBundle, "empty"),
        (bytes(64), IncompleteBundle, "zeros"),
        (b"GGUF", IncompleteBundle, "do not hold a GGUF header"),
        (b"PK\x03\x04" + bytes(60), UnsupportedBundle, "not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), UnsupportedBundle, "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), UnsupportedBundle, "version 9"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), UnsupportedBundle, "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), IncompleteBundle, "tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), IncompleteBundle, "metadata entries"),
        (raw(text("k") + struct.pack("<IQ", 8, 2**62)), IncompleteBundle, "past the end"),
        (raw(text("k") + struct.pack("<IIQ", 9, 8, 2**61)), IncompleteBundle, "items in 'k'"),
        (raw(text("k") + struct.pack("<II", 99, 0)), BundleError, "unknown type 99"),
        (raw(text("k") + struct.pack("<IIQ", 9, 77, 1)), BundleError, "unknown item type 77"),
        (raw(*[text("k") + struct.pack("<II", 4, 1)] * 2), BundleError, "'k' appears twice"),
        (
            raw(text("general.alignment") + struct.pack("<II", 4, 12)),
            BundleError,
            "not a multiple of 8",
        ),
        (raw(tensors=(tensor("a", (4,), 5, 0),)), UnsupportedBundle, "unknown ggml type 5"),
        (raw(tensors=(tensor("a", (33,), 2, 0),)), BundleError, "not a multiple of Q4_0's 32"),
        (raw(tensors=(tensor("a", (4,), 0, 8),)), BundleError, "not a multiple of 32"),
        (raw(tensors=(tensor("a", (4,), 0, 0),) * 2), BundleError, "'a' appears twice"),
        (
            raw(tensors=(tensor("a", (16,), 0, 0), tensor("b", (4,), 0, 32))),
            IncompleteBundle,
            "'a' and 'b' overlap",
        ),
        (raw(tensors=(tensor("a", (2**62, 8), 0, 0),)), IncompleteBundle, "bytes are missing"),
        (raw(tensors=(tensor("a", (1,) * 9, 0, 0),)), BundleError, "9 dimensions"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, data: bytes, kind: type[BundleError], words: str
) -> None:
    path = written(tmp_path / "bad.gguf", data)
    with pytest.raises(kind, match=words) as caught:
        read_gguf(path)
    assert "bad.gguf" in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteBundle, match=r"gone\.gguf"):
        read_gguf(tmp_path / "gone.gguf")


def test_the_magic_alone_says_whether_a_file_is_a_gguf(tmp_path: Path) -> None:
    assert is_gguf(write_gguf(tmp_path / "a.gguf"))
    assert not is_gguf(written(tmp_path / "b.gguf", b"GG"))
    assert not is_gguf(tmp_path / "none")


def test_block_sizes_and_file_types_are_those_of_the_gguf_package() -> None:
    oracle = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    assert {
        number: (t.name, t.block_elements, t.block_bytes) for number, t in GGML_TYPES.items()
    } == oracle
    for kind in gguf.LlamaFileType:
        if kind.name != "GUESSED":
            name = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
            assert GGUF_FILE_TYPES[kind.value] == name

"""Stored tensors: the same bytes that the formats' own libraries read, and field case F33."""

from __future__ import annotations

import json
import logging
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.encodings import SAFETENSORS_BITS
from osaurus.bundle.gguf_files import gguf_set_of, gguf_sets, open_gguf_set, quantization_label
from osaurus.bundle.gguf_reader import read_gguf
from osaurus.bundle.safetensors_reader import plan_weights, read_header
from osaurus.bundle.weights import GgufSource, SafetensorsSource
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle
from unit.bundle.made import (
    folder_tensors,
    gguf_metadata,
    gguf_tensors,
    write_folder,
    write_gguf,
)

INDEX = "model.safetensors.index.json"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: dict[str, Any] | bytes, body: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_tensor_has_the_bytes_that_the_safetensors_library_reads(
    tmp_path: Path, num_shards: int
) -> None:
    write_folder(tmp_path, num_shards=num_shards)
    source = SafetensorsSource(tmp_path)
    oracle = folder_tensors()
    assert set(source.names()) == set(oracle)
    for name, expected in oracle.items():
        stored = source.get(name)
        assert stored.name == name
        assert stored.shape == tuple(expected.shape)
        assert stored.encoding == {torch.bfloat16: "BF16", torch.float32: "F32"}[expected.dtype]
        assert stored.data.dtype == torch.uint8
        assert torch.equal(stored.data.view(expected.dtype).view(stored.shape), expected)
    assert source.total_bytes == sum(t.nbytes for t in oracle.values())


def test_every_dtype_that_the_safetensors_library_writes_is_known(tmp_path: Path) -> None:
    floats = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    integers = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
    names = (*floats, *integers, "bool", "complex64")
    tensors = {name: torch.zeros(4, 8, dtype=getattr(torch, name)) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_header(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        entry = stored[name]
        assert entry.end - entry.begin == tensor.nbytes
        assert SAFETENSORS_BITS[entry.dtype] == 8 * tensor.element_size()


def test_data_is_a_view_of_the_file_and_outlives_the_source(tmp_path: Path) -> None:
    write_folder(tmp_path)
    source = SafetensorsSource(tmp_path)
    one, other = source.get("model.norm.weight"), source.get("model.embed_tokens.weight")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert one.data.untyped_storage().data_ptr() == other.data.untyped_storage().data_ptr()
    assert one.data.untyped_storage().nbytes() == size
    source.close()
    expected = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert torch.equal(one.data.view(torch.float32), expected)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(BundleError, match=r"no tensor 'lm_head\.weight'"):
        SafetensorsSource(tmp_path).get("lm_head.weight")
    path = write_gguf(tmp_path / "x.gguf")
    with pytest.raises(BundleError, match=r"x\.gguf: there is no tensor 'lm_head\.weight'"):
        GgufSource([read_gguf(path)]).get("lm_head.weight")


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_gguf_tensors_have_the_bytes_that_the_gguf_package_reads(
    tmp_path: Path, encoding: str
) -> None:
    path = write_gguf(tmp_path / "x.gguf", encoding=encoding)
    source = GgufSource([read_gguf(path)])
    names = {
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    written = gguf_tensors()
    oracle = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert len(source.names()) == len(oracle)
    for theirs, ours in names.items():
        stored = source.get(ours)
        assert stored.shape == written[theirs].shape
        assert stored.encoding == (encoding if len(stored.shape) == 2 else "F32")
        assert stored.data.numpy().tobytes() == oracle[theirs].data.tobytes()


def test_a_gguf_tensor_that_no_table_names_is_refused_not_left_out(tmp_path: Path) -> None:
    tensors = {**gguf_tensors(), "blk.0.ffn_gate_inp.weight": gguf_tensors()["output_norm.weight"]}
    path = write_gguf(tmp_path / "x.gguf", tensors=tensors)
    with pytest.raises(UnsupportedBundle, match=r"'blk\.0\.ffn_gate_inp\.weight' is unknown"):
        GgufSource([read_gguf(path)])


# --- F33: incomplete weight files -----------------------------------------------------------


def refused(folder: Path, kind: type[BundleError] = IncompleteBundle) -> str:
    """The message with which both the source and the bundle refuse the folder."""
    with pytest.raises(kind) as at_source:
        SafetensorsSource(folder)
    with pytest.raises(kind) as at_bundle:
        open_bundle(folder)
    assert at_source.value.message == at_bundle.value.message
    return at_source.value.message


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def test_f33a_a_shard_cut_by_100_bytes_is_refused_with_the_number(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=3)
    path = shard(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-100])
    message = refused(tmp_path)
    assert path.name in message
    assert "100 bytes are missing" in message
    assert "unfinished download" in message


def test_f33b_an_absent_shard_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=3)
    shard(tmp_path, 3).unlink()
    message = refused(tmp_path)
    assert shard(tmp_path, 3).name in message
    assert "unfinished download" in message


def test_f33c_a_tensor_of_the_index_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard(tmp_path, 1).name
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refused(tmp_path)
    assert "'model.layers.9.mlp.up_proj.weight'" in message
    assert "unfinished download" in message


def test_f33d_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(data)) + data[8:])
    message = refused(tmp_path)
    assert str(len(data)) in message
    assert "unfinished download" in message


def test_f33e_overlapping_tensors_are_refused_with_their_names(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    header, body = header_of(path)
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    header[up]["data_offsets"] = header[down]["data_offsets"]
    with_header(path, header, body)
    message = refused(tmp_path)
    assert "overlap" in message
    assert up in message
    assert "unfinished download" in message


def test_f33f_an_index_with_old_shard_names_loads_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, num_shards=3)
    for number in (1, 2, 3):
        shard(tmp_path, number).rename(tmp_path / f"weights-{number}.safetensors")
    with caplog.at_level(logging.WARNING):
        source = SafetensorsSource(tmp_path)
    assert set(source.names()) == set(folder_tensors())
    assert shard(tmp_path, 1).name in caplog.text


def test_f33g_one_file_without_an_index_loads(tmp_path: Path) -> None:
    write_folder(tmp_path)
    assert not (tmp_path / INDEX).exists()
    assert len(SafetensorsSource(tmp_path).names()) == 4


def test_f33h_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    message = refused(tmp_path)
    assert "no *.safetensors" in message
    assert "unfinished download" in message


def test_numbered_shards_without_an_index_must_all_be_there(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=3)
    (tmp_path / INDEX).unlink()
    assert len(SafetensorsSource(tmp_path).names()) == 4
    shard(tmp_path, 2).unlink()
    assert shard(tmp_path, 2).name in refused(tmp_path)


def test_adapters_and_second_layouts_beside_the_weights_are_left_alone(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"other": torch.zeros(1)}, tmp_path / name)
    assert set(SafetensorsSource(tmp_path).names()) == set(folder_tensors())


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a\\b.safetensors", "x.bin"]
)
def test_an_index_may_name_only_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, num_shards=3)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert "only *.safetensors files of the same folder" in refused(tmp_path, UnsupportedBundle)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"\x80\x02")
    message = refused(tmp_path, UnsupportedBundle)
    assert name in message
    assert "convert them to safetensors" in message


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda h: h.update(a=5), BundleError, "lacks dtype"),
        (lambda h: h["a"].update(dtype="Q9"), UnsupportedBundle, "unknown dtype 'Q9'"),
        (lambda h: h["a"].update(shape=[3]), BundleError, "takes 12 bytes but its range has 16"),
        (lambda h: h["a"].update(shape=[-4]), BundleError, "not a count"),
        (lambda h: h["a"].update(shape=[2.0, 2]), BundleError, "not a count"),
        (lambda h: h["a"].update(data_offsets=[16, 0]), BundleError, "its range has -16"),
        (lambda h: h["a"].update(data_offsets=[8, 24]), IncompleteBundle, "8 bytes are missing"),
        (lambda h: h.pop("a"), BundleError, "after the last tensor"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Any, kind: type[BundleError], words: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    header, body = header_of(path)
    change(header)
    if kind is IncompleteBundle:
        header["b"] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    with_header(path, header, body)
    with pytest.raises(kind, match=words):
        read_header(path)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a":1,"a":2}', b"[" * 5000, b"\xff"])
def test_a_header_that_is_no_json_object_is_refused(tmp_path: Path, header: bytes) -> None:
    with_header(tmp_path / "model.safetensors", header, b"")
    with pytest.raises(BundleError, match=r"model\.safetensors: its header"):
        plan_weights(tmp_path)


def test_damage_anywhere_in_a_header_raises_nothing_but_bundle_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(folder_tensors(), path)
    whole = path.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in range(0, length, 3):
        for byte in (0, 0x22, 0x39, 0xFF):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            with suppress(BundleError):
                read_header(path)


# --- GGUF sets ------------------------------------------------------------------------------


def write_split(folder: Path) -> list[Path]:
    """Two parts as llama.cpp's splitter writes them: metadata in the first, tensors in both."""
    tensors = list(gguf_tensors().items())
    paths = [folder / f"Made-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    counts = {"split__count": 2, "split__tensors__count": len(tensors)}
    write_gguf(paths[0], gguf_metadata(**counts), dict(tensors[:9]), encoding="Q8_0")
    write_gguf(paths[1], {"split.no": 1}, dict(tensors[9:]), encoding="Q8_0")
    return paths


def test_a_split_gguf_opens_as_one_model_from_any_part(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    for part in parts:
        bundle = open_bundle(part)
        assert bundle.path == parts[0]
        assert bundle.quantization == "Q8_0"
        assert len(bundle.open_weights().names()) == len(gguf_tensors())


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[1].unlink()
    with pytest.raises(IncompleteBundle, match=parts[1].name):
        open_bundle(parts[0])


def test_parts_of_different_splits_are_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    write_gguf(parts[1], {"split.no": 1}, {}, encoding="Q8_0")
    with pytest.raises(IncompleteBundle, match="9 tensors, 20 are announced"):
        open_gguf_set(gguf_set_of(parts[0]))


def test_quantizations_of_one_folder_are_models_of_their_own(tmp_path: Path) -> None:
    for name in ("M-Q8_0", "M-F16", "M.Q4_K_M", "mmproj-F16", "q4_0/M-Q4_0-00001-of-00002"):
        path = tmp_path / f"{name}.gguf"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"GGUF")
    assert [one.label for one in gguf_sets(tmp_path)] == ["Q4_K_M", "Q4_0", "Q8_0", "F16"]


@pytest.mark.parametrize(
    ("stem", "label"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "Q4_1"),
        ("Llama-3.2-1B-Instruct-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q8_0", "Q8_0"),
        ("gemma-3-4b-it-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("model-IQ3_XXS", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("ggml-model-f16", "F16"),
        ("Phi-3-mini-4k-instruct-fp16", "F16"),
        ("Qwen3-4B", ""),
    ],
)
def test_a_file_names_quantization_is_read(stem: str, label: str) -> None:
    assert quantization_label(stem) == label

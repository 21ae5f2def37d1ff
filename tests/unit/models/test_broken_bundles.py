"""Claim: a bundle that is broken, unfinished or hostile is refused with one line that says what
and where, before anything is allocated for its model, and leaves no file open.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import osaurus
from osaurus.bundle.bundle import open_bundle
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle
from osaurus.models import registry
from osaurus.models.loading import WeightLoader
from osaurus.models.registry import load_model
from unit.bundle.made import SIZES, gguf_tensors, llama_tensors, write_folder, write_gguf

INDEX = "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj"


def quantized() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same with one projection as MLX stores it, and the config's entry."""
    tensors = llama_tensors()
    del tensors[f"{UP}.weight"]
    tensors[f"{UP}.weight"] = torch.zeros(96, 8, dtype=torch.int32).view(torch.uint32)
    tensors[f"{UP}.scales"] = torch.ones(96, 2)
    tensors[f"{UP}.biases"] = torch.zeros(96, 2)
    return tensors, {"quantization": {"group_size": 32, "bits": 4}}


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or drop tensors of a whole single-file bundle; `__` stands for a dot."""
    tensors = llama_tensors()
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def mlx(folder: Path, drop: str | None = None, **changes: Any) -> None:
    tensors, entry = quantized()
    tensors |= {f"{UP}.{name}": tensor for name, tensor in changes.items()}
    if drop:
        del tensors[f"{UP}.{drop}"]
    save_file(tensors, folder / "model.safetensors")
    config(folder, **entry)


def sharded(folder: Path) -> list[Path]:
    (folder / "model.safetensors").unlink()
    write_folder(folder, tensors=llama_tensors(), num_shards=2)
    return sorted(folder.glob("model-*.safetensors"))


def cut(folder: Path) -> None:
    shard = sharded(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def index_names(folder: Path, name: str) -> None:
    sharded(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))


def link_out(folder: Path) -> None:
    shard = sharded(folder)[0]
    outside = folder.parent / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)


def link_to_itself(folder: Path) -> None:
    shard = sharded(folder)[0]
    shard.unlink()
    shard.symlink_to(shard.name)


def huge_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate((1 << 30) + 8)


def header_with(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NAN = torch.full((64,), torch.nan)
#: what is broken -> how, the error's kind, and words its line must have.
FOLDERS: dict[str, tuple[Callable[[Path], object], type[BundleError], list[str]]] = {
    "cut shard": (cut, IncompleteBundle, ["model-00002-of-00002", "100 bytes are missing"]),
    "missing shard": (
        lambda f: sharded(f)[0].unlink(),
        IncompleteBundle,
        ["model-00001-of-00002", "missing", "unfinished download"],
    ),
    "empty file": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        IncompleteBundle,
        ["model.safetensors", "unfinished download"],
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        IncompleteBundle,
        ["no *.safetensors"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), IncompleteBundle, ["config.json"]),
    "half a config": (
        lambda f: (f / "config.json").write_text('{"model_type": "lla'),
        IncompleteBundle,
        ["config.json", "not valid JSON"],
    ),
    "no model_type": (
        lambda f: (f / "config.json").write_text("{}"),
        UnsupportedBundle,
        ["config.json", "model_type"],
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        IncompleteBundle,
        ["tokenizer.json"],
    ),
    "unknown architecture": (
        lambda f: config(f, model_type="gpt9"),
        UnsupportedBundle,
        ["'gpt9'", "served"],
    ),
    "code of its own": (
        lambda f: config(f, model_type="gpt9", auto_map={"AutoModelForCausalLM": "evil.Model"}),
        UnsupportedBundle,
        ["'gpt9'", "auto_map", "never run"],
    ),
    "pickled weights": (pickled, UnsupportedBundle, ["pytorch_model.bin", "pickle"]),
    "index outside": (
        lambda f: index_names(f, "../../etc/x.safetensors"),
        UnsupportedBundle,
        [INDEX, "../../etc/x.safetensors"],
    ),
    "index absolute": (
        lambda f: index_names(f, "/etc/x.safetensors"),
        UnsupportedBundle,
        [INDEX, "/etc/x.safetensors"],
    ),
    "link outside": (link_out, UnsupportedBundle, ["model-00001-of-00002", "out of the bundle"]),
    "link to itself": (link_to_itself, BundleError, ["model-00001-of-00002"]),
    "huge header": (huge_header, BundleError, ["model.safetensors", "1073741824 bytes"]),
    "overlapping tensors": (
        lambda f: header_with(
            f, lambda h: h["model.embed_tokens.weight"].update(h["lm_head.weight"])
        ),
        IncompleteBundle,
        ["overlap", "lm_head.weight"],
    ),
    "wrong shape": (
        lambda f: edit(f, model__norm__weight=torch.ones(63)),
        UnsupportedBundle,
        ["model.norm.weight", "(63,)", "(64,)"],
    ),
    "wrong type": (
        lambda f: edit(f, model__norm__weight=torch.ones(64, dtype=torch.int32)),
        UnsupportedBundle,
        ["model.norm.weight", "I32"],
    ),
    "missing tensor": (
        lambda f: edit(f, model__norm__weight=None),
        IncompleteBundle,
        ["model.norm.weight", "missing"],
    ),
    "unexpected tensor": (
        lambda f: edit(f, model__odd=torch.ones(2)),
        UnsupportedBundle,
        ["unexpected", "model.odd"],
    ),
    "norm without numbers": (
        lambda f: edit(f, model__norm__weight=NAN),
        UnsupportedBundle,
        ["model.norm.weight", "not finite"],
    ),
    "NaN scale": (
        lambda f: mlx(f, scales=torch.full((96, 2), torch.nan)),
        UnsupportedBundle,
        [f"{UP}.weight", "scale", "not a finite number"],
    ),
    "no scales": (lambda f: mlx(f, drop="scales"), UnsupportedBundle, [f"{UP}.weight", "(96, 8)"]),
    "no biases": (lambda f: mlx(f, drop="biases"), IncompleteBundle, [f"{UP}.biases", "missing"]),
    "scales of other groups": (
        lambda f: mlx(f, scales=torch.ones(96, 1)),
        UnsupportedBundle,
        [f"{UP}.scales", "(96, 1)", "4 bits in groups of 32", "(96, 2)"],
    ),
    "unknown quantization": (
        lambda f: config(f, quantization_config={"quant_method": "exotic"}),
        UnsupportedBundle,
        ["config.json", "'exotic'"],
    ),
}


def refusal(path: Path, kind: type[BundleError]) -> str:
    with pytest.raises(kind) as caught:
        load_model(open_bundle(path, "made/model"), compute_mode="bfloat16")
    return caught.value.message


def assert_one_line(message: str, words: list[str], folder: Path) -> None:
    assert "\n" not in message
    assert len(message) < 500
    for word in words:
        assert word in message, message
    assert str(folder) in message or "made/model" in message, "it must say where"


def assert_nothing_is_open(folder: Path) -> None:
    gc.collect()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder) not in maps.read_text()
        files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        assert not [name for name in files if name.startswith(str(folder))]


def test_the_bundle_is_whole_before_it_is_broken(tmp_path: Path) -> None:
    for number, tensors in enumerate((llama_tensors(), quantized()[0])):
        folder = write_folder(tmp_path / str(number), tensors=tensors)
        if number:
            config(folder, **quantized()[1])
        load_model(open_bundle(folder), compute_mode="bfloat16")
    assert len(FOLDERS) + len(GGUFS) >= 20


@pytest.mark.parametrize("name", FOLDERS)
def test_a_broken_folder_is_refused_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "bundle", tensors=llama_tensors())
    change, kind, words = FOLDERS[name]
    change(folder)
    if "not finite" not in words and "NaN" not in name:
        # All but values is known before the first tensor is read.
        monkeypatch.setattr(registry, "WeightLoader", _untouched)
    assert_one_line(refusal(folder, kind), words, folder)
    assert_nothing_is_open(tmp_path)


def _untouched(*_: Any, **__: Any) -> WeightLoader:
    raise AssertionError("the check must come before the load")


def _gguf(path: Path, **changes: Any) -> None:
    write_gguf(path, **changes)


def _cut_gguf(path: Path) -> None:
    _gguf(path, encoding="Q8_0")
    path.write_bytes(path.read_bytes()[:-1000])


def _nan_gguf(path: Path) -> None:
    _gguf(path, encoding="Q8_0")
    data = path.read_bytes()
    tensors = gguf_tensors()
    raw = gguf.quants.quantize(tensors["blk.1.ffn_up.weight"], gguf.GGMLQuantizationType.Q8_0)
    at = data.index(raw.tobytes())
    path.write_bytes(data[:at] + np.float16(np.nan).tobytes() + data[at + 2 :])


def _odd_gguf(path: Path) -> None:
    tensors = gguf_tensors()
    hidden = SIZES["hidden"]
    _gguf(path, tensors={**tensors, "blk.0.attn_norm.weight": np.ones(hidden - 1, np.float32)})


GGUFS: dict[str, tuple[Callable[[Path], object], type[BundleError], list[str]]] = {
    "cut": (_cut_gguf, IncompleteBundle, ["m.gguf", "bytes are missing", "unfinished download"]),
    "empty": (lambda p: p.write_bytes(b""), IncompleteBundle, ["m.gguf", "empty"]),
    "zeros": (lambda p: p.write_bytes(bytes(4096)), IncompleteBundle, ["m.gguf", "zeros"]),
    "another file": (lambda p: p.write_bytes(b"PK\3\4" * 99), UnsupportedBundle, ["m.gguf"]),
    "unknown architecture": (
        lambda p: _gguf(p, architecture="gpt9", metadata={}),
        UnsupportedBundle,
        ["m.gguf", "'gpt9'"],
    ),
    "NaN scale": (
        _nan_gguf,
        UnsupportedBundle,
        ["model.layers.1.mlp.up_proj.weight", "not a finite number"],
    ),
    "wrong shape": (
        _odd_gguf,
        UnsupportedBundle,
        ["model.layers.0.input_layernorm.weight", "(63,)", "(64,)"],
    ),
}


@pytest.mark.parametrize("name", GGUFS)
def test_a_broken_gguf_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    change, kind, words = GGUFS[name]
    change(path)
    assert_one_line(refusal(path, kind), words, tmp_path)
    assert_nothing_is_open(tmp_path)


def test_the_command_line_ends_with_one_line_and_code_1(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made" / "broken", tensors=llama_tensors())
    edit(folder, model__norm__weight=None)
    done = subprocess.run(
        [sys.executable, "-m", "osaurus", "run", "broken", "Hi", "--no-disk-cache"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(osaurus.__file__).parents[1]),
            "OSAURUS_SERVER__PORT": "1",
            "OSAURUS_MODELS_DIR": str(tmp_path),
            "OSAURUS_HOME": str(tmp_path / "home"),
        },
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "model.norm.weight is missing" in done.stderr
    assert "Traceback" not in done.stderr

"""Opening a bundle: what it says of itself, what it costs, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import osaurus
from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.config import read_config
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle
from unit.bundle.made import CHAT, gguf_metadata, gguf_tensors, write_folder, write_gguf


def test_the_default_model_opens(default_model_bundle: Bundle) -> None:
    bundle = default_model_bundle
    assert bundle.model_id == "HuggingFaceTB/SmolLM2-135M-Instruct:Q4_1"
    assert bundle.format == "gguf"
    assert bundle.quantization == "Q4_1"
    assert bundle.config["num_hidden_layers"] == 30
    assert bundle.size_bytes == 96_576_768
    assert "<|im_start|>" in (bundle.chat_template or "")
    assert len(bundle.open_weights().names()) == 272


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_opens_with_every_weight_of_its_architecture(
    tmp_path: Path, architecture: str
) -> None:
    path = tmp_path / f"Made-{architecture}-Q4_0.gguf"
    write_gguf(path, architecture=architecture, encoding="Q4_0", tensors=gguf_tensors(architecture))
    bundle = open_bundle(path)
    assert bundle.model_id == path.stem
    assert (bundle.format, bundle.quantization) == ("gguf", "Q4_0")
    assert bundle.chat_template == CHAT
    names = bundle.open_weights().names()
    assert len(names) == len(gguf_tensors(architecture))
    assert all(name.startswith("model.") for name in names)


def test_a_folder_of_safetensors_opens(tmp_path: Path) -> None:
    bundle = open_bundle(write_folder(tmp_path / "made"), "me/made")
    assert (bundle.model_id, bundle.format, bundle.quantization) == (
        "me/made",
        "safetensors",
        "BF16",
    )
    assert bundle.path == tmp_path / "made"
    assert bundle.generation_config == {}
    template = bundle.load_template()
    assert template is not None
    assert "<|im_start|>user\nhi<|im_end|>" in template.render([{"role": "user", "content": "hi"}])
    assert bundle.load_tokenizer() is bundle.load_tokenizer()


def test_a_folder_with_one_gguf_opens_as_that(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "repo" / "m-F32.gguf")
    assert open_bundle(tmp_path / "repo").path == path


def test_derived_entries_are_written_out_and_published_ones_kept(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = {"rope_parameters": {"rope_theta": 5e5, **scaling}, "num_key_value_heads": None}
    write_folder(tmp_path, config=config)
    read = read_config(tmp_path)
    assert (read["rope_theta"], read["rope_scaling"]) == (5e5, scaling)
    assert (read["head_dim"], read["num_key_value_heads"]) == (16, 4)
    assert read["rope_parameters"] == {"rope_theta": 5e5, **scaling}
    write_folder(tmp_path, config={"head_dim": 32, "rope_theta": 1e4, "num_key_value_heads": 2})
    read = read_config(tmp_path)
    assert (read["head_dim"], read["num_key_value_heads"], read["rope_theta"]) == (32, 2, 1e4)
    assert "rope_scaling" not in read


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "4-bit"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "MXFP4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "4-bit gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({}, "BF16"),
    ],
)
def test_the_quantization_label_says_how_weights_are_stored(
    tmp_path: Path, config: dict[str, Any], label: str
) -> None:
    assert open_bundle(write_folder(tmp_path, config=config)).quantization == label


def test_a_gguf_without_a_name_for_its_quantization_says_what_most_bytes_are(
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "made.gguf", encoding="Q8_0")
    assert open_bundle(path).quantization == "Q8_0"
    metadata = gguf_metadata(general__file_type=15)
    assert open_bundle(write_gguf(tmp_path / "b.gguf", metadata)).quantization == "Q4_K_M"


def test_opening_imports_neither_torch_nor_transformers(default_model_path: Path) -> None:
    program = (
        "import sys\n"
        "from osaurus.bundle.bundle import open_bundle\n"
        f"bundle = open_bundle({str(default_model_path)!r})\n"
        "assert bundle.eos_token_ids == {0, 2}\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    source = str(Path(osaurus.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": source}
    )


def test_the_default_models_tokenizer_is_rebuilt_in_less_than_400_ms(
    default_model_path: Path,
) -> None:
    def seconds() -> float:
        bundle = open_bundle(default_model_path)
        start = time.perf_counter()
        bundle.load_tokenizer()
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.4


# --- refusals -------------------------------------------------------------------------------


def refusal(path: Path, kind: type[BundleError]) -> str:
    with pytest.raises(kind) as caught:
        open_bundle(path)
    return caught.value.message


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere" in refusal(tmp_path / "nowhere", IncompleteBundle)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a model folder nor a GGUF" in refusal(tmp_path / "notes.txt", UnsupportedBundle)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named_as_an_unfinished_download(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / name).unlink()
    message = refusal(tmp_path, IncompleteBundle)
    assert name in message
    assert "unfinished download" in message


def test_merges_without_which_a_vocabulary_is_useless_are_missed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    assert "merges.txt" in refusal(tmp_path, IncompleteBundle)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("{", IncompleteBundle, "not valid JSON"),
        ("[1]", UnsupportedBundle, "names no model_type"),
        ('{"architectures": ["X"]}', UnsupportedBundle, "names no model_type"),
        ('{"model_type": "llama", "x": "' + "y" * 2**20 + '"}', UnsupportedBundle, "larger than"),
        ("[" * 100_000, IncompleteBundle, "not valid JSON"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, kind: type[BundleError], words: str
) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    message = refusal(tmp_path, kind)
    assert "config.json" in message
    assert words in message


@pytest.mark.parametrize(
    ("name", "words"),
    [("adapter_config.json", "an adapter"), ("model_index.json", "image-generation")],
)
def test_folders_that_are_something_else_say_what(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_text("{}")
    assert words in refusal(tmp_path, UnsupportedBundle)


@pytest.mark.parametrize("text", ["{", "[]", '{"x": "' + "y" * 2**20 + '"}'])
def test_a_damaged_generation_config_counts_as_absent_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert open_bundle(tmp_path).generation_config == {}
    assert "generation_config.json" in caplog.text


def test_a_gguf_that_lacks_a_tensor_is_refused_with_its_name(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "x.gguf", tensors=tensors)
    assert "'blk.1.ffn_up.weight'" in refusal(path, IncompleteBundle)


# --- the manifest ---------------------------------------------------------------------------


def manifest(folder: Path, text: str) -> Path:
    write_folder(folder)
    (folder / "osaurus.json").write_text(text)
    return folder


def test_a_manifest_for_this_version_is_obeyed(tmp_path: Path) -> None:
    text = json.dumps(
        {"required_osaurus_version": osaurus.__version__, "model_version": "1.5", "other": 1}
    )
    assert open_bundle(manifest(tmp_path, text)).format == "safetensors"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"model_version": "1"}', "lacks the field 'required_osaurus_version'"),
        ('{"required_osaurus_version": "0.0.1"}', "lacks the field 'model_version'"),
        ('{"required_osaurus_version": "99.0.0", "model_version": "1"}', "needs osaurus 99.0.0"),
        ('{"required_osaurus_version": "soon", "model_version": "1"}', "'soon', not a version"),
        ('{"required_osaurus_version": "0.0.1", "model_version": 1}', "not a decimal text"),
        ('{"required_osaurus_version": "0.0.1", "model_version": "one"}', "not a decimal text"),
        ('{"x": "' + "y" * 65536 + '"}', "larger than"),
    ],
)
def test_a_manifest_that_is_damaged_or_of_the_future_blocks_loading(
    tmp_path: Path, text: str, words: str
) -> None:
    message = refusal(manifest(tmp_path, text), UnsupportedBundle)
    assert "osaurus.json" in message
    assert words in message


def test_an_unfinished_update_blocks_loading(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / ".osaurus-updating").touch()
    assert "pull it again" in refusal(tmp_path, IncompleteBundle)


def test_the_manifest_beside_a_gguf_counts_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    (tmp_path / "osaurus.json").write_text("{")
    assert "osaurus.json" in refusal(path, UnsupportedBundle)

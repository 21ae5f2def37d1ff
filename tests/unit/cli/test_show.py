"""Proves `show`: route, format, quantization, context, topology, tool format, reasoning, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_embedders
from osaurus.cli.app import run_command_line
from unit.bundle.made import CHAT, write_folder, write_gguf

TEMPLATES = Path(__file__).parents[2] / "golden" / "templates"


def _bundle(folder: Path, model_type: str, template: str) -> str:
    write_folder(folder, config={"model_type": model_type})
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def test_show_says_how_a_model_speaks_and_how_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (TEMPLATES / "xml_function.jinja").read_text()
    path = _bundle(tmp_path / "thinker", "qwen3_5", template)
    assert run_command_line(["show", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line[:24].split("  ")[0].strip(): line.partition("  ")[2].strip() for line in lines}
    assert found["tool calls"] == "xml_function (model_type)"
    assert found["reasoning"] == "think (model_type)"
    assert found["thinking profile"] == (
        "qwen (model_type qwen3_5), switched by enable_thinking; "
        "unless asked for: enable_thinking=false"
    )
    assert "template fallbacks" not in found


def test_show_says_what_a_template_cannot_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _bundle(tmp_path / "plain", "llama", CHAT)
    assert run_command_line(["show", path, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tool_format"] == {"name": "json", "source": "the system message asks for it"}
    assert facts["reasoning"] == {"name": None, "source": "none"}
    assert facts["profile"]["name"] == "none"
    assert "tools are described in the system message" in facts["template_fallbacks"]


def test_show_reports_a_template_that_is_not_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _bundle(tmp_path / "broken", "llama", "{% if %}")
    assert run_command_line(["show", path]) == 0
    assert "cannot be rendered: the chat template is not valid" in capsys.readouterr().out


def _shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    assert run_command_line(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    width = next(n for n in range(5, 60) if all(line[n - 2 : n] == "  " for line in lines))
    return {line[:width].strip(): line[width:] for line in lines}


_GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 8,
    "sliding_window": 128,
    "head_dim": 16,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            _GEMMA,
            {
                "architecture": "Gemma3ForCausalLM",
                "route": "native (models/gemma3.py)",
                "format": "safetensors",
                "topology": "5 x sliding_window 128, full_attention, 2 x sliding_window 128",
                "context": "256",
            },
        ),
        (
            {"quantization": {"bits": 4, "group_size": 64}},
            {"format": "safetensors, MLX", "quantization": "4-bit", "topology": "full_attention"},
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 64}},
            {"format": "safetensors", "quantization": "8-bit gptq"},
        ),
        (
            {
                "model_type": "qwen3_5",
                "text_config": {
                    "num_hidden_layers": 4,
                    "linear_num_value_heads": 4,
                    "quantization": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
                },
            },
            {
                "quantization": "MXFP8",
                "topology": "3 x gated_delta, full_attention",
                "route": "native (models/qwen3_next.py)",
            },
        ),
        ({"model_type": "bert"}, {"route": "embedding (models/bert.py, pooling mean)"}),
        (
            {"model_type": "gpt_neox"},
            {"route": "transformers (GPTNeoXForCausalLM)", "architecture": "gpt_neox"},
        ),
    ],
)
def test_show_says_what_a_model_is_and_who_computes_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    expected: dict[str, str],
) -> None:
    write_folder(tmp_path / "made", config=config)
    found = _shown(capsys, tmp_path / "made")
    assert {key: found.get(key) for key in expected} == expected
    assert "needs about" in found["memory"]


def test_show_says_the_same_of_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m-Q8_0.gguf", encoding="Q8_0")
    found = _shown(capsys, path)
    assert found["route"] == "native (models/llama.py)"
    assert (found["format"], found["quantization"]) == ("gguf", "Q8_0")
    assert (found["context"], found["topology"]) == ("512", "2 x full_attention")
    assert found["tool calls"].startswith("json")


def test_show_says_why_nobody_serves_an_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "odd", config={"model_type": "gpt9"})
    assert _shown(capsys, tmp_path / "odd")["route"].startswith(
        "none: model_type 'gpt9' is not served"
    )


def test_show_refuses_a_broken_bundle_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "cut")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-9])
    assert run_command_line(["show", str(folder)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "model.safetensors" in shown.err


def test_show_of_a_native_model_imports_no_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made")
    program = (
        "import sys; from osaurus.cli.app import run_command_line as run; "
        f"assert run(['show', {str(folder)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_show_says_that_a_model_makes_vectors_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_embedders.save_encoder(tmp_path / "made", pooling="cls_token")
    found = _shown(capsys, tmp_path / "made")
    assert found["route"] == "embedding (models/bert.py, pooling cls)"
    (tmp_path / "made" / "modules.json").write_text("[]")
    assert "names no Pooling" in _shown(capsys, tmp_path / "made")["route"]

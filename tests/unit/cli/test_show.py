"""Proves `show`: output format, reasoning and thinking profile, each with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osaurus.cli.app import run_command_line
from unit.bundle.made import CHAT, write_folder

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

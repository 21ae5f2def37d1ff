"""What a bundle says of its formats and its thinking, read from the files that say it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from api.scripted_engine import ByteTokenizer
from osaurus.errors import InvalidField
from osaurus.runtime.conventions import read_conventions


@dataclass(frozen=True)
class _Bundle:
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    def load_tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()


def _stamp(folder: Path, **entries: Any) -> Path:
    (folder / "jang_config.json").write_text(json.dumps(entries))
    return folder


def test_a_stamp_outranks_type_and_template(tmp_path: Path) -> None:
    _stamp(tmp_path, capabilities={"tool_parser": "glm47", "reasoning_parser": "none"})
    bundle = _Bundle(tmp_path, {"model_type": "qwen3"}, chat_template="<tool_call><think></think>")
    formats = read_conventions(bundle).formats
    assert (formats.tool_format, formats.tool_origin) == ("glm4", "stamp")
    assert (formats.reasoning, formats.reasoning_origin) == (None, "stamp")


def test_an_override_outranks_the_stamp_and_must_be_known(tmp_path: Path) -> None:
    bundle = _Bundle(_stamp(tmp_path, capabilities={"tool_parser": "glm47"}))
    formats = read_conventions(bundle, tool_override="mistral").formats
    assert (formats.tool_format, formats.tool_origin) == ("mistral", "override")
    with pytest.raises(InvalidField, match="toolParserOverride"):
        read_conventions(bundle, tool_override="wizard")


def test_type_then_template_then_nothing(tmp_path: Path) -> None:
    def found(**fields: Any) -> tuple[str | None, str]:
        formats = read_conventions(_Bundle(tmp_path, **fields)).formats
        return formats.tool_format, formats.tool_origin

    assert found(config={"model_type": "lfm2"}) == ("lfm2", "model_type")
    assert found(config={"text_config": {"model_type": "gemma4"}}) == ("gemma4", "model_type")
    assert found(chat_template="[TOOL_CALLS]") == ("mistral", "template")
    assert found(chat_templates={"tool_use": "[TOOL_CALLS]"}) == ("mistral", "template")
    assert found() == (None, "none")


def test_template_defaults_come_from_the_first_file_that_has_any(tmp_path: Path) -> None:
    reasoning = {
        "default_mode": "thinking",
        "default_effort": "high",
        "effort_levels": ["low", "high"],
    }
    _stamp(tmp_path, chat={"reasoning": reasoning}, capabilities={"supports_thinking": False})
    found = read_conventions(_Bundle(tmp_path))
    assert (found.template_defaults, found.default_mode) == (
        {"reasoning_effort": "high"},
        "thinking",
    )
    assert found.defaults_origin == "jang_config.json"
    assert (found.effort_levels, found.supports_thinking) == (("low", "high"), False)
    declared = {"default_chat_template_kwargs": {"enable_thinking": True}}
    found = read_conventions(_Bundle(tmp_path, generation_config=declared))
    assert (found.template_defaults, found.default_mode) == ({"enable_thinking": True}, "")
    assert found.defaults_origin == "generation_config.json"


@pytest.mark.parametrize("stamp", ["[]", "not json", '{"capabilities": 5, "chat": []}'])
def test_a_stamp_that_says_nothing_readable_is_passed_over(tmp_path: Path, stamp: str) -> None:
    (tmp_path / "jang_config.json").write_text(stamp)
    found = read_conventions(_Bundle(tmp_path, {"model_type": "qwen2"}))
    assert (found.formats.tool_format, found.effort_levels) == ("json", None)

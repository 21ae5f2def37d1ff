"""The small files of a model folder: read with limits, given back in published spelling.

In: a folder. Out: plain dicts. `config.json` must be there and whole; the others are optional
and a damaged one counts as absent, with a warning, because the model can be served without.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from osaurus.errors import IncompleteBundle, UnsupportedBundle

_log = logging.getLogger(__name__)

_MAX_CONFIG_BYTES = 1024 * 1024
#: tokenizer_config.json lists every added token of some families; 1 MiB is not enough there.
_MAX_TOKENIZER_CONFIG_BYTES = 16 * 1024 * 1024

#: Every file that decides what a text's tokens are; the bundle's fingerprint covers them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` with derived entries filled in.

    Raises `IncompleteBundle` when it is missing or unreadable, `UnsupportedBundle` when the
    folder is something else than a language model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise _not_a_model(folder, path)
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise UnsupportedBundle(f"{path}: larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise IncompleteBundle(
            f"{path}: not valid JSON ({error}); this looks like an unfinished download, fetch it "
            "again"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UnsupportedBundle(f"{path}: names no model_type, so nobody can tell what it is")
    return _with_derived(config)


def _not_a_model(folder: Path, config: Path) -> Exception:
    if (folder / "adapter_config.json").is_file():
        return UnsupportedBundle(
            f"{folder}: an adapter without its base model; merge it into the base first"
        )
    if (folder / "model_index.json").is_file():
        return UnsupportedBundle(f"{folder}: an image-generation pipeline, not a language model")
    return IncompleteBundle(
        f"{config}: the file is missing; this looks like an unfinished download, fetch it again"
    )


def _with_derived(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with the spellings that every reader may count on.

    transformers 5 writes `rope_parameters` where the published name is `rope_theta` with
    `rope_scaling`; head counts and sizes that follow from others are written out.
    """
    config = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        if scaling.get("rope_type", "default") != "default":
            config.setdefault("rope_scaling", scaling)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and heads > 0:
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = heads
        if config.get("head_dim") is None and isinstance(hidden, int):
            config["head_dim"] = hidden // heads
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """`generation_config.json`, or nothing."""
    return read_optional(folder / "generation_config.json")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with gaps filled from `special_tokens_map.json`."""
    config = read_optional(folder / "tokenizer_config.json", _MAX_TOKENIZER_CONFIG_BYTES)
    special = read_optional(folder / "special_tokens_map.json", _MAX_TOKENIZER_CONFIG_BYTES)
    return {**special, **{key: value for key, value in config.items() if value is not None}}


def read_optional(path: Path, max_bytes: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object, or an empty one with a warning when it is too large or not readable."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return {}
    if size > max_bytes:
        _log.warning("%s: %d bytes, more than %d; it is ignored", path, size, max_bytes)
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s: not readable (%s); it is ignored", path, error)
        return {}
    if not isinstance(value, dict):
        _log.warning("%s: not a JSON object; it is ignored", path)
        return {}
    return value


def missing_tokenizer_file(folder: Path) -> str | None:
    """None when some vocabulary is there, else the name of the file that should be."""
    whole = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json")
    if any((folder / name).is_file() for name in whole):
        return None
    if (folder / "vocab.json").is_file():
        return None if (folder / "merges.txt").is_file() else "merges.txt"
    return "tokenizer.json"


def chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates by name (`default`, `tool_use`, ...); of one name the most special place wins:
    a template file, then `chat_template.json`, then the tokenizer's config."""
    found = {
        **_declared_templates(tokenizer_config),
        **_declared_templates(read_optional(folder / "chat_template.json")),
    }
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = _read_text(path)
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = _read_text(path)
    return found


def _declared_templates(entries: dict[str, Any]) -> dict[str, str]:
    """What `chat_template` holds: one template, or several with their names."""
    declared = entries.get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, dict):
        return {name: text for name, text in declared.items() if isinstance(text, str)}
    if not isinstance(declared, list):
        return {}
    return {
        str(entry.get("name", "default")): entry["template"]
        for entry in declared
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IncompleteBundle(f"{path}: cannot be read as text ({error})") from error

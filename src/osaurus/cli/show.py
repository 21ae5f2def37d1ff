"""`osaurus show MODEL`: what the files say of one model, without loading its weights."""

from __future__ import annotations

import json
from typing import Annotated, Any

from cyclopts import Parameter

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.cli.list import listing_json
from osaurus.cli.options import Json
from osaurus.cli.terminal import human_bytes
from osaurus.errors import UnsupportedBundle

#: Published config names worth a line, in the order shown.
_CONFIG_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "sliding_window",
    "tie_word_embeddings",
)


def show(
    model: str,
    /,
    *,
    template: Annotated[bool, Parameter(show_default=False)] = False,
    as_json: Json = False,
) -> None:
    """Show what is known of one model.

    Parameters
    ----------
    model
        Name, alias or path of a model.
    template
        Print the chat template and nothing else.
    """
    listing = find_model(model)
    bundle = open_bundle(listing.path, listing.model_id)
    if template:
        if bundle.chat_template is None:
            raise UnsupportedBundle(f"{bundle.model_id} has no chat template")
        print(bundle.chat_template)
        return
    facts: dict[str, Any] = {
        **listing_json(listing),
        "architecture": ", ".join(bundle.config.get("architectures") or ()) or None,
        "config": {key: bundle.config[key] for key in _CONFIG_KEYS if key in bundle.config},
        "chat_templates": sorted(bundle.chat_templates),
        "generation": dict(bundle.generation_config),
        "fingerprint": bundle.fingerprint,
    }
    print(json.dumps(facts, indent=2, default=str) if as_json else _text(facts))


def _text(facts: dict[str, Any]) -> str:
    lines = {
        "model": facts["id"],
        "alias": facts["alias"],
        "path": facts["path"],
        "format": facts["format"],
        "family": facts["family"],
        "architecture": facts["architecture"],
        "size": human_bytes(facts["size_bytes"]),
        "quantization": facts["quantization"],
        "context": facts["context"],
        "chat template": ", ".join(facts["chat_templates"]) or "none",
        **facts["config"],
        **{f"generation {key}": value for key, value in facts["generation"].items()},
        "fingerprint": facts["fingerprint"][:16],
    }
    width = max(map(len, lines))
    known = {key: value for key, value in lines.items() if value is not None}
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in known.items())

"""What Ollama's `/show` tells of a model: its facts under GGUF's names, and what it can do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.card import ModelCard, card_of, parameter_label
from osaurus.chat.fill import fill_format_of
from osaurus.chat.probes import traits_of
from osaurus.errors import TemplateError
from osaurus.runtime.conventions import read_conventions
from osaurus.runtime.defaults import bundle_sampling
from osaurus.runtime.model import Listing
from osaurus.server.apis.ollama_lines import timestamp


class Details(Struct, kw_only=True):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ShownModel(Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: Mapping[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str


def details_of(card: ModelCard) -> Details:
    return Details(
        format=card.format,
        family=card.family,
        families=[card.family] if card.family else [],
        parameter_size=parameter_label(card.num_parameters),
        quantization_level=card.quantization,
    )


def show(listing: Listing, *, context_tokens: int | None) -> ShownModel:
    """Blocks. `context_tokens` is what a loaded model serves. Raises what is wrong with the
    bundle."""
    bundle = open_bundle(listing.path, listing.model_id)
    card = card_of(listing.model_id, listing.path)
    parameters = _parameters(bundle, card, context_tokens)
    template = bundle.chat_template or ""
    return ShownModel(
        modelfile=_modelfile(listing.model_id, template, parameters),
        parameters="\n".join(f"{name:<30} {value}" for name, value in parameters),
        template=template,
        details=details_of(card),
        model_info=card.info,
        capabilities=capabilities(bundle),
        modified_at=timestamp(listing.modified),
        license=card.licence,
    )


def capabilities(bundle: Bundle) -> list[str]:
    """Ollama's words. Tools count where the template has a place for them: described in words to
    a model that was not made for them, they are rarely called well."""
    if bundle.embedding_spec is not None:
        return ["embedding"]
    found = ["completion"]
    template = bundle.load_template()
    try:
        if template is not None and traits_of(template).has_tools:
            found.append("tools")
    except TemplateError:
        pass  # it cannot be rendered, with tools or without
    if fill_format_of(bundle.load_tokenizer()) is not None:
        found.append("insert")
    if read_conventions(bundle).formats.reasoning is not None:
        found.append("thinking")
    return found


def _parameters(
    bundle: Bundle, card: ModelCard, context_tokens: int | None
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    declared = card.info.get(f"{card.family}.context_length")
    if context_tokens is not None and context_tokens != declared:
        found.append(("num_ctx", str(context_tokens)))
    if bundle.embedding_spec is not None:
        return found
    for name, value in bundle_sampling(bundle).items():
        name = "repeat_penalty" if name == "repetition_penalty" else name
        found.append((name, f"{value:g}"))
    found += [("stop", json.dumps(text, ensure_ascii=False)) for text in bundle.stop_strings]
    return found


def _modelfile(model_id: str, template: str, parameters: list[tuple[str, str]]) -> str:
    lines = [f"FROM {model_id}"]
    if template:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    return "\n".join(lines) + "\n"

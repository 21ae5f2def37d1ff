"""`osaurus show MODEL`: what the files say of one model, without loading its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.embedding import ENCODERS
from osaurus.bundle.hub import find_model
from osaurus.bundle.labels import is_mlx
from osaurus.chat.probes import traits_of
from osaurus.chat.profiles import profile_of
from osaurus.chat.prompt import WORDED_FORMAT
from osaurus.chat.traits import fallbacks
from osaurus.cli.list import listing_json
from osaurus.cli.options import Json
from osaurus.cli.terminal import human_bytes
from osaurus.errors import TemplateError, UnsupportedBundle
from osaurus.models.drafts import draft_tensors, num_draft_layers
from osaurus.models.families import FAMILIES
from osaurus.runtime.conventions import read_conventions
from osaurus.runtime.geometry import LayerShape, layer_runs, read_geometry, topology_text
from osaurus.runtime.preview import memory_plan

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
        "is_mlx": is_mlx(bundle.config),
        "architecture": ", ".join(bundle.config.get("architectures") or ()) or None,
        "route": _route(bundle),
        "topology": _topology(bundle.config),
        "draft_layers": _draft_layers(bundle),
        "config": {key: bundle.config[key] for key in _CONFIG_KEYS if key in bundle.config},
        "chat_templates": sorted(bundle.chat_templates),
        **_conventions(bundle),
        "generation": dict(bundle.generation_config),
        "memory": _memory(bundle),
        "fingerprint": bundle.fingerprint,
    }
    print(json.dumps(facts, indent=2, default=str) if as_json else _text(facts))


def _route(bundle: Bundle) -> dict[str, Any]:
    """Who computes it: a family here, or transformers, which alone knows whether it can; for
    vectors of texts, how a text's become one too."""
    model_type = str(bundle.config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    try:
        if (spec := bundle.embedding_spec) is not None:
            family = "bert" if model_type in ENCODERS else family
            if family is None:
                raise UnsupportedBundle(f"embeddings of model_type {model_type!r}")
            by = f"models/{family}.py, pooling {spec.pooling}"
            return {"name": "embedding", "by": by, "problem": None}
        if family is not None:
            return {"name": "native", "by": f"models/{family}.py", "problem": None}
        from osaurus.models.transformers_route import class_name

        return {"name": "transformers", "by": class_name(bundle.config), "problem": None}
    except UnsupportedBundle as error:
        return {"name": None, "by": None, "problem": error.message}


def _topology(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each layer remembers, layers alike one after another counted."""
    geometry = read_geometry(config)
    return [
        {
            "layers": count,
            "kind": layer.kind,
            "window": layer.window,
            "kv_items_per_token": layer.row_items,
            "state_items": layer.state_items,
        }
        for count, layer in layer_runs(geometry.layers if geometry else ())
    ]


def _draft_layers(bundle: Bundle) -> int:
    """Layers that predict further tokens, which answers do without."""
    names = [tensor.name for tensor in bundle.tensor_facts()]
    return num_draft_layers(draft_tensors(bundle.config, names))


def _topology_text(runs: list[dict[str, Any]]) -> str | None:
    layers = [
        LayerShape(kind=run["kind"], window=run["window"])
        for run in runs
        for _ in range(run["layers"])
    ]
    return topology_text(layers) or None


def _route_text(route: dict[str, Any]) -> str:
    return f"{route['name']} ({route['by']})" if route["name"] else f"none: {route['problem']}"


def _format_text(facts: dict[str, Any]) -> str:
    return "safetensors, MLX" if facts["is_mlx"] else facts["format"]


def _conventions(bundle: Bundle) -> dict[str, Any]:
    """How the model's output is read and its thinking switched, each with where that is from."""
    conventions = read_conventions(bundle)
    formats = conventions.formats
    chosen = profile_of(conventions, bundle.model_id)
    profile = chosen.profile
    template = bundle.load_template()
    tool_format = {"name": formats.tool_format, "source": str(formats.tool_origin)}
    changes: list[str] = []
    try:
        if template is not None:
            traits = traits_of(template)
            changes = fallbacks(traits)
            if formats.tool_format is None and not traits.has_tools:
                tool_format = {"name": WORDED_FORMAT, "source": "the system message asks for it"}
    except TemplateError as error:
        changes = [f"cannot be rendered: {error.message}"]
    return {
        "tool_format": tool_format,
        "reasoning": {"name": formats.reasoning, "source": formats.reasoning_origin},
        "profile": {
            "name": profile.name,
            "source": chosen.source,
            "switches": list(profile.switches if profile.shown != "hidden" else ()),
            "efforts": list(profile.levels or conventions.effort_levels or ()),
            "unset": dict(profile.unset),
            "bundle_defaults": {
                **conventions.template_defaults,
                **({"mode": conventions.default_mode} if conventions.default_mode else {}),
            },
            "bundle_defaults_source": conventions.defaults_origin or None,
        },
        "template_fallbacks": changes,
    }


def _memory(bundle: Bundle) -> dict[str, Any]:
    """What a load would take with the settings that hold, and whether it is allowed."""
    plan = memory_plan(bundle)
    return {
        "summary": plan.summary,
        "mode": plan.mode,
        "allowed": plan.allowed,
        "is_estimated": plan.is_estimated,
        "working_set": {**asdict(plan.working_set), "total_bytes": plan.working_set.total_bytes},
        "places": [{**asdict(one), "fits": one.fits} for one in plan.judgements],
        "issues": [*plan.blocking, *plan.warnings],
    }


def _sourced(fact: dict[str, Any]) -> str:
    return f"{fact['name']} ({fact['source']})" if fact["name"] else "none"


def _profile_text(profile: dict[str, Any]) -> str:
    text = "none" if profile["source"] == "none" else _sourced(profile)
    if profile["switches"]:
        text += f", switched by {', '.join(profile['switches'])}"
    if profile["efforts"]:
        text += f", effort {', '.join(profile['efforts'])}"
    for origin, values in (
        ("unless asked for", profile["unset"]),
        (profile["bundle_defaults_source"], profile["bundle_defaults"]),
    ):
        if values:
            pairs = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
            text += f"; {origin}: {pairs}"
    return text


def _text(facts: dict[str, Any]) -> str:
    lines = {
        "model": facts["id"],
        "alias": facts["alias"],
        "path": facts["path"],
        "format": _format_text(facts),
        "architecture": facts["architecture"] or facts["family"],
        "family": facts["family"],
        "route": _route_text(facts["route"]),
        "topology": _topology_text(facts["topology"]),
        "draft layers": facts["draft_layers"] or None,
        "size": human_bytes(facts["size_bytes"]),
        "quantization": facts["quantization"],
        "context": facts["context"],
        "chat template": ", ".join(facts["chat_templates"]) or "none",
        "tool calls": _sourced(facts["tool_format"]),
        "reasoning": _sourced(facts["reasoning"]),
        "thinking profile": _profile_text(facts["profile"]),
        "template fallbacks": "; ".join(facts["template_fallbacks"]) or None,
        **facts["config"],
        **{f"generation {key}": value for key, value in facts["generation"].items()},
        "memory": facts["memory"]["summary"],
        "memory issues": "; ".join(facts["memory"]["issues"]) or None,
        "fingerprint": facts["fingerprint"][:16],
    }
    width = max(map(len, lines))
    known = {key: value for key, value in lines.items() if value is not None}
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in known.items())

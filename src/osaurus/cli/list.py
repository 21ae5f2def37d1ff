"""`osaurus list`: every model on this machine, those that cannot be loaded with the reason."""

from __future__ import annotations

import json

from osaurus.bundle.hub import ModelListing, list_models
from osaurus.cli.options import Json
from osaurus.cli.terminal import columns, human_bytes, say

_HEADER = ("NAME", "FAMILY", "SIZE", "QUANT", "CONTEXT", "MODIFIED")


def list_all(*, as_json: Json = False) -> None:
    """List the models on this machine."""
    models = list_models()
    if as_json:
        print(json.dumps([listing_json(model) for model in models], indent=2))
        return
    if not models:
        say("no models here yet; `osaurus pull default` fetches a small one")
        return
    print(columns(_HEADER, [_row(model) for model in models]))
    for model in models:
        if not model.available:
            say(f"{model.model_id} cannot be loaded: {model.problem}")


def listing_json(model: ModelListing) -> dict[str, object]:
    """Stable keys; `context` is null when the model does not say."""
    return {
        "id": model.model_id,
        "alias": model.alias,
        "path": str(model.path),
        "format": model.format,
        "family": model.family,
        "size_bytes": model.size_bytes,
        "quantization": model.quantization or None,
        "context": model.context or None,
        "modified": model.modified.isoformat(timespec="seconds"),
        "available": model.available,
        "problem": model.problem,
    }


def _row(model: ModelListing) -> tuple[str, ...]:
    return (
        model.model_id,
        model.family or "-",
        human_bytes(model.size_bytes),
        model.quantization or "-",
        str(model.context or "-"),
        f"{model.modified:%Y-%m-%d %H:%M}",
    )

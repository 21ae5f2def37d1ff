"""Weights of layers that predict further tokens (multi-token prediction, DeepSeek-V3,
arXiv:2412.19437, section 2.2). A model answers the same without them; a drafter reads them.

In: a config and stored names. Out: which of them belong to such layers, under one spelling.
Reads no weight; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Where Qwen keeps them, alone and inside a multimodal bundle.
_OWN_MODULE = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
_LAYERS = "model.layers."
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def draft_tensors(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Stored names by those within the draft module: `layers.0.eh_proj.weight`, `fc.weight`.

    Qwen stores a module `mtp`, DeepSeek and GLM count on after the last layer. Both are found
    by their names: configs do not always tell.
    """
    nested = config.get("text_config")
    fields = {**config, **nested} if isinstance(nested, Mapping) else config
    layers = fields.get("num_hidden_layers")
    found: dict[str, str] = {}
    for name in names:
        if prefix := next((one for one in _OWN_MODULE if name.startswith(one)), ""):
            found[name.removeprefix(prefix)] = name
        elif name.startswith(_LAYERS) and isinstance(layers, int):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            if number.isdigit() and layers <= int(number) < layers + _declared(fields):
                found[f"layers.{int(number) - layers}.{rest}"] = name
    return found


def num_draft_layers(names: Iterable[str]) -> int:
    """Of `draft_tensors`' own spelling."""
    return len({name.split(".")[1] for name in names if name.startswith("layers.")})


def _declared(fields: Mapping[str, Any]) -> int:
    counts = (fields.get(name) for name in _COUNTS)
    return max((count for count in counts if isinstance(count, int)), default=0)

"""Which file serves which `model_type`. A new family is one file and one line here."""

from __future__ import annotations

from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.openmp import release_team
from osaurus.models.base import Model
from osaurus.models.loading import ComputeMode, WeightLoader

if TYPE_CHECKING:
    from osaurus.bundle.bundle import Bundle

#: model_type -> module of this package that defines `load(config, loader)`.
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3_moe",
    "glm": "glm4",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
}


def load_model(bundle: Bundle, *, compute_mode: ComputeMode, device: str = "cpu") -> Model:
    """Read a bundle's weights into its family's network.

    Raises `UnsupportedBundle` for a model_type that no family serves and `IncompleteBundle`
    for missing tensors; nothing of the bundle stays mapped afterwards.
    """
    model_type = str(bundle.config.get("model_type", ""))
    if model_type not in FAMILIES:
        served = ", ".join(sorted(FAMILIES))
        raise UnsupportedBundle(
            f"{bundle.model_id}: model_type {model_type!r} is not supported yet (served: {served})"
        )
    family = import_module(f"osaurus.models.{FAMILIES[model_type]}")
    try:
        with closing(bundle.open_weights()) as source:
            loader = WeightLoader(source, compute_mode, device)
            model: Model = family.load(bundle.config, loader)
            loader.finish()
    finally:
        release_team()  # the engine computes on a thread of its own
    return model

"""GGUF architectures we read: their tensor names in Hugging Face spelling.

In: a GGUF tensor name such as `blk.3.attn_q.weight`. Out: `model.layers.3.self_attn.q_proj.weight`.
A tensor that no table names is an error, never silently left out: a weight that is ignored is
a wrong answer later. The tables are in `gguf_tables.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from osaurus.bundle.gguf_tables import ARCHITECTURES, GgufArchitecture
from osaurus.errors import UnsupportedBundle

#: Not weights: rotary factors that `gguf_config.py` turns into `rope_scaling`.
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


def find_architecture(name: object, where: object) -> GgufArchitecture:
    """The table entry, or `UnsupportedBundle` that lists what is supported."""
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedBundle(
            f"{where}: GGUF architecture {name!r} is not supported (supported: {known}); "
            "use the model's safetensors form instead"
        )
    return found


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """The Hugging Face name, None for rotary factors; raises `KeyError` for unknown names."""
    if name in ROPE_TENSORS:
        return None
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, suffix = name, ""  # a few names have none
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        parts = architecture.some_blocks if part in architecture.some_blocks else architecture.block
        return f"model.layers.{int(layer)}.{_whole(parts[part], suffix, name)}"
    return _whole(architecture.model[stem], suffix, name)


def _whole(stem: str, suffix: str, name: str) -> str:
    if stem.startswith("="):
        return stem[1:]
    if not suffix:
        raise KeyError(name)
    return f"{stem}.{suffix}"


def missing_tensors(
    architecture: GgufArchitecture, num_layers: int, present: Iterable[str]
) -> list[str]:
    """GGUF names of weights that a whole model has and `present` lacks, in order.

    `output.weight` may be absent (tied to the embedding), and so may every bias. Parts that
    only some layers have are missed when their layer is loaded.
    """
    have = set(present)
    wanted = [f"{stem}.weight" for stem in architecture.model if stem != "output"]
    wanted += [
        f"blk.{layer}.{part}.weight" for layer in range(num_layers) for part in architecture.block
    ]
    return [name for name in wanted if name not in have]

"""What each layer of a model will remember, read off its published config before it is loaded.

In: the dict of a `config.json` (or of a GGUF, in the same spelling). Out: bytes. An estimate: the
network itself says exactly (`LayerTopology`), but only once it has been built. None where the
config does not tell. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

#: State is always float32 (`topology/base.py`).
_STATE_ITEM_BYTES = 4
#: What configs call a layer that folds tokens into state -> its word here.
_STATE_KINDS = {
    "linear_attention": "linear_attention",
    "mamba": "ssm",
    "mamba2": "ssm",
    "M": "ssm",
    "conv": "short_conv",
    "recurrent": "recurrent",
}
#: The same for layers that keep no token at all: those of an MLP alone.
_NO_MEMORY = ("-", "mlp", "moe", "E")
#: Families whose configs may leave out that every so-manyth layer is full attention.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "olmo3": 4}
_DELTA_FAMILIES = ("qwen3_next", "qwen3_5")
#: Those whose first `max_window_layers` layers do not slide.
_QWEN = ("qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """`row_items` numbers a token in blocks, of the last `window` tokens where that is set;
    `state_items` numbers a request in a slot. `kind` is the topology's word."""

    kind: str = "full_attention"
    row_items: int = 0
    window: int | None = None
    state_items: int = 0

    @property
    def label(self) -> str:
        return self.kind if self.window is None else f"{self.kind} {self.window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    layers: tuple[LayerShape, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int

    def kv_bytes(self, num_tokens: int, item_bytes: int) -> int:
        """Blocks of one request of that length."""
        return sum(
            layer.row_items * min(num_tokens, layer.window or num_tokens) * item_bytes
            for layer in self.layers
        )

    @property
    def state_bytes(self) -> int:
        """One request's slot."""
        return sum(layer.state_items for layer in self.layers) * _STATE_ITEM_BYTES


def read_geometry(config: Mapping[str, Any]) -> Geometry | None:
    nested = config.get("text_config")
    fields = {**config, **nested} if isinstance(nested, Mapping) else config
    num_layers = _whole(fields, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _whole(fields, "hidden_size", "n_embd", "d_model")
    if not num_layers or not hidden:
        return None
    row_items, state_items = _row_items(fields, hidden), _state_items(fields, hidden)
    layers = tuple(
        _layer(kind, window, fields, row_items, state_items)
        for kind, window in zip(
            _kinds(fields, num_layers), _windows(fields, num_layers), strict=True
        )
    )
    return Geometry(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=_whole(fields, "intermediate_size", "n_inner") or 4 * hidden,
        vocab_size=_whole(fields, "vocab_size"),
        context_tokens=_whole(
            fields, "max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"
        ),
    )


def layer_runs(layers: Sequence[LayerShape]) -> list[tuple[int, LayerShape]]:
    """Layers in order, those alike one after another counted."""
    return [(len(list(same)), layer) for layer, same in groupby(layers)]


def topology_text(layers: Sequence[LayerShape]) -> str:
    """One line: `6 x (5 x sliding_window 512, full_attention)`, the shortest pattern that
    repeats, and after it what is left of one."""
    labels = [layer.label for layer in layers]
    for period in range(1, len(labels) // 2 + 1):
        whole = len(labels) // period
        if all(labels[i] == labels[i % period] for i in range(whole * period)):
            rest = labels[whole * period :]
            if rest != labels[: len(rest)]:
                continue
            inner = _counted(labels[:period])
            text = f"{whole} x {inner}" if period == 1 else f"{whole} x ({inner})"
            return f"{text}, {_counted(rest)}" if rest else text
    return _counted(labels)


def _counted(labels: Sequence[str]) -> str:
    runs = [(label, len(list(same))) for label, same in groupby(labels)]
    return ", ".join(label if count == 1 else f"{count} x {label}" for label, count in runs)


def _layer(
    kind: str, window: int | None, fields: Mapping[str, Any], row_items: int, state_items: int
) -> LayerShape:
    if kind in _NO_MEMORY:
        return LayerShape(kind="none")
    if kind in _STATE_KINDS:
        has_delta = bool(_whole(fields, "linear_num_value_heads"))
        name = "gated_delta" if has_delta and kind == "linear_attention" else _STATE_KINDS[kind]
        return LayerShape(kind=name, state_items=state_items)
    if _slides(kind) and window:
        return LayerShape(kind="sliding_window", row_items=row_items, window=window)
    kind = "mla" if _whole(fields, "kv_lora_rank") else "full_attention"
    return LayerShape(kind=kind, row_items=row_items)


def _windows(fields: Mapping[str, Any], num_layers: int) -> Sequence[int | None]:
    """The window of each layer, were it one that slides."""
    window = _whole(fields, "sliding_window") or None
    if fields.get("use_sliding_window") is False:
        window = None
    if fields.get("layer_types") or "use_sliding_window" not in fields:
        return [window] * num_layers
    full = _whole(fields, "max_window_layers") if fields.get("model_type") in _QWEN else 0
    return [None if layer < full else window for layer in range(num_layers)]


def _kinds(fields: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    """One word a layer, by whichever way the config tells."""
    declared = fields.get("layer_types") or fields.get("layers_block_type")
    if isinstance(declared, Sequence) and len(declared) == num_layers:
        return [str(kind) for kind in declared]
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == num_layers:
        return ["full_attention" if letter == "*" else letter for letter in pattern]
    if isinstance(chosen := fields.get("full_attn_idxs"), Sequence):
        return ["full_attention" if i in chosen else "conv" for i in range(num_layers)]
    model_type = str(fields.get("model_type", ""))
    every = _whole(fields, "full_attention_interval", "attn_layer_period")
    every = every or (4 if model_type.startswith(_DELTA_FAMILIES) else 0)
    if every > 1:
        return [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
        ]
    every = _whole(fields, "sliding_window_pattern", "_sliding_window_pattern")
    every = every or _PATTERNS.get(model_type, 0)
    if every > 1:
        return [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
        ]
    return ["sliding_attention" if fields.get("sliding_window") else "full_attention"] * num_layers


def _slides(kind: str) -> bool:
    return kind in ("sliding_attention", "chunked_attention", "local_attention")


def _row_items(fields: Mapping[str, Any], hidden: int) -> int:
    if latent := _whole(fields, "kv_lora_rank"):
        return latent + _whole(fields, "qk_rope_head_dim")
    heads = _whole(fields, "num_attention_heads", "n_head") or 1
    head_dim = _whole(fields, "head_dim") or hidden // heads
    v_dim = _whole(fields, "v_head_dim") or head_dim
    return (_whole(fields, "num_key_value_heads") or heads) * (head_dim + v_dim)


def _state_items(fields: Mapping[str, Any], hidden: int) -> int:
    """A convolution's window and the recurrent matrix, whichever of them the family has."""
    taps = _whole(fields, "linear_conv_kernel_dim", "conv_L_cache", "mamba_d_conv", "conv_kernel")
    if heads := _whole(fields, "linear_num_value_heads"):
        k_dim, v_dim = (_whole(fields, f"linear_{one}_head_dim") for one in ("key", "value"))
        keys = _whole(fields, "linear_num_key_heads") * k_dim
        return prod((heads, k_dim, v_dim)) + taps * (2 * keys + heads * v_dim)
    inner = _whole(fields, "mamba_d_ssm", "mamba_intermediate_size")
    inner = inner or hidden * (_whole(fields, "mamba_expand", "expand") or 1)
    state = _whole(fields, "mamba_d_state", "ssm_state_size", "state_size")
    return inner * state + taps * (inner + 2 * state)


def _whole(fields: Mapping[str, Any], *names: str) -> int:
    """The first of the names that holds a number; 0 when none does."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0

"""Claims about how families are read from bundles: other spellings of one network are the same
network, what is knowingly left is left, and what cannot be served names its field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from osaurus.engine.core import BatchEngine
from osaurus.errors import IncompleteBundle, UnsupportedBundle
from osaurus.models.families import FAMILIES
from osaurus.models.gemma3 import Gemma3Config
from osaurus.topology.base import group_layers
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, load_tiny, save_tiny, tokens_of

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
LATENT = dict(
    num_key_value_heads=6,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
GEMMA = dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16)


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _reconfigure(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _answer(folder: Path) -> list[int]:
    """Sixteen greedy tokens, which say the same of two networks with equal weights."""
    engine = BatchEngine(
        load_tiny(folder),
        EngineConfig(kv_block_tokens=8, kv_budget_bytes=1 << 24),
        token_bytes=TokenText().token_bytes,
        start=False,
    )
    (stream,) = engine.generate(ask("r", list(range(3, 40)), max_tokens=16))
    while not stream._mailbox.completed:  # type: ignore[attr-defined]
        engine.step()
    engine.shutdown()
    return tokens_of(list(stream))


def _stacked(tensors: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and down of a layer's four experts, taken out of `tensors`."""
    prefix = f"model.layers.{layer}.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(4)])
        for name in ("gate", "up", "down")
    )
    return gate, up, down


def _as_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in range(3):
        gate, up, down = _stacked(tensors, layer)
        prefix = f"model.layers.{layer}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}.down_proj"] = down
    return tensors


def _as_switch(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in range(3):
        for name, weight in zip(("gate", "up", "down"), _stacked(tensors, layer), strict=True):
            tensors[f"model.layers.{layer}.mlp.switch_mlp.{name}_proj.weight"] = weight
    return tensors


@pytest.mark.parametrize("change", [_as_fused, _as_switch], ids=["fused", "mlx"])
def test_stacked_experts_are_the_same_experts(tmp_path: Path, change: Any) -> None:
    save_tiny(tmp_path, "qwen3_moe", **MOE)
    expected = _answer(tmp_path)
    _rewrite(tmp_path, change)
    assert _answer(tmp_path) == expected


def _as_mlx_latents(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn"
        up = tensors.pop(f"{prefix}.kv_b_proj.weight").view(6, 16 + 16, 32)
        tensors[f"{prefix}.embed_q.weight"] = up[:, :16].transpose(1, 2)
        tensors[f"{prefix}.unembed_out.weight"] = up[:, 16:]
    return tensors


def test_up_projections_that_mlx_took_apart_are_the_same(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3", **LATENT)
    expected = _answer(tmp_path)
    _rewrite(tmp_path, _as_mlx_latents)
    assert _answer(tmp_path) == expected


def _quantized(weight: Tensor, group: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """4-bit MLX form of [E, N, K]: packed codes, scales, biases, and what they stand for."""
    groups = weight.unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().clamp(0, 15)
    values = (codes * scale + low).flatten(-2)
    eights = codes.flatten(-2).long().unflatten(-1, (-1, 8))
    packed = (eights << (4 * torch.arange(8))).sum(-1)
    return packed.to(torch.uint32), scale.squeeze(-1), low.squeeze(-1), values


def test_stacked_experts_may_be_quantized(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", **MOE)
    plain: dict[str, Tensor] = {}

    def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = _as_switch(tensors)
        for name in [name for name in tensors if ".switch_mlp." in name]:
            packed, scales, biases, values = _quantized(tensors.pop(name))
            path = name.removesuffix(".weight")
            plain[name] = values
            tensors |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
        return tensors

    _rewrite(tmp_path, quantize)
    _reconfigure(tmp_path, lambda c: {**c, "quantization": {"group_size": 32, "bits": 4}})
    answer = _answer(tmp_path)
    _rewrite(
        tmp_path,
        lambda tensors: {
            name: plain.get(name, tensor)
            for name, tensor in tensors.items()
            if not (".switch_mlp." in name and name.endswith(("scales", "biases")))
        },
    )
    _reconfigure(tmp_path, lambda c: {k: v for k, v in c.items() if k != "quantization"})
    assert _answer(tmp_path) == answer


def test_layers_that_predict_further_tokens_are_left(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3", **LATENT)
    expected = _answer(tmp_path)
    extra = {f"model.layers.3.{name}": torch.ones(3, 2) for name in ("eh_proj.weight", "x.weight")}
    _rewrite(tmp_path, lambda tensors: {**tensors, **extra})
    _reconfigure(tmp_path, lambda config: {**config, "num_nextn_predict_layers": 1})
    assert _answer(tmp_path) == expected
    _reconfigure(tmp_path, lambda config: {**config, "num_nextn_predict_layers": 0})
    with pytest.raises(UnsupportedBundle, match=r"model\.layers\.3\.eh_proj"):
        load_tiny(tmp_path)


def test_kimi_is_deepseek_by_another_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3", **LATENT)
    expected = _answer(tmp_path)
    _reconfigure(tmp_path, lambda config: {**config, "model_type": "kimi_k2"})
    assert _answer(tmp_path) == expected


def test_a_latent_layer_keeps_one_row_a_token(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3", **LATENT)
    (group,) = group_layers(load_tiny(tmp_path).layers_topology)
    assert group.topology.tag == "mla(32/40+0)"
    assert group.layers == (0, 1, 2)


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_the_text_of_a_multimodal_gemma_is_the_text_model(tmp_path: Path, prefix: str) -> None:
    save_tiny(tmp_path, "gemma3_text", **GEMMA)
    expected = _answer(tmp_path)

    def nest(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        nested = {f"{prefix}{name.removeprefix('model')}": t for name, t in tensors.items()}
        eyes = {
            "vision_tower.x.weight": torch.ones(2),
            "model.multi_modal_projector.y": torch.ones(2),
        }
        return {**nested, **eyes}

    _rewrite(tmp_path, nest)
    _reconfigure(tmp_path, lambda config: {"model_type": "gemma3", "text_config": config})
    assert _answer(tmp_path) == expected


def test_older_spellings_of_gemmas_rotary_and_pattern_are_read(tmp_path: Path) -> None:
    save_tiny(
        tmp_path,
        "gemma3_text",
        **GEMMA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=5e5),
            sliding_attention=dict(rope_type="default", rope_theta=2e4),
        ),
    )
    expected = _answer(tmp_path)

    def older(config: dict[str, Any]) -> dict[str, Any]:
        for name in ("rope_parameters", "layer_types"):
            del config[name]
        return {
            **config,
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        }

    _reconfigure(tmp_path, older)
    assert _answer(tmp_path) == expected


def test_a_gemma_config_may_leave_usual_values_out() -> None:
    config = Gemma3Config.from_dict({"text_config": {"num_hidden_layers": 34, "hidden_size": 2560}})
    assert (config.num_attention_heads, config.head_dim, config.vocab_size) == (8, 256, 262_208)
    assert config.windows[4:7] == (4096, None, 4096)
    assert config.ropes == ((1e6, None), (1e4, None))


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"layer_types": ["odd"]}, "layer_types"),
        ("gemma3_text", {"hidden_activation": "relu2"}, "relu2"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("glm4", {"num_attention_heads": None}, "num_attention_heads"),
        ("glm4_moe", {"n_routed_experts": 6, "n_group": 4}, "n_group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_field(
    tmp_path: Path, family: str, change: dict[str, Any], named: str
) -> None:
    settings = {"gemma3_text": GEMMA, "qwen3_moe": MOE, "glm4": {"pad_token_id": 0}}
    settings["glm4_moe"] = dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    )
    save_tiny(tmp_path, family, **settings.get(family, LATENT))
    _reconfigure(tmp_path, lambda config: {**config, **change})
    with pytest.raises(UnsupportedBundle, match=named):
        load_tiny(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", **MOE)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    _rewrite(tmp_path, lambda tensors: {k: t for k, t in tensors.items() if k != name})
    with pytest.raises(IncompleteBundle, match=r"experts\.2\.up_proj"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("module", sorted(set(FAMILIES.values())))
def test_every_registered_family_has_its_file(module: str) -> None:
    assert callable(import_module(f"osaurus.models.{module}").load)

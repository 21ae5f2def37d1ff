"""Claims about how LFM2, Qwen3-Next and Qwen3.5 are read from bundles: other spellings of one
network are the same network, what is knowingly left is left, and what cannot be served names
its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from osaurus.bundle.weights import SafetensorsSource
from osaurus.errors import UnsupportedBundle
from osaurus.models.drafts import draft_tensors, num_draft_layers
from osaurus.models.lfm2 import Lfm2Config
from osaurus.models.qwen3_next import Qwen3NextConfig
from osaurus.topology.summary import observed
from synthetic import Rig
from tiny import BASE, load_tiny, save_tiny

LFM2: dict[str, Any] = dict(family="lfm2", pad_token_id=0, full_attn_idxs=[1])
LFM2_MOE: dict[str, Any] = dict(
    family="lfm2_moe",
    pad_token_id=0,
    layer_types=["conv", "full_attention", "conv"],
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    num_dense_layers=1,
)
DELTA: dict[str, Any] = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear")],
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
NEXT: dict[str, Any] = dict(family="qwen3_next", **DELTA, **EXPERTS)
DENSE: dict[str, Any] = dict(family="qwen3_5_text", **DELTA)
#: Norms whose stored weight is the distance from one; that of the delta layers is whole.
ADD_ONE = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")

Tensors = dict[str, Tensor]


def _rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _reconfigure(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _logits(folder: Path) -> Tensor:
    rig = Rig(load_tiny(folder), num_slots=1)
    return rig.prefill(rig.open(), list(range(3, 40)))


def _mlx_taps(tensors: Tensors) -> Tensors:
    taps = ("conv1d.weight", "conv.conv.weight")
    return {n: t.transpose(1, 2) if n.endswith(taps) else t for n, t in tensors.items()}


def _stacked(tensors: Tensors, path: str, names: dict[str, str]) -> Tensors:
    """MLX's form of the experts under `path`, {stored: MLX's} names."""
    for stored, mlx in names.items():
        one = [tensors.pop(f"{path}.experts.{e}.{stored}.weight") for e in range(4)]
        tensors[f"{path}.switch_mlp.{mlx}.weight"] = torch.stack(one)
    return tensors


def _mlx_next(tensors: Tensors) -> Tensors:
    for layer in range(3):
        names = {f"{part}_proj": f"{part}_proj" for part in ("gate", "up", "down")}
        tensors = _stacked(tensors, f"model.layers.{layer}.mlp", names)
    return _mlx_dense(tensors)


def _mlx_dense(tensors: Tensors) -> Tensors:
    tensors = _mlx_taps(tensors)
    return {name: t + 1 if name.endswith(ADD_ONE) else t for name, t in tensors.items()}


def _mlx_lfm2_moe(tensors: Tensors) -> Tensors:
    usual = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for layer in (1, 2):
        tensors = _stacked(tensors, f"model.layers.{layer}.feed_forward", usual)
    for stored, mlx in usual.items():
        path = "model.layers.0.feed_forward"
        tensors[f"{path}.{mlx}.weight"] = tensors.pop(f"{path}.{stored}.weight")
    return _mlx_taps(tensors)


@pytest.mark.parametrize(
    ("settings", "change"),
    [(LFM2, _mlx_taps), (LFM2_MOE, _mlx_lfm2_moe), (NEXT, _mlx_next), (DENSE, _mlx_dense)],
    ids=["lfm2", "lfm2_moe", "qwen3_next", "qwen3_5"],
)
def test_mlx_spells_the_same_network_otherwise(
    tmp_path: Path, settings: Any, change: Callable[[Tensors], Tensors]
) -> None:
    save_tiny(tmp_path, **settings)
    expected = _logits(tmp_path)
    _rewrite(tmp_path, change)
    assert torch.allclose(_logits(tmp_path), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.language_model", "lm_head"), ("language_model.model", "language_model.lm_head")],
)
def test_the_text_of_a_multimodal_bundle_is_the_text_model(
    tmp_path: Path, prefix: str, head: str
) -> None:
    save_tiny(tmp_path, **DENSE)
    expected = _logits(tmp_path)

    def nest(tensors: Tensors) -> Tensors:
        nested = {
            name.replace("lm_head", head)
            if name.startswith("lm_head")
            else f"{prefix}{name.removeprefix('model')}": tensor
            for name, tensor in tensors.items()
        }
        eyes = {"model.visual.x.weight": torch.ones(2), "vision_tower.x.weight": torch.ones(2)}
        return {**nested, **eyes, "mtp.fc.weight": torch.ones(2)}

    _rewrite(tmp_path, nest)
    _reconfigure(tmp_path, lambda config: {"model_type": "qwen3_5", "text_config": config})
    assert torch.equal(_logits(tmp_path), expected)


def test_layers_that_predict_further_tokens_are_left(tmp_path: Path) -> None:
    save_tiny(tmp_path, **NEXT)
    expected = _logits(tmp_path)
    extra = {name: torch.ones(2) for name in ("mtp.fc.weight", "mtp.layers.0.mlp.x.weight")}
    _rewrite(tmp_path, lambda tensors: {**tensors, **extra})
    assert torch.equal(_logits(tmp_path), expected)
    _rewrite(tmp_path, lambda tensors: {**tensors, "other.weight": torch.ones(2)})
    with pytest.raises(UnsupportedBundle, match=r"other\.weight"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("config", "stored", "own"),
    [
        ({}, "mtp.layers.0.mlp.x.weight", "layers.0.mlp.x.weight"),
        ({}, "model.language_model.mtp.fc.weight", "fc.weight"),
        (
            {"num_hidden_layers": 3, "num_nextn_predict_layers": 2},
            "model.layers.4.eh_proj.weight",
            "layers.1.eh_proj.weight",
        ),
        (
            {"text_config": {"num_hidden_layers": 3, "mtp_num_hidden_layers": 1}},
            "model.layers.3.enorm.weight",
            "layers.0.enorm.weight",
        ),
        ({"num_hidden_layers": 3}, "model.layers.3.enorm.weight", None),
        ({"num_hidden_layers": 3, "num_mtp_layers": 1}, "model.layers.2.x.weight", None),
    ],
)
def test_draft_layers_are_known_under_one_spelling(
    config: dict[str, Any], stored: str, own: str | None
) -> None:
    found = draft_tensors(config, [stored, "lm_head.weight"])
    assert found == ({own: stored} if own else {})
    assert num_draft_layers(found) == (1 if own and own.startswith("layers.") else 0)


def test_draft_weights_stay_reachable_and_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, **NEXT)
    extra = {"mtp.fc.weight": torch.arange(4.0), "mtp.layers.0.mlp.x.weight": torch.ones(2)}
    _rewrite(tmp_path, lambda tensors: {**tensors, **extra})
    read: list[str] = []
    original = SafetensorsSource.get

    def get(self: SafetensorsSource, name: str) -> Any:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsSource, "get", get)
    load_tiny(tmp_path)
    assert not [name for name in read if name.startswith("mtp.")]
    config = json.loads((tmp_path / "config.json").read_text())
    source = SafetensorsSource(tmp_path)
    found = draft_tensors(config, source.names())
    assert sorted(found) == ["fc.weight", "layers.0.mlp.x.weight"]
    stored = source.get(found["fc.weight"])
    assert torch.equal(stored.data.view(torch.float32), torch.arange(4.0))


def test_every_layer_says_what_it_keeps(tmp_path: Path) -> None:
    save_tiny(tmp_path, **NEXT)
    topology = load_tiny(tmp_path).layers_topology
    assert observed(topology) == {"gated_delta": 2, "full_attention": 1}
    assert topology[0].tag == ("gated_delta(conv[64x3],state[4x8x8],waiting[15x56],num_waiting[1])")
    save_tiny(tmp_path, **LFM2)
    topology = load_tiny(tmp_path).layers_topology
    assert [layer.kind for layer in topology] == ["short_conv", "full_attention", "short_conv"]
    assert topology[0].tag == "short_conv(conv[96x2])"


def _lfm2(**changes: Any) -> Lfm2Config:
    return Lfm2Config.from_dict({**BASE, "model_type": "lfm2", **changes})


def test_the_width_of_lfm2s_mlp_follows_its_rule() -> None:
    assert _lfm2(intermediate_size=6656).intermediate_size == 4608
    assert _lfm2(block_ff_dim=12288).intermediate_size == 8192
    assert _lfm2(block_ff_dim=12289, block_multiple_of=1).intermediate_size == 8192
    assert _lfm2(block_ff_dim=3000, block_ffn_dim_multiplier=1.3).intermediate_size == 2816
    assert _lfm2(block_ff_dim=3000, block_ffn_dim_multiplier=None).intermediate_size == 2000
    assert _lfm2(block_ff_dim=3000, block_auto_adjust_ff_dim=False).intermediate_size == 3000


def test_older_spellings_of_lfm2_are_read() -> None:
    config = _lfm2(full_attn_idxs=[0, 2], theta=5e5, tie_embedding=False)
    assert config.attends == (True, False, True)
    assert (config.rope_theta, config.tie_word_embeddings) == (5e5, False)
    assert _lfm2(layer_types=["conv", "conv", "full_attention"]).attends == (False, False, True)


def test_a_qwen_config_may_leave_usual_values_out() -> None:
    bare = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    bare |= {"num_hidden_layers": 8, **EXPERTS}
    config = Qwen3NextConfig.from_dict({"text_config": bare, "tie_word_embeddings": True})
    assert config.attends == (False, False, False, True) * 2
    assert (config.head_dim, config.rotary_dim, config.delta.channels) == (256, 64, 8192)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("settings", "change", "named"),
    [
        (LFM2, {"layer_types": ["odd"] * 3}, "layer_types"),
        (LFM2, {"conv_L_cache": 0}, "conv_L_cache"),
        (LFM2, {"intermediate_size": None}, "intermediate_size"),
        (LFM2_MOE, {"num_experts": None}, "num_experts"),
        (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        (NEXT, {"layer_types": ["full_attention"]}, "layer_types"),
        (NEXT, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        (NEXT, {"linear_conv_kernel_dim": 5}, r"conv1d\.weight.*4"),
        (DENSE, {"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_field(
    tmp_path: Path, settings: Any, change: dict[str, Any], named: str
) -> None:
    save_tiny(tmp_path, **settings)
    _reconfigure(tmp_path, lambda config: {**config, **change})
    with pytest.raises(UnsupportedBundle, match=named):
        load_tiny(tmp_path)

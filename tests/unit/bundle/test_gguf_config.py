"""GGUF metadata as a published config, and tensor names in Hugging Face spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from osaurus.bundle.gguf_config import config_from_gguf, generation_config_from_gguf
from osaurus.bundle.gguf_names import ARCHITECTURES, hf_name, missing_tensors
from osaurus.bundle.gguf_reader import read_gguf
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle
from unit.bundle.made import gguf_metadata, gguf_tensors, write_gguf


def config_of(path: Path, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    tensors = changes.pop("tensors", None)
    metadata = gguf_metadata(architecture, **changes)
    write_gguf(path, metadata, tensors, architecture=architecture)
    return config_from_gguf(read_gguf(path))


def test_the_default_model_has_the_config_that_was_published_for_it(
    default_model_path: Path,
) -> None:
    config = config_from_gguf(read_gguf(default_model_path))
    assert config == {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_interleaved": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


@pytest.mark.parametrize(
    ("architecture", "interleaved", "bias"),
    [("llama", True, False), ("qwen2", False, True), ("qwen3", False, False)],
)
def test_each_architecture_says_how_its_rotary_pairs_lie(
    tmp_path: Path, architecture: str, interleaved: bool, bias: bool
) -> None:
    tensors = gguf_tensors(architecture)
    config = config_of(tmp_path / "x.gguf", architecture, tensors=tensors)
    assert config["model_type"] == architecture
    assert config["rope_interleaved"] is interleaved
    assert config["attention_bias"] is bias


def test_gemma3_says_what_its_metadata_leaves_to_the_reader(tmp_path: Path) -> None:
    config = config_of(tmp_path / "x.gguf", "gemma3", arch__attention__sliding_window=128)
    assert config["model_type"] == "gemma3_text"
    assert config["norms_include_one"]
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 16
    assert config["rope_local_base_freq"] == 10000.0
    assert config["sliding_window_pattern"] == 6


def test_gemma3_27b_scales_queries_by_its_width(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "x.gguf", "gemma3", arch__block_count=62, arch__attention__key_length=32
    )
    assert config["query_pre_attn_scalar"] == 64 // 4


def test_gemma3s_layers_may_be_listed_and_its_local_base_stored(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "x.gguf",
        "gemma3",
        arch__attention__sliding_window_pattern=[True, False],
        arch__rope__freq_base_swa=20000.0,
        arch__final_logit_softcapping=30.0,
    )
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["rope_local_base_freq"] == 20000.0
    assert config["final_logit_softcapping"] == 30.0


def test_qwen3s_experts_are_counted(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "x.gguf",
        "qwen3moe",
        arch__expert_count=8,
        arch__expert_used_count=2,
        arch__expert_feed_forward_length=48,
    )
    assert config["model_type"] == "qwen3_moe"
    counts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    assert [config[name] for name in counts] == [8, 2, 48, True]


def test_frequencies_by_prompt_length_are_refused(tmp_path: Path) -> None:
    tensors = {**gguf_tensors(), "rope_factors_long.weight": np.ones(8, np.float32)}
    with pytest.raises(UnsupportedBundle, match="longrope"):
        config_of(tmp_path / "x.gguf", "phi3", tensors=tensors)


def test_an_own_output_matrix_means_untied(tmp_path: Path) -> None:
    config = config_of(tmp_path / "x.gguf", tensors=gguf_tensors(tied=False))
    assert config["tie_word_embeddings"] is False


def test_a_declared_head_size_wins_over_the_quotient(tmp_path: Path) -> None:
    assert config_of(tmp_path / "x.gguf", arch__attention__key_length=32)["head_dim"] == 32


def test_a_partial_rotary_size_becomes_a_factor(tmp_path: Path) -> None:
    config = config_of(tmp_path / "x.gguf", arch__rope__dimension_count=8)
    assert config["partial_rotary_factor"] == 0.5


def test_a_sliding_window_is_kept(tmp_path: Path) -> None:
    config = config_of(tmp_path / "x.gguf", arch__attention__sliding_window=128)
    assert config["sliding_window"] == 128


def test_a_value_given_for_each_layer_counts_when_all_are_equal(tmp_path: Path) -> None:
    config = config_of(tmp_path / "x.gguf", arch__attention__head_count_kv=[2, 2])
    assert config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedBundle, match=r"head_count_kv differs between layers"):
        config_of(tmp_path / "y.gguf", arch__attention__head_count_kv=[2, 1])


def test_float32_rounding_of_the_converter_is_undone(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "x.gguf",
        arch__attention__layer_norm_rms_epsilon=1e-06,
        arch__rope__freq_base=500000.0,
    )
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-06, 500000.0)


def test_yarn_scaling_gets_its_published_names(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "x.gguf",
        arch__rope__scaling__type="yarn",
        arch__rope__scaling__factor=4.0,
        arch__rope__scaling__original_context_length=128,
    )
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 500000.0), (32.0, 500000.0)])
def test_llama3_rotary_divisors_give_their_parameters_back(
    tmp_path: Path, factor: float, theta: float
) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    published = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](published, device="cpu")
    plain = theta ** -(np.arange(0, 128, 2, dtype=np.float64) / 128)
    divisors = (plain / frequencies.double().numpy()).astype(np.float32)
    config = config_of(
        tmp_path / "x.gguf",
        arch__attention__key_length=128,
        arch__rope__freq_base=theta,
        tensors={**gguf_tensors(), "rope_freqs.weight": divisors},
    )
    assert config["rope_scaling"] == parameters


def test_rotary_divisors_of_another_kind_are_refused(tmp_path: Path) -> None:
    odd = np.linspace(1, 7, 8).astype(np.float32)
    with pytest.raises(UnsupportedBundle, match="rotary divisors of an unknown kind"):
        config_of(tmp_path / "x.gguf", tensors={**gguf_tensors(), "rope_freqs.weight": odd})


def test_rotary_divisors_of_one_mean_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    config = config_of(tmp_path / "x.gguf", tensors={**gguf_tensors(), "rope_freqs.weight": ones})
    assert "rope_scaling" not in config


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"arch__expert_count": 8}, UnsupportedBundle, "mixture of experts"),
        ({"arch__attention__value_length": 64}, UnsupportedBundle, "values of 64"),
        ({"arch__rope__scaling__type": "longrope"}, UnsupportedBundle, "'longrope'"),
        ({"arch__rope__scaling__type": "yarn"}, IncompleteBundle, "without its factor"),
        ({"arch__block_count": None}, IncompleteBundle, "lacks llama.block_count"),
        ({"arch__context_length": "many"}, BundleError, "not a count"),
        ({"arch__rope__freq_base": "high"}, BundleError, "not a number"),
        ({"arch__attention__layer_norm_rms_epsilon": None}, IncompleteBundle, "epsilon"),
    ],
)
def test_what_no_config_can_say_is_refused_with_the_key(
    tmp_path: Path, changes: dict[str, Any], kind: type[BundleError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        config_of(tmp_path / "x.gguf", **changes)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", gguf_metadata("gpt9"), architecture="gpt9")
    with pytest.raises(UnsupportedBundle, match=r"'gpt9' .*llama, .*qwen2, qwen3"):
        config_from_gguf(read_gguf(tmp_path / "x.gguf"))


def test_sampling_advice_in_the_metadata_becomes_a_generation_config(tmp_path: Path) -> None:
    metadata = gguf_metadata(general__sampling__temp=0.7, general__sampling__top_k=20)
    write_gguf(tmp_path / "x.gguf", metadata)
    found = generation_config_from_gguf(read_gguf(tmp_path / "x.gguf"))
    assert found == {"eos_token_id": 2, "temperature": 0.7, "top_k": 20}


def test_names_are_translated_by_table() -> None:
    qwen3 = ARCHITECTURES["qwen3"]
    assert hf_name(qwen3, "blk.11.attn_q_norm.weight") == "model.layers.11.self_attn.q_norm.weight"
    assert hf_name(qwen3, "blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert hf_name(qwen3, "output.weight") == "lm_head.weight"
    assert hf_name(qwen3, "rope_freqs.weight") is None
    for unknown in ("blk.0.ffn_gate_exps.weight", "mystery.weight", "blk.0.attn_q.scale"):
        with pytest.raises(KeyError):
            hf_name(qwen3, unknown)


def test_weights_that_a_whole_model_has_are_missed_by_name() -> None:
    present = set(gguf_tensors("qwen3")) - {"blk.1.attn_k_norm.weight", "output_norm.weight"}
    assert missing_tensors(ARCHITECTURES["qwen3"], 2, present) == [
        "output_norm.weight",
        "blk.1.attn_k_norm.weight",
    ]

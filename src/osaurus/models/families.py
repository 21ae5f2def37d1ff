"""Which file serves which `model_type`: a new family is one file and one line here. No torch."""

from __future__ import annotations

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
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "smollm3": "smollm3",
    "olmo2": "olmo3",
    "olmo3": "olmo3",
    "phi3": "phi3",
    "ernie4_5": "ernie4_5",
    "cohere2": "cohere2",
}

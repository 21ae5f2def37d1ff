"""Claims, on a CUDA device: logits equal transformers' in float32; requests together get the
tokens they get alone; quantized weights compute there without a packed kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osaurus.engine.core import BatchEngine
from osaurus.kernels.token_mask import best_allowed, keep_allowed
from osaurus.quant import gguf as blocks
from osaurus.quant.linear import UnpackedLinear, quantized_linear
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama"),
    "mistral window": dict(family="mistral", head_dim=16, sliding_window=40),
    "qwen3": dict(family="qwen3", head_dim=16),
    "lfm2": dict(family="lfm2", pad_token_id=0, full_attn_idxs=[1]),
    "qwen3_next": dict(
        family="qwen3_next",
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear")],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "gemma3": dict(
        family="gemma3_text",
        head_dim=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_moe": dict(
        family="qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "glm4_moe": dict(
        family="glm4_moe",
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        use_qk_norm=True,
    ),
    "deepseek_v3": dict(
        family="deepseek_v3",
        num_key_value_heads=6,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "smollm3": dict(family="smollm3", no_rope_layers=[1, 0, 1], pad_token_id=0),
    "olmo3": dict(
        family="olmo3",
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": dict(family="phi3", pad_token_id=0),
    "ernie4_5": dict(family="ernie4_5", head_dim=16),
    "cohere2": dict(family="cohere2", sliding_window=24, pad_token_id=0),
}
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((40, 1, 2, 77, 130, 16, 17, 33))]


def _engine(folder: Path, mode: Any) -> BatchEngine:
    return BatchEngine(
        load_tiny(folder, mode, "cuda"),
        EngineConfig(kv_block_tokens=16, prefill_chunk_tokens=64),
        token_bytes=TokenText().token_bytes,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = save_tiny(tmp_path, **FAMILIES[family]).cuda()
    engine = _engine(tmp_path, "float32")
    streams = [
        engine.generate(ask(f"r{i}", prompt, max_tokens=24))[0] for i, prompt in enumerate(PROMPTS)
    ]
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        tokens = tokens_of(list(stream))
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens], device="cuda")).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    engine.shutdown()
    engine.check()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_requests_together_get_the_tokens_they_get_alone(
    mode: str, family: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, **FAMILIES[family])
    kinds = [dict(temperature=t, seed=i, max_tokens=20) for i, t in enumerate([0.0, 1.0] * 4)]
    alone = []
    for prompt, kind in zip(PROMPTS, kinds, strict=True):
        engine = _engine(tmp_path, mode)
        alone.append(tokens_of(list(engine.generate(ask("r", prompt, **kind))[0])))
        engine.shutdown()
    engine = _engine(tmp_path, mode)
    streams = [
        engine.generate(ask(f"r{i}", prompt, **kind))[0]
        for i, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    events = [list(stream) for stream in streams]
    assert [tokens_of(e) for e in events] == alone
    assert all(info_of(e).error is None for e in events)
    engine.shutdown()
    assert engine.pool.used_bytes == 0


def test_quantized_weights_compute_on_the_device() -> None:
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (64, 8 * 20), dtype=np.uint8)
    raw.reshape(64, 8, 20)[:, :, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    weight = blocks.decode("Q4_1", torch.from_numpy(raw).flatten().cuda(), (64, 256))
    linear = quantized_linear(weight)
    assert isinstance(linear, UnpackedLinear)
    x = torch.randn(5, 256, device="cuda").bfloat16()
    wanted = x.float() @ weight.dequantize(torch.float32).t()
    assert (linear(x, 5).float() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.parametrize("vocab", [1, 31, 33, 1000, 49152])
def test_a_packed_mask_forbids_the_same_tokens_as_on_the_host(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    row = torch.randn(vocab)
    for density in (0.02, 0.5, 0.98):
        flags = rng.random(32 * (vocab // 32 + 1)) < density
        flags[rng.integers(vocab)] = True
        mask = np.packbits(flags, bitorder="little").view(np.int32)
        wanted = keep_allowed(row, mask)
        assert torch.equal(keep_allowed(row.cuda(), mask).cpu(), wanted)
        assert best_allowed(row.cuda(), mask) == int(wanted.argmax())

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


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_next"])
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

"""Claims about every native family that keeps nothing but keys and values, on small random models.

float32: greedy tokens and logits are those of transformers, alone, in company, with prompts
cut at odd places, and resumed from a prefix. Shipped mode: a request's logits are the same
bits alone, in company and however its prompt was cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine import core
from osaurus.engine.core import BatchEngine
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

#: family and what its config changes; several of a kind where flags change the network.
VARIANTS: dict[str, dict[str, Any]] = {
    # What flags and rotary scalings change in this family: `test_llama_family.py`.
    "llama": dict(family="llama"),
    "mistral window": dict(family="mistral", head_dim=16, sliding_window=40),
    "qwen2 window": dict(
        family="qwen2", use_sliding_window=True, sliding_window=33, max_window_layers=1
    ),
    "qwen3": dict(family="qwen3", head_dim=16),
    "gemma3": dict(
        family="gemma3_text",
        head_dim=32,
        num_hidden_layers=4,
        sliding_window=24,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")],
        query_pre_attn_scalar=20,
    ),
    "gemma3 scaled": dict(
        family="gemma3_text",
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        ),
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
    ),
    "qwen3_moe": dict(
        family="qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "qwen3_moe mixed": dict(
        family="qwen3_moe",
        head_dim=32,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        use_sliding_window=True,
        sliding_window=40,
    ),
    "glm4": dict(family="glm4", head_dim=16, pad_token_id=0),
    "glm": dict(family="glm", head_dim=32, pad_token_id=0, attention_bias=True),
    "glm4_moe": dict(
        family="glm4_moe",
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "glm4_moe plain": dict(
        family="glm4_moe",
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=2,
        first_k_dense_replace=2,
        norm_topk_prob=False,
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
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=8.0,
            original_max_position_embeddings=64,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=0.8,
        ),
    ),
    "deepseek_v3 plain": dict(
        family="deepseek_v3",
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        rope_interleave=False,
        attention_bias=True,
    ),
    "smollm3": dict(family="smollm3", no_rope_layers=[1, 0, 1], pad_token_id=0),
    "smollm3 window": dict(
        family="smollm3",
        pad_token_id=0,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=24,
        attention_bias=True,
        mlp_bias=False,
        tie_word_embeddings=False,
    ),
    "olmo2": dict(family="olmo2"),
    "olmo3": dict(
        family="olmo3",
        sliding_window=24,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
        rope_parameters=dict(
            full_attention=dict(
                rope_type="yarn",
                rope_theta=500000.0,
                factor=8.0,
                original_max_position_embeddings=64,
                attention_factor=1.2,
            ),
            sliding_attention=dict(rope_type="default", rope_theta=500000.0),
        ),
    ),
    "phi3": dict(family="phi3", pad_token_id=0, sliding_window=40),
    "phi3 partial": dict(
        family="phi3",
        pad_token_id=0,
        hidden_size=192,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75),
    ),
    "ernie4_5": dict(family="ernie4_5", head_dim=32, use_bias=True),
    "cohere2": dict(
        family="cohere2",
        sliding_window=24,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
        logit_scale=0.25,
        pad_token_id=0,
    ),
}

LENGTHS = (70, 33, 1, 49)
COUNT = 32


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Any]:
    """A folder and the transformers model that wrote it."""
    folder = tmp_path_factory.mktemp("family")
    return folder, save_tiny(folder, **VARIANTS[request.param])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The logits of every sampled row, by the request's seed."""
    kept: dict[str, list[torch.Tensor]] = {}
    original = core.sample_rows

    def spy(logits: torch.Tensor, samplers: Any, *rest: Any) -> Any:
        for sampler, row in zip(samplers, logits, strict=True):
            kept.setdefault(str(sampler.seed), []).append(row.clone())
        return original(logits, samplers, *rest)

    monkeypatch.setattr(core, "sample_rows", spy)
    return kept


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in LENGTHS]


def _engine(model: Any, chunk: int) -> BatchEngine:
    return BatchEngine(
        model,
        EngineConfig(
            kv_block_tokens=8,
            prefill_chunk_tokens=chunk,
            max_batch_size=4,
            kv_budget_bytes=1 << 25,
            cache=CacheConfig(),
        ),
        token_bytes=TokenText().token_bytes,
        start=False,
    )


def _run(engine: BatchEngine, prompts: dict[int, list[int]]) -> dict[int, Any]:
    """Answers by seed: (tokens, info) of greedy requests that run together."""
    streams = {
        seed: engine.generate(ask(f"r{seed}", prompt, max_tokens=COUNT, seed=seed))[0]
        for seed, prompt in prompts.items()
    }
    while not all(stream._mailbox.completed for stream in streams.values()):  # type: ignore[attr-defined]
        engine.step()
        engine.check()
    events = {seed: list(stream) for seed, stream in streams.items()}
    return {seed: (tokens_of(found), info_of(found)) for seed, found in events.items()}


def _agrees(reference: Any, prompt: list[int], tokens: list[int], got: list[Any]) -> None:
    """Teacher forcing on our own tokens: each must be the reference's choice at its place,
    which by induction makes the whole answer its greedy answer."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    expected = logits[len(prompt) - 1 : -1]
    assert len(tokens) == COUNT
    relative = (torch.stack(got) - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(relative.max()) < 1e-3
    assert tokens == expected.argmax(-1).tolist()


def test_float32_answers_are_those_of_transformers(saved: Any, rows: Any) -> None:
    folder, reference = saved
    prompts = _prompts()
    alone = _engine(load_tiny(folder), 512)
    answers = _run(alone, {0: prompts[0]})
    alone.shutdown()
    _agrees(reference, prompts[0], answers[0][0], rows["0"])

    together = _engine(load_tiny(folder), 37)
    answers = _run(together, dict(enumerate(prompts, start=1)))
    for seed, (tokens, _) in answers.items():
        _agrees(reference, prompts[seed - 1], tokens, rows[str(seed)])

    follow_up = prompts[0] + answers[1][0] + [5, 6, 7]
    tokens, info = _run(together, {9: follow_up})[9]
    together.shutdown()
    assert info.cached_prompt_tokens >= 96
    _agrees(reference, follow_up, tokens, rows["9"])


def test_shipped_mode_gives_the_same_bits_in_any_company(saved: Any, rows: Any) -> None:
    folder, _ = saved
    model, prompts = load_tiny(folder, "bfloat16"), _prompts()
    for seed, prompt in enumerate(prompts):
        engine = _engine(model, 512)
        _run(engine, {seed: prompt})
        engine.shutdown()
    for offset, chunk in ((10, 512), (20, 37), (30, 7)):
        engine = _engine(model, chunk)
        _run(engine, {seed + offset: prompt for seed, prompt in enumerate(prompts)})
        engine.shutdown()
        for seed in range(len(prompts)):
            mine, alone = torch.stack(rows[str(seed + offset)]), torch.stack(rows[str(seed)])
            assert torch.equal(mine, alone), (seed, chunk)
    assert torch.isfinite(torch.stack(rows["0"])).all()

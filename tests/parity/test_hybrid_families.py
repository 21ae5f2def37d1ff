"""Claims about the native families whose layers keep state beside attention, on small random
models: LFM2 and Qwen3-Next with their kin.

float32: greedy tokens and logits are those of transformers, alone, in company, with prompts
cut at odd places, resumed from a snapshot and, after a restart, from disk. In both modes a
row's logits are the same bits alone, in company and however its prompt was cut.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine import core
from osaurus.engine.core import BatchEngine
from osaurus.models.loading import ComputeMode
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from synthetic import Rig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

CONV = ["conv", "full_attention", "conv"]
DELTA: dict[str, Any] = dict(
    num_hidden_layers=4,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")],
)
EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
)
#: family and what its config changes; several of a kind where flags change the network.
VARIANTS: dict[str, dict[str, Any]] = {
    "lfm2": dict(family="lfm2", pad_token_id=0, full_attn_idxs=[1]),
    "lfm2 plain": dict(
        family="lfm2",
        pad_token_id=0,
        layer_types=["full_attention", "conv", "conv"],
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2_moe": dict(
        family="lfm2_moe",
        pad_token_id=0,
        layer_types=CONV,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2_moe plain": dict(
        family="lfm2_moe",
        pad_token_id=0,
        layer_types=CONV,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
    ),
    "qwen3_next": dict(family="qwen3_next", **DELTA, **EXPERTS),
    "qwen3_next mixed": dict(
        family="qwen3_next",
        **{**DELTA, "linear_num_value_heads": 2},
        **EXPERTS,
        mlp_only_layers=[2],
        norm_topk_prob=False,
        attention_bias=True,
    ),
    "qwen3_5": dict(family="qwen3_5_text", **DELTA, tie_word_embeddings=True),
    "qwen3_5_moe": dict(family="qwen3_5_moe_text", **DELTA, **EXPERTS),
}
MODES: tuple[ComputeMode, ...] = ("float32", "bfloat16")
LENGTHS = (70, 33, 1, 49)
COUNT = 32


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Any]:
    """A folder and the transformers model that wrote it."""
    folder = tmp_path_factory.mktemp("family")
    reference = save_tiny(folder, **VARIANTS[request.param])
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("A_log"):  # as it is drawn, a state lasts for a token or two
                parameter.sub_(4.0)
    reference.save_pretrained(folder)
    return folder, reference


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[torch.Tensor]]:
    """The logits of every sampled row, by the request's seed."""
    kept: dict[int, list[torch.Tensor]] = {}
    original = core.sample_rows

    def spy(logits: torch.Tensor, samplers: Any, *rest: Any) -> Any:
        for sampler, row in zip(samplers, logits, strict=True):
            kept.setdefault(sampler.seed, []).append(row.clone())
        return original(logits, samplers, *rest)

    monkeypatch.setattr(core, "sample_rows", spy)
    return kept


def _prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(3, 320) for i in range(length)]


def _engine(model: Any, chunk: int, disk_dir: Path | None = None) -> BatchEngine:
    return BatchEngine(
        model,
        EngineConfig(
            kv_block_tokens=8,
            prefill_chunk_tokens=chunk,
            max_batch_size=4,
            kv_budget_bytes=1 << 25,
            cache=CacheConfig(disk_dir=disk_dir, snapshot_interval=24),
        ),
        token_bytes=TokenText().token_bytes,
        identity="tiny@1",
        start=False,
    )


def _run(engine: BatchEngine, prompts: dict[int, list[int]], count: int = COUNT) -> dict[int, Any]:
    """Answers by seed: (tokens, info) of greedy requests that run together."""
    streams = {
        seed: engine.generate(ask(f"r{seed}", prompt, max_tokens=count, seed=seed))[0]
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


def test_float32_answers_are_those_of_transformers(saved: Any, rows: Any, tmp_path: Path) -> None:
    folder, reference = saved
    prompts = {seed: _prompt(length, seed) for seed, length in enumerate(LENGTHS, start=1)}
    alone = _engine(load_tiny(folder), 512)
    answers = _run(alone, {1: prompts[1]})
    alone.shutdown()
    _agrees(reference, prompts[1], answers[1][0], rows.pop(1))

    together = _engine(load_tiny(folder), 37, tmp_path)
    answers = _run(together, prompts)
    for seed, (tokens, _) in answers.items():
        _agrees(reference, prompts[seed], tokens, rows[seed])

    follow_up = prompts[1] + answers[1][0] + [5, 6, 7]
    tokens, info = _run(together, {9: follow_up})[9]
    together.shutdown()
    assert info.cached_prompt_tokens == 64
    assert info.cache_detail == "paged"
    _agrees(reference, follow_up, tokens, rows[9])

    restarted = _engine(load_tiny(folder), 512, tmp_path)
    again, info = _run(restarted, {10: follow_up})[10]
    restarted.shutdown()
    assert info.cache_detail == "disk"
    assert info.cached_prompt_tokens >= 96
    assert again == tokens
    assert torch.equal(torch.stack(rows[10]), torch.stack(rows[9])), "to the bit"


@pytest.mark.parametrize("mode", MODES)
def test_how_a_prompt_is_cut_changes_no_bit(saved: Any, mode: ComputeMode) -> None:
    rig, draw = Rig(load_tiny(saved[0], mode)), random.Random(mode)
    tokens = _prompt(150)
    whole_lane = rig.open()
    whole = rig.prefill(whole_lane, tokens)
    for sizes in ((1, 2, 3, 7), (15, 16, 17, 37), (7,)):
        lane = rig.open()
        parts: list[torch.Tensor] = []
        while lane.num_tokens < len(tokens):
            size = draw.choice(sizes)
            parts.append(rig.prefill(lane, tokens[lane.num_tokens : lane.num_tokens + size]))
        assert torch.equal(torch.cat(parts), whole)
        for layer in rig.states.layers:
            for array in rig.states.layer_view(layer.layer):
                assert torch.equal(array[lane.slot], array[whole_lane.slot])
        rig.close(lane)
    assert len(whole.argmax(-1).unique()) > 20, "the model says something"


@pytest.mark.parametrize("mode", MODES)
def test_answers_have_the_same_bits_in_any_company(
    saved: Any, rows: Any, mode: ComputeMode
) -> None:
    folder, _ = saved
    model = load_tiny(folder, mode)
    prompts = {seed: _prompt(length, seed) for seed, length in enumerate(LENGTHS)}
    for seed, prompt in prompts.items():
        engine = _engine(model, 512)
        _run(engine, {seed: prompt}, 10)
        engine.shutdown()
    for offset, chunk in ((10, 37), (20, 7)):
        engine = _engine(model, chunk)
        _run(engine, {seed + offset: prompt for seed, prompt in prompts.items()}, 10)
        engine.shutdown()
        for seed in prompts:
            mine, alone = torch.stack(rows[seed + offset]), torch.stack(rows[seed])
            assert torch.equal(mine, alone), (seed, chunk)
    assert torch.isfinite(torch.stack(rows[0])).all()

"""Claims about models of the transformers route, by family, on small random weights in float32.

Greedy tokens and logits are those of transformers' own forward and `generate`: alone, in
company, with prompts cut at odd places, and resumed from a prefix. `docs/models.md` is made
from these tests by `scripts/models_table.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from osaurus.engine import core
from osaurus.engine.core import BatchEngine
from osaurus.errors import IncompleteBundle, UnsupportedBundle
from osaurus.models import transformers_weights
from osaurus.models.transformers_own_cache import Count
from osaurus.models.transformers_weights import RoutedLinear
from osaurus.quant.dense import DenseLinear
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from support_table import PAGE, ROOT, page_with_table, record_of
from synthetic import Rig
from tiny import BASE, TokenText, ask, info_of, load_tiny, save_tiny, tokens_of
from transformers_families import MADE, load_routed, outcome

LENGTHS = (70, 33, 1, 49)
COUNT = 32


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, str, Path]:
    """A family, how the route serves it, and a folder with a model of it where it does."""
    folder = tmp_path_factory.mktemp("family")
    return request.param, outcome(folder, request.param), folder


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
            kv_budget_bytes=1 << 27,
            cache=CacheConfig(snapshot_interval=24),
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
        logits = reference(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    expected = logits[len(prompt) - 1 : -1].float()
    assert len(tokens) == COUNT
    relative = (torch.stack(got) - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(relative.max()) < 1e-3
    assert tokens == expected.argmax(-1).tolist()


def _generated(reference: Any, prompt: list[int]) -> list[int]:
    """What transformers' own generate says."""
    with torch.no_grad():
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def test_float32_answers_are_those_of_transformers(
    made: tuple[str, str, Path], rows: Any, record_property: Any
) -> None:
    name, found, folder = made
    version = transformers.__version__
    told = {"family": name, "outcome": found, "transformers": version}
    for key, value in told.items():
        record_property(key, value)
    record = record_of(version)
    if record is not None:
        assert found == record.get(name), "docs/models.md is stale: run scripts/models_table.py"
    if found.startswith("refused"):
        pytest.skip(found)
    reference = save_tiny(folder, **MADE[name])
    # Its other kernels leave caps out that the config asks for.
    reference.set_attn_implementation("eager")

    prompts = _prompts()
    alone = _engine(load_routed(folder), 512)
    answers = _run(alone, {0: prompts[0]})
    alone.shutdown()
    _agrees(reference, prompts[0], answers[0][0], rows["0"])
    assert answers[0][0] == _generated(reference, prompts[0])

    together = _engine(load_routed(folder), 37)
    answers = _run(together, dict(enumerate(prompts, start=1)))
    for seed, (tokens, _) in answers.items():
        _agrees(reference, prompts[seed - 1], tokens, rows[str(seed)])

    follow_up = prompts[0] + answers[1][0] + [5, 6, 7]
    tokens, info = _run(together, {9: follow_up})[9]
    together.shutdown()
    assert info.cached_prompt_tokens >= 64
    _agrees(reference, follow_up, tokens, rows["9"])


def test_shipped_mode_gives_the_same_bits_in_any_company(
    made: tuple[str, str, Path],
) -> None:
    """And, where nothing but attention remembers, however a prompt was cut."""
    name, found, folder = made
    if found.startswith("refused") or "not in bfloat16" in found:
        pytest.skip(found)
    if not (folder / "config.json").exists():
        save_tiny(folder, **MADE[name])
    model, prompts = load_routed(folder, "bfloat16"), [p for p in _prompts() if len(p) > 1]
    alone = torch.cat([_answers(model, [prompt], 512) for prompt in prompts])
    assert torch.equal(alone, _answers(model, prompts, 512))
    if found == "packed":
        assert torch.equal(alone, _answers(model, prompts, 7))


def _answers(model: Any, prompts: list[list[int]], chunk: int) -> torch.Tensor:
    """[prompts, 2, V]: logits of two decoded rows after each prompt but its last token."""
    rig = Rig(model)
    lanes = [rig.open() for _ in prompts]
    for lane, prompt in zip(lanes, prompts, strict=True):
        for first in range(0, len(prompt) - 1, chunk):
            rig.prefill(lane, prompt[first : min(first + chunk, len(prompt) - 1)])
    rows = [[(lane, [p[-1]]) for lane, p in zip(lanes, prompts, strict=True)]]
    rows.append([(lane, [5]) for lane in lanes])
    return torch.stack([rig.decode(step) for step in rows], dim=1)


def test_the_page_of_models_shows_the_records() -> None:
    assert PAGE.read_text() == page_with_table(PAGE.read_text()), "run scripts/models_table.py"


def _of(folder: Path, family: str) -> Any:
    """The reference of a small model that it leaves in `folder`."""
    return save_tiny(folder, **MADE[family])


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Every row's logits, fed as decode rows."""
    rig = Rig(model)
    return rig.decode([(rig.open(), tokens)])


@pytest.mark.parametrize("family", ["Hunyuan MoE", "MiniMax M2", "gpt-oss", "Falcon-H1"])
@pytest.mark.parametrize("on_load", [None, "int4"])
def test_the_shipped_mode_is_close_and_quantizing_makes_it_smaller(
    tmp_path: Path, family: str, on_load: Any
) -> None:
    _of(tmp_path, family)
    exact, shipped = load_routed(tmp_path), load_routed(tmp_path, "bfloat16", on_load=on_load)
    tokens = _prompts()[1]
    one, other = _logits(exact, tokens), _logits(shipped, tokens)
    assert torch.nn.functional.cosine_similarity(one, other).median() > (
        0.98 if on_load is None else 0.8
    )
    for module in shipped.call.network.modules():
        if isinstance(module, RoutedLinear) and module.out_features in (4, 8):
            assert isinstance(module.inner, DenseLinear)  # a router
    share = shipped.nbytes / exact.nbytes
    assert share < (0.52 if on_load is None else 0.45)


@pytest.mark.parametrize(
    "family", ["MiniMax M2", "Hunyuan MoE", "Laguna", "gpt-oss", "Nemotron-H", "Granite hybrid"]
)
def test_experts_are_read_one_at_a_time(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _of(tmp_path, family)
    exact = load_routed(tmp_path)
    monkeypatch.setattr(transformers_weights, "take_apart", None)  # would need whole stacks
    tokens = _prompts()[1]
    assert torch.equal(_logits(load_routed(tmp_path), tokens), _logits(exact, tokens))
    assert load_routed(tmp_path, "bfloat16", on_load="int8").nbytes < 0.55 * exact.nbytes


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("Granite hybrid", "mamba_chunk_size"),
        ("Falcon-H1", "mamba_chunk_size"),
        ("Mamba 2", "chunk_size"),
        ("Nemotron-H", "chunk_size"),
    ],
)
def test_scans_in_shorter_pieces_than_the_config_says_give_the_same_logits(
    tmp_path: Path, family: str, field: str
) -> None:
    reference = save_tiny(tmp_path, **{**MADE[family], field: 256})
    reference.set_attn_implementation("eager")
    model, tokens = load_routed(tmp_path), (_prompts()[0] * 3)[:150]
    mixers = [m for m in model.call.network.modules() if hasattr(m, "ssm_state_size")]
    assert mixers
    assert all(mixer.chunk_size == 64 for mixer in mixers)
    rig = Rig(model)
    lane = rig.open()
    rig.prefill(lane, tokens[:-1])
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(
        rig.decode([(lane, tokens[-1:])])[0], expected.float(), rtol=1e-3, atol=1e-4
    )


def test_gpt_oss_experts_stay_in_mxfp4(tmp_path: Path) -> None:
    _of(tmp_path, "gpt-oss")
    weights = load_file(_file(tmp_path))
    packed = dict(weights)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = weights[name].shape
        shape = (experts, n, k // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape[:3], generator=generator, dtype=torch.uint8)
        # transformers' own decoder gives what its model computes with, [E, K, N].
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: t.contiguous() for name, t in weights.items()}, _file(tmp_path))
    exact = load_routed(tmp_path)
    save_file(packed, _file(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = _prompts()[1]
    assert torch.equal(_logits(load_routed(tmp_path), tokens), _logits(exact, tokens))
    shipped = load_routed(tmp_path, "bfloat16")
    layers = shipped.call.network.model.layers[0].mlp.experts.osaurus_experts
    assert not any(isinstance(linear, DenseLinear) for linear in layers.up)
    likeness = torch.nn.functional.cosine_similarity(
        _logits(shipped, tokens), _logits(exact, tokens)
    )
    assert likeness.median() > 0.98
    save_file(
        {n: t for n, t in packed.items() if not n.endswith("0.mlp.experts.down_proj_scales")},
        _file(tmp_path),
    )
    with pytest.raises(IncompleteBundle, match=r"down_proj\.scales is missing"):
        load_routed(tmp_path)


def test_experts_quantized_one_by_one_are_read_by_the_route(tmp_path: Path) -> None:
    _of(tmp_path, "MiniMax M2")
    weights = load_file(_file(tmp_path))
    names = [name for name in weights if ".experts." in name and name.endswith(".weight")]
    assert names
    packed = dict(weights)
    for name in names:
        scale = weights[name].abs().amax() / 448.0
        packed[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale"] = scale.reshape(1)
        weights[name] = (packed[name].float() * scale).to(torch.bfloat16).float()
    save_file(weights, _file(tmp_path))
    exact = load_routed(tmp_path)
    save_file(packed, _file(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = _prompts()[1]
    assert torch.equal(_logits(load_routed(tmp_path), tokens), _logits(exact, tokens))


def test_names_that_do_not_fit_are_told(tmp_path: Path) -> None:
    _of(tmp_path, "Hunyuan dense")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in weights.items() if n != "model.norm.weight"}, _file(tmp_path))
    with pytest.raises(IncompleteBundle, match=r"1 missing tensors .*: model\.norm\.weight"):
        load_routed(tmp_path)
    save_file({**weights, "model.more.weight": torch.ones(2)}, _file(tmp_path))
    with pytest.raises(UnsupportedBundle, match=r"1 unexpected tensors .*: model\.more\.weight"):
        load_routed(tmp_path)
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        save_file({**weights, name: torch.ones(3)}, _file(tmp_path))
        with pytest.raises(UnsupportedBundle, match=rf"tensor {name} has shape \(3,\)"):
            load_routed(tmp_path)


def _file(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gpt9"}, f"'gpt9' .* transformers {transformers.__version__}"),
        (
            {"model_type": "gpt9", "auto_map": {"AutoConfig": "x.Y"}},
            "code of a bundle is never run",
        ),
        ({"model_type": "vit"}, "'vit' is no causal language model"),
        ({"num_hidden_layers": "three"}, r"config\.json: .*num_hidden_layers"),
    ],
    ids=["unknown", "its own code", "another kind", "a bad field"],
)
def test_configs_that_cannot_run_are_refused_in_one_line(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    _of(tmp_path, "Hunyuan dense")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(UnsupportedBundle, match=said) as caught:
        load_routed(tmp_path)
    assert "\n" not in caught.value.message


def test_attention_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert")
    with pytest.raises(UnsupportedBundle, match="not causal"):
        load_routed(tmp_path)


def test_the_text_of_a_model_that_also_sees_and_hears_is_served(tmp_path: Path) -> None:
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = {name: value for name, value in MADE["Gemma 4"].items() if name != "family"}
    reference = save_tiny(
        tmp_path,
        "gemma4",
        text_config={**BASE, **text},
        vision_config={**small, "num_key_value_heads": 2, "head_dim": 16},
        audio_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    )
    tokens = _prompts()[1]
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    model = load_routed(tmp_path)
    torch.testing.assert_close(_logits(model, tokens), expected, atol=1e-3, rtol=1e-3)
    assert not any("vision" in name for name, _ in model.call.network.named_modules())


def test_a_native_model_never_imports_transformers(tmp_path: Path) -> None:
    _of(tmp_path, "Llama")
    code = (
        "import sys, torch; from pathlib import Path; from tiny import load_tiny\n"
        "from synthetic import Rig; rig = Rig(load_tiny(Path(sys.argv[1])))\n"
        "rig.decode([(rig.open(), [3, 4])]); assert 'transformers' not in sys.modules"
    )
    paths = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_unserved_family_of_ours_goes_by_the_route(tmp_path: Path) -> None:
    _of(tmp_path, "Hunyuan dense")
    assert load_tiny(tmp_path).route == "packed"


@pytest.mark.parametrize(
    ("growth", "k", "values"),
    [("same", 4, [4, 4]), ("window", 4, [0, 4]), ("tokens", 0, [0, 11]), ("runs", 4, [0, 2])],
)
def test_counts_of_a_cache_at_0_and_11_tokens(growth: Any, k: int, values: list[int]) -> None:
    assert [Count(growth, k).at(n) for n in (0, 11)] == values

"""Claims: quantizing while loading keeps within half a step of every weight, both kinds of rows
compute with the same weights, and embedding and head keep 8 bits.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from osaurus.bundle.weights import SafetensorsSource
from osaurus.models.registry import build
from osaurus.quant.linear import grouped_linear
from osaurus.quant.on_load import FORMS, can_quantize, quantize
from osaurus.runtime.load import LoadOptions
from osaurus.types.weights import QuantizeOnLoad
from replay import decode_logits
from tiny import BASE, save_tiny

CHOICES: list[QuantizeOnLoad] = ["int8", "int4"]


def weights(n: int = 96, k: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("choice", CHOICES)
def test_every_weight_is_within_half_a_step(choice: QuantizeOnLoad) -> None:
    weight = weights()
    made = quantize(weight, choice)
    assert (made.bits, made.group_size) == FORMS[choice]
    error = (made.dequantize(torch.float32) - weight).abs().view(96, -1, made.group_size)
    # What bfloat16 takes off the range at its ends comes on top.
    ends = made.scale.float() * (1 << made.bits) * 2**-8
    assert (error <= (made.scale.float() / 2 + ends).unsqueeze(-1)).all()


@pytest.mark.parametrize("choice", CHOICES)
def test_decode_and_prefill_rows_see_the_same_weights(choice: QuantizeOnLoad) -> None:
    made = quantize(weights(n=128), choice)
    layer = grouped_linear(made)
    x = torch.eye(256).bfloat16()
    few, many = layer(x, 256).float(), layer(x, 0).float()
    torch.testing.assert_close(few, many, rtol=2**-7, atol=1e-3 * float(few.abs().max()))


@pytest.mark.parametrize("choice", CHOICES)
def test_groups_of_one_value_and_of_zeros_are_kept(choice: QuantizeOnLoad) -> None:
    weight = torch.zeros(64, 128)
    weight[1] = 0.75
    assert torch.equal(quantize(weight, choice).dequantize(torch.float32), weight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    weight = weights()
    weight[3, 7] = bad
    assert not quantize(weight, "int8").is_finite()


def test_rows_that_are_not_whole_groups_stay() -> None:
    assert can_quantize((5, 128), "int8")
    assert not can_quantize((5, 96), "int8")
    assert can_quantize((5, 96), "int4")


def test_a_model_is_quantized_as_documented(tmp_path: Path) -> None:
    """4 bits for projections, 8 for the embedding that is the head too; logits stay near."""
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4)
    assert BASE["vocab_size"] == 320
    save_tiny(tmp_path, "qwen3", head_dim=32, tie_word_embeddings=True, **sizes)
    config = {**BASE, **sizes, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
    tokens = torch.randint(3, 320, (24,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(choice: QuantizeOnLoad | None, mode: str) -> tuple[torch.Tensor, int]:
        with closing(SafetensorsSource(tmp_path)) as source:
            model = build(config, source, mode, on_load=choice)  # type: ignore[arg-type]
        return decode_logits(model, tokens, 12), model.nbytes

    exact, _ = logits(None, "float32")
    plain, full_bytes = logits(None, "bfloat16")
    for choice, share, bound in (("int8", 0.75, 0.1), ("int4", 0.6, 0.5)):
        shipped, num_bytes = logits(choice, "bfloat16")  # type: ignore[arg-type]
        oracle, _ = logits(choice, "float32")  # type: ignore[arg-type]
        assert num_bytes < share * full_bytes, choice
        assert (oracle - exact).norm() / exact.norm() < bound, choice
        assert (shipped - oracle).norm() < 2 * (plain - exact).norm(), choice


def test_the_choice_parts_what_is_kept_on_disk() -> None:
    from osaurus.runtime.load import _identity

    names = {_identity("m@1", choice) for choice in (None, *CHOICES)}
    assert len(names) == 3
    assert LoadOptions().quantize is None

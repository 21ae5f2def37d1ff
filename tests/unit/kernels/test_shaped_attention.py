"""Claims: capped scores and sinks are what float64 says, in decode and in prefill, with windows
and odd chunks; a decode row's bits do not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch

from osaurus.kernels.paged_attention import (
    PrefillPlan,
    Span,
    decode_attention,
    plan_decode,
    plan_prefill,
)
from osaurus.kernels.shaped_attention import shaped_prefill_attention

HEADS, KV_HEADS, DIM, V_DIM, BLOCK, LENGTH = 6, 2, 32, 24, 16, 700
SHAPES = [(5.0, False), (None, True), (8.0, True)]


def _storage(seed: int = 0) -> torch.Tensor:
    """Blocks 0 .. of one slot, in order."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(-(-LENGTH // BLOCK), KV_HEADS, BLOCK, DIM + V_DIM, generator=g)


def _queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(rows)) * 0.5


def _sinks(has: bool) -> torch.Tensor | None:
    return torch.linspace(-1.0, 2.0, HEADS) if has else None


def _expected(
    q: torch.Tensor,
    storage: torch.Tensor,
    first: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    kv = storage.permute(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM + V_DIM).double()
    kv = kv.repeat_interleave(HEADS // KV_HEADS, dim=0)
    scores = torch.einsum("thd,hld->htl", q.double(), kv[..., :DIM])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(first, first + q.shape[0]).unsqueeze(1)
    slots = torch.arange(kv.shape[1])
    hidden = slots > places
    if window is not None:
        hidden |= slots <= places - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("htl,hld->thd", weights, kv[..., DIM:])


def _span(first: int, count: int, start: int = 0) -> Span:
    blocks = list(range(-(-LENGTH // BLOCK)))
    return Span(start=start, length=count, first_position=first, blocks=blocks, first_block=0)


def _prefill(first: int, count: int, window: int | None) -> PrefillPlan:
    return plan_prefill(_span(first, count), BLOCK, window, "cpu")


@pytest.mark.parametrize("window", [None, 100, 513])
@pytest.mark.parametrize(("softcap", "has_sinks"), SHAPES)
def test_prefill_is_what_float64_says(
    window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    storage, sinks = _storage(), _sinks(has_sinks)
    for first, count in ((0, 1), (0, 70), (509, 7), (600, 100)):
        q = _queries(count)
        plan = _prefill(first, count, window)
        out = shaped_prefill_attention(q, storage, plan, DIM, softcap=softcap, sinks=sinks)
        expected = _expected(q, storage, first, window, softcap, sinks)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("softcap", "has_sinks"), SHAPES)
def test_decode_is_what_float64_says_with_the_same_bits_in_company(
    window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    storage, sinks, places = _storage(), _sinks(has_sinks), (0, 5, 100, 699)
    q = _queries(len(places))
    together = plan_decode([_span(p, 1, i) for i, p in enumerate(places)], BLOCK, window, "cpu")
    out = decode_attention(q, storage, together, DIM, softcap=softcap, sinks=sinks)
    for i, place in enumerate(places):
        expected = _expected(q[i : i + 1], storage, place, window, softcap, sinks)
        torch.testing.assert_close(out[i : i + 1].double(), expected, atol=1e-5, rtol=1e-5)
        alone = plan_decode([_span(place, 1)], BLOCK, window, "cpu")
        row = decode_attention(q[i : i + 1], storage, alone, DIM, softcap=softcap, sinks=sinks)
        assert torch.equal(row, out[i : i + 1])

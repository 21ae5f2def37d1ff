"""Claims: routing chooses what its definition says; a row's mixture has the same bits whoever
else chose the same experts, and is the plain weighted sum.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels.moe import (
    mix_experts,
    mix_experts_reference,
    route_sigmoid,
    route_softmax,
    router_scores,
)
from osaurus.quant.linear import DenseLinear

ROWS, HIDDEN, EXPERTS, TOP = 40, 64, 12, 3


def _layers(dtype: torch.dtype) -> list[DenseLinear]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    return [DenseLinear(weight.to(dtype)) for weight in weights]


def _routed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    router = torch.randn(EXPERTS, HIDDEN, generator=generator)
    return x, *route_softmax(router_scores(x, router), TOP, True)


def test_a_mixture_is_the_weighted_sum_of_its_experts() -> None:
    layers, (x, experts, weights) = _layers(torch.float32), _routed()
    got = mix_experts(x, experts, weights, 0, lambda e, rows, small: layers[e](rows, small))
    wanted = mix_experts_reference(x, experts, weights, lambda e, row: layers[e](row, 1))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small", [True, False], ids=["decode", "prefill"])
def test_a_row_has_the_same_bits_in_any_company(small: bool) -> None:
    layers, (x, experts, weights) = _layers(torch.bfloat16), _routed()
    x = x.bfloat16()

    def mix(rows: slice) -> Tensor:
        count = x[rows].shape[0] if small else 0
        return mix_experts(
            x[rows], experts[rows], weights[rows], count, lambda e, r, n: layers[e](r, n)
        )

    together = mix(slice(0, ROWS))
    for first, last in ((0, 1), (1, 2), (5, 12), (12, 29), (39, 40)):
        assert torch.equal(mix(slice(first, last)), together[first:last]), (first, last)


def test_small_rows_before_prefill_rows_keep_their_kind() -> None:
    layers, (x, experts, weights) = _layers(torch.bfloat16), _routed()
    seen: list[tuple[int, int]] = []

    def apply(expert: int, rows: Tensor, small: int) -> Tensor:
        seen.append((small, rows.shape[0]))
        return layers[expert](rows, small)

    mix_experts(x.bfloat16(), experts, weights, 5, apply)
    assert sum(small for small, _ in seen) == 5 * TOP
    assert sum(count for _, count in seen) == ROWS * TOP


def test_scores_do_not_depend_on_the_number_of_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, 96, generator=generator).bfloat16()
    router = torch.randn(EXPERTS, 96, generator=generator)
    together = router_scores(x, router)
    for first, last in ((0, 1), (3, 20), (20, 70)):
        assert torch.equal(router_scores(x[first:last], router), together[first:last])


def test_softmax_routing_takes_the_likeliest() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    experts, weights = route_softmax(scores, 2, False)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, F.softmax(scores, -1)[:, [1, 3]])
    _, weights = route_softmax(scores, 2, True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    scores, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    experts, weights = route_sigmoid(
        scores, bias, 2, groups=1, top_groups=1, normalize=False, scale=2.5
    )
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, 2.5 * scores[:, [3, 0]].sigmoid())


def test_experts_of_closed_groups_are_not_taken() -> None:
    # Group 0 holds the single best expert, group 1 the best two.
    scores = torch.tensor([[3.0, -9.0, 2.0, 2.5, -1.0, -1.0]])
    experts, weights = route_sigmoid(
        scores, torch.zeros(6), 2, groups=3, top_groups=1, normalize=True, scale=1.0
    )
    assert sorted(experts[0].tolist()) == [2, 3]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1))

"""Claims: the convolution is torch's; to the bit, a row knows neither its company nor where
its prompt was cut, and numbers have one exponential wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from osaurus.kernels import elementwise
from osaurus.kernels.short_conv import short_conv, short_conv_reference

C = 37


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_chunks_and_steps_are_the_convolution(taps: int, bias: bool) -> None:
    torch.manual_seed(taps)
    x, weight = torch.randn(40, C), torch.randn(C, taps)
    shift = torch.randn(C) if bias else None
    wanted = short_conv_reference(x, weight, shift)
    one = torch.tensor([1])
    whole = short_conv(x, weight, shift, torch.zeros(3, C, taps - 1), one, (0, 40))
    assert float((whole - wanted).abs().max()) < 1e-5
    window, parts, done = torch.zeros(3, C, taps - 1), [], 0
    for size in (1, 2, 1, 1, 5, 13, 1, 16):
        parts.append(short_conv(x[done : done + size], weight, shift, window, one, (0, size)))
        done += size
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(window[1], x[40 - (taps - 1) :].t())
    assert not window[[0, 2]].any()


def test_slots_share_a_step_without_knowing_of_each_other() -> None:
    torch.manual_seed(0)
    weight, start = torch.randn(C, 4), torch.randn(5, C, 3)
    slots, x = torch.tensor([3, 0, 4]), torch.randn(6, C)
    for q_start in ((0, 1, 2, 3), (0, 1, 4, 6)):
        window = start.clone()
        rows = x[: q_start[-1]]
        out = short_conv(rows, weight, None, window, slots, q_start)
        for i, slot in enumerate(slots.tolist()):
            own, mine = slice(q_start[i], q_start[i + 1]), start.clone()
            span = (0, q_start[i + 1] - q_start[i])
            lone = short_conv(rows[own], weight, None, mine, slots[i : i + 1], span)
            assert torch.equal(out[own], lone)
            assert torch.equal(window[slot], mine[slot])


FUNCTIONS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (elementwise.silu, torch.nn.functional.silu),
    (elementwise.sigmoid, torch.sigmoid),
    (elementwise.softplus, torch.nn.functional.softplus),
    (elementwise.exp, torch.exp),
]


@pytest.mark.parametrize(("ours", "theirs"), FUNCTIONS)
def test_a_number_has_the_same_bits_wherever_it_lies(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], threads: int
) -> None:
    torch.manual_seed(1)
    x = torch.randn(141, 1003) * 4
    whole = ours(x)
    assert torch.equal(whole, torch.stack([ours(row) for row in x]))
    assert torch.equal(whole, ours(torch.cat([x, x], dim=1)[:, 1003:]))
    assert torch.equal(whole[:, 5:18], ours(x[:, 5:18]))
    assert torch.allclose(whole.double(), theirs(x.double()), rtol=1e-6, atol=1e-7)

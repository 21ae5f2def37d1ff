"""Claims: prompts by tiles and answers by steps are the rule computed token by token; to the
bit, a row knows neither its company nor where its prompt was cut, with any number of threads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels.gated_delta import (
    TILE,
    DeltaRows,
    DeltaState,
    gated_delta,
    gated_delta_reference,
    waiting_shape,
)

#: (key heads, value heads, Dk, Dv)
SHAPES = [(2, 4, 16, 24), (1, 1, 8, 8), (4, 4, 32, 16), (1, 2, 128, 128)]


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _rows(count: int, shape: tuple[int, ...], seed: int = 0, *, alike: float = 0.5) -> DeltaRows:
    """Random tokens; `alike` draws all keys towards one, as a text that repeats itself does."""
    key_heads, heads, k_dim, v_dim = shape
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    return DeltaRows(
        q=F.normalize(normal(count, key_heads, k_dim), dim=-1),
        k=F.normalize(normal(count, key_heads, k_dim) + alike * normal(k_dim), dim=-1),
        v=normal(count, heads, v_dim),
        log_decay=-F.softplus(2 * normal(count, heads) - 2),
        rate=normal(count, heads).sigmoid(),
    )


def _state(slots: int, shape: tuple[int, ...]) -> DeltaState:
    key_heads, heads, k_dim, v_dim = shape
    return DeltaState(
        matrix=torch.zeros(slots, heads, k_dim, v_dim),
        waiting=torch.zeros(slots, *waiting_shape(key_heads, heads, k_dim, v_dim)),
        num_waiting=torch.zeros(slots, 1),
    )


def _run(state: DeltaState, slot: int, rows: DeltaRows, small: bool = False) -> Tensor:
    count = rows.q.shape[0]
    return gated_delta(rows, state, torch.tensor([slot]), (0, count), count if small else 0)


def _truth(rows: DeltaRows, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    exact = DeltaRows(**{f.name: getattr(rows, f.name).double() for f in fields(rows)})
    _, heads, k_dim, v_dim = shape
    return gated_delta_reference(exact, torch.zeros(heads, k_dim, v_dim, dtype=torch.float64))


def _close(got: Tensor, wanted: Tensor) -> bool:
    return float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("alike", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, TILE - 1, TILE, TILE + 1, 83])
def test_tiles_and_steps_are_the_rule(count: int, shape: tuple[int, ...], alike: float) -> None:
    rows = _rows(count + 20, shape, alike=alike)
    wanted, matrix = _truth(rows, shape)
    state = _state(3, shape)
    prompt = _run(state, 1, rows.select(slice(count)))
    answer = _run(state, 1, rows.select(slice(count, None)), small=True)
    assert _close(torch.cat([prompt, answer]), wanted)
    assert _close(state.matrix[1], matrix)
    assert not state.num_waiting.any()
    assert not state.matrix[[0, 2]].any(), "other slots are let be"


def test_float32_token_by_token_is_the_rule_as_well() -> None:
    rows = _rows(60, SHAPES[0])
    wanted, _ = _truth(rows, SHAPES[0])
    got, _ = gated_delta_reference(rows, torch.zeros(4, 16, 24))
    assert got.dtype == torch.float32
    assert _close(got, wanted)


def test_a_decay_that_forgets_everything_loses_no_digits() -> None:
    rows = _rows(40, SHAPES[0])
    rows.log_decay[10:13] = -2000.0
    wanted, _ = _truth(rows, SHAPES[0])
    assert _close(_run(_state(1, SHAPES[0]), 0, rows), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_how_a_prompt_is_cut_changes_no_bit(shape: tuple[int, ...], threads: int) -> None:
    rows, draw = _rows(200, shape), random.Random(str(shape))
    whole = _state(1, shape)
    wanted = _run(whole, 0, rows)
    for most in (3, 18, 70):
        state, parts, done = _state(2, shape), [], 0
        while done < 200:
            size = draw.randrange(1, most)
            parts.append(_run(state, 1, rows.select(slice(done, done + size))))
            done += size
        assert torch.equal(torch.cat(parts), wanted)
        for field in fields(state):
            assert torch.equal(getattr(state, field.name)[1], getattr(whole, field.name)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_row_does_not_know_its_company(shape: tuple[int, ...], threads: int) -> None:
    """Slots of several lengths, some with several rows a step, each as it is alone."""
    prompts, counts = [5, 16, 33, 0], [1, 3, 2, 1]
    rows = [_rows(n + 10, shape, seed) for seed, n in enumerate(prompts)]
    together = _state(6, shape)
    slots = torch.tensor([4, 0, 5, 2])
    alone: list[Tensor] = []
    for seed, length in enumerate(prompts):
        lone = _state(1, shape)
        for state, slot in ((lone, 0), (together, int(slots[seed]))):
            if length:
                _run(state, slot, rows[seed].select(slice(length)))
        one = slice(length, length + counts[seed])
        alone.append(_run(lone, 0, rows[seed].select(one), small=True))
    step = [
        mine.select(slice(length, length + count))
        for mine, length, count in zip(rows, prompts, counts, strict=True)
    ]
    packed = DeltaRows(
        **{f.name: torch.cat([getattr(r, f.name) for r in step]) for f in fields(DeltaRows)}
    )
    out = gated_delta(packed, together, slots, (0, 1, 4, 6, 7), 7)
    assert torch.equal(out, torch.cat(alone))

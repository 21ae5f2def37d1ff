"""One suite over every kind of memory. Claims, to the bit in float32: how a prompt is cut into
chunks and who shares a batch change nothing; a prefix taken up again equals one computed;
going back equals never having gone; a record brings back what was saved, or nothing; bytes
are what the topology says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from osaurus.cache.snapshots import Snapshot
from osaurus.topology.summary import can_forget, resumes_at_snapshots
from synthetic import FAMILIES, Lane, Rig, build
from synthetic.model import VOCAB

BLOCK = 16

each_family = pytest.mark.parametrize("family", FAMILIES)
each_with_state = pytest.mark.parametrize(
    "family", [f for f in FAMILIES if resumes_at_snapshots(build(f).layers_topology)]
)


def _tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(VOCAB) for i in range(count)]


def _spoiled(rig: Rig) -> Rig:
    """The same rig with NaN wherever nothing valid can be: a reused slot's leftovers."""
    for layer in rig.states.layers:
        for array in rig.states.layer_view(layer.layer):
            array.fill_(float("nan"))
    return rig


def _rig(family: str) -> Rig:
    return _spoiled(Rig(build(family)))


def _snapshot(rig: Rig, lane: Lane) -> Snapshot:
    taken = rig.states.take(lane.slot, lane.num_tokens)
    assert taken is not None
    return taken


@pytest.mark.parametrize("seed", range(4))
@each_family
def test_how_a_prompt_is_cut_changes_no_bit(family: str, seed: int) -> None:
    rig, draw = _rig(family), random.Random(seed)
    tokens = _tokens(90, seed)
    whole = rig.prefill(rig.open(), tokens)
    lane = rig.open()
    parts: list[Tensor] = []
    while lane.num_tokens < len(tokens):
        size = draw.choice([1, 2, 3, 5, 8, 16, 17, 31])
        parts.append(rig.prefill(lane, tokens[lane.num_tokens : lane.num_tokens + size]))
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.argmax(-1).unique()) > 5, "the model says something"


@each_family
def test_a_decode_row_does_not_know_its_company(family: str) -> None:
    rig = _rig(family)
    lengths, steps = [1, 7, 16, 40], 12
    fed = [_tokens(length + steps, seed) for seed, length in enumerate(lengths)]

    def begin() -> list[Lane]:
        lanes = [rig.open() for _ in lengths]
        for lane, tokens, length in zip(lanes, fed, lengths, strict=True):
            rig.prefill(lane, tokens[:length])
        return lanes

    lanes = begin()
    together = [
        rig.decode([(lane, [t[n + step]]) for lane, t, n in zip(lanes, fed, lengths, strict=True)])
        for step in range(steps)
    ]
    for lane in lanes:
        rig.close(lane)
    for index, lane in enumerate(begin()):
        for step in range(steps):
            alone = rig.decode([(lane, [fed[index][lengths[index] + step]])])
            assert torch.equal(alone[0], together[step][index])
        rig.close(lane)
    # Several rows of one lane beside single rows of others, as after a preemption.
    lanes = begin()
    mixed = rig.decode(
        [(lanes[0], fed[0][1:4]), (lanes[1], fed[1][7:8]), (lanes[2], fed[2][16:22])]
    )
    assert torch.equal(mixed[:3], torch.stack([together[step][0] for step in range(3)]))
    assert torch.equal(mixed[3], together[0][1])
    assert torch.equal(mixed[4:], torch.stack([together[step][2] for step in range(6)]))


@pytest.mark.parametrize("boundary", [16, 32, 64])
@each_family
def test_a_prefix_taken_up_again_equals_one_computed(family: str, boundary: int) -> None:
    rig = _rig(family)
    tokens = _tokens(100)
    lane = rig.open()
    whole = [rig.prefill(lane, tokens[:boundary])]
    taken = _snapshot(rig, lane)
    taken_over = rig.fork(lane)
    whole.append(rig.prefill(lane, tokens[boundary:]))  # must not reach into the copy
    if resumes_at_snapshots(rig.model.layers_topology):
        assert rig.states.restore(taken_over.slot, taken)
    again = rig.prefill(taken_over, tokens[boundary:])
    assert torch.equal(again, whole[1])
    assert torch.equal(rig.decode([(taken_over, [9])]), rig.decode([(lane, [9])]))


@each_with_state
def test_state_at_another_boundary_is_another_answer(family: str) -> None:
    """The proof that the tests above see the state at all."""
    rig = _rig(family)
    tokens = _tokens(80)
    lane = rig.open()
    rig.prefill(lane, tokens[:63])
    early = _snapshot(rig, lane)
    rig.prefill(lane, tokens[63:64])
    wrong = rig.fork(lane)
    assert rig.states.restore(wrong.slot, early)
    assert not torch.equal(rig.prefill(wrong, tokens[64:]), rig.prefill(lane, tokens[64:]))


@pytest.mark.parametrize("drafted", [1, 3, 5])
@each_family
def test_going_back_equals_never_having_gone(family: str, drafted: int) -> None:
    rig = _rig(family)
    tokens = _tokens(50)
    lane, plain = rig.open(), rig.open()
    for each in (lane, plain):
        rig.prefill(each, tokens[:42])
    staged = rig.states.allocate()
    rig.states.copy_slot(lane.slot, staged, lane.num_tokens)
    rig.decode([(lane, _tokens(drafted, seed=7))])
    rig.forget(lane, 42)
    if not can_forget(rig.model.layers_topology):
        rig.states.copy_slot(staged, lane.slot, 42)
    for token in tokens[42:]:
        assert torch.equal(rig.decode([(lane, [token])]), rig.decode([(plain, [token])]))


@each_family
def test_a_slot_begins_empty_whoever_had_it(family: str) -> None:
    rig = Rig(build(family), num_slots=1)
    tokens = _tokens(40)
    lane = rig.open()
    first = rig.prefill(lane, tokens)
    rig.close(lane)
    assert torch.equal(rig.prefill(_reopened(_spoiled(rig)), tokens), first)


def _reopened(rig: Rig) -> Lane:
    lane = rig.open()
    assert lane.slot == 0
    return lane


@each_family
def test_bytes_are_what_the_topology_says(family: str) -> None:
    rig = _rig(family)
    layers = rig.model.layers_topology
    lane = rig.open()
    rig.prefill(lane, _tokens(53))
    blocks = 0
    if rig.blocks is not None:
        for table, group in zip(lane.tables, rig.blocks.groups, strict=True):
            table.drop_before(group.topology.first_needed_token(53), rig.blocks)
        blocks = rig.blocks.used_bytes
    said = sum(layer.nbytes(53, BLOCK, torch.float32) for layer in layers)
    taken = _snapshot(rig, lane)
    assert blocks + taken.nbytes == said
    assert rig.states.slot_bytes == sum(
        array.nbytes(rig.model.max_context_tokens) for layer in layers for array in layer.arrays
    )
    stored = [a for layer in range(len(layers)) for a in rig.states.layer_view(layer)]
    assert rig.states.nbytes == sum(array.nbytes for array in stored)
    assert all(array.dtype == torch.float32 for array in stored)


@pytest.mark.parametrize("length", [1, 3, 32, 37])
@each_with_state
def test_a_record_brings_back_what_was_saved(family: str, length: int) -> None:
    rig = _rig(family)
    lane = rig.open()
    rig.prefill(lane, _tokens(length))
    tensors, meta = _snapshot(rig, lane).to_record()
    assert all(tensor.numel() for tensor in tensors.values())
    assert all(isinstance(v, str) for v in meta.values())
    loaded = Snapshot.from_record(tensors, meta)
    assert loaded is not None
    for tensor in tensors.values():
        tensor.fill_(1e9)  # what was loaded owns its bytes
    other = rig.fork(lane)
    assert rig.states.restore(other.slot, loaded)
    assert torch.equal(rig.prefill(other, _tokens(9, 3)), rig.prefill(lane, _tokens(9, 3)))


Damage = Callable[[dict[str, Tensor], dict[str, str]], None]


def _lose_one(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    tensors.pop(next(iter(tensors)))


def _add_one(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    tensors["L99.conv"] = torch.zeros(3)


def _round_one(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].bfloat16()


def _shorten_one(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name][:-1]


def _rename_kind(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    meta["layers"] = meta["layers"].replace('"kind":"', '"kind":"not_')


def _other_format(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    meta["version"] = "0"


def _empty(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    tensors.clear()
    meta["layers"] = "[]"


def _other_boundary(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    meta["token_count"] = str(10**6)


def _nonsense(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    meta["layers"] = '[{"i":0,"kind":"ssm","arrays":[["conv",["x",-1]],7]}]'


DAMAGES: Mapping[str, Damage] = {
    d.__name__: d
    for d in (
        _lose_one,
        _add_one,
        _round_one,
        _shorten_one,
        _rename_kind,
        _other_format,
        _empty,
        _other_boundary,
        _nonsense,
    )
}


@pytest.mark.parametrize("damage", DAMAGES)
@each_with_state
def test_a_damaged_record_restores_nothing(family: str, damage: str) -> None:
    rig = _rig(family)
    lane = rig.open()
    rig.prefill(lane, _tokens(32))
    before = _snapshot(rig, lane)
    tensors, meta = before.to_record()
    DAMAGES[damage](tensors, meta)
    loaded = Snapshot.from_record(tensors, meta)
    assert loaded is None or not rig.states.restore(lane.slot, loaded)
    after = _snapshot(rig, lane)
    for one, other in zip(before.layers, after.layers, strict=True):
        for a, b in zip(one.arrays, other.arrays, strict=True):
            assert torch.equal(a, b)

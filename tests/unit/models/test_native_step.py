"""Claims: a forward in one native call is the forward of the model's torch form, to the precision
of bfloat16; a row of it has the same bits decoded alone, among others, as a verify row and as part
of any prefill chunk; and what it cannot run is left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.engine.batch import build_batch
from osaurus.engine.runner import Runner
from osaurus.engine.scheduler import RowSpan
from osaurus.kernels.cpu import has_amx
from osaurus.kernels.native.library import native
from osaurus.topology.base import group_layers
from tiny import load_tiny, save_tiny

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)

#: Sizes that are whole tiles; biases, windows, q/k norms, norms after, soft-capped logits.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "gemma3": ("gemma3_text", {"sliding_window": 40}),
}
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}


class Lane:
    """The part of a request that a batch is built from."""

    def __init__(self, tokens: list[int], pool: BlockPool) -> None:
        self.tokens = tokens
        self.tables = [BlockTable(group) for group in range(len(pool.groups))]
        for table in self.tables:
            table.grow(len(tokens), pool)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_at(self, position: int) -> int:
        return self.tokens[position]


class Rig:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.pool = BlockPool(
            group_layers(model.layers_topology),
            block_tokens=32,
            budget_bytes=1 << 23,
            dtype=model.kv_dtype,
        )
        self.runner = Runner(model, self.pool)

    def lane(self, seed: int, length: int) -> Lane:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.model.vocab_size, (length,), generator=g).tolist()
        return Lane(ids, self.pool)

    def prefill(self, lane: Lane, first: int, count: int) -> None:
        self.runner.prefill(RowSpan(lane, first, count))  # type: ignore[arg-type]

    def logits(self, spans: Sequence[tuple[Lane, int, int]], *, with_plans: bool = False) -> Tensor:
        """Of every row; torch's form where the batch has plans."""
        batch = build_batch(
            [RowSpan(*span) for span in spans],  # type: ignore[arg-type]
            self.pool,
            prefill=False,
            device=torch.device("cpu"),
            with_plans=with_plans,
        )
        every = torch.arange(batch.num_rows)
        batch = type(batch)(**{**_fields(batch), "logits_rows": every})
        logits = self.model.forward(batch, self.runner.memory).logits
        assert logits is not None
        return logits


def _fields(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


@pytest.fixture(params=list(MODELS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    family, changes = MODELS[request.param]
    save_tiny(tmp_path, family, **SIZES, **changes)
    rig = Rig(load_tiny(tmp_path, "bfloat16"))
    assert rig.model.reads_block_tables(rig.runner.memory, prefill=False)
    return rig


def test_logits_are_those_of_torchs_form(rig: Rig) -> None:
    lane, other = rig.lane(1, 90), rig.lane(2, 45)
    rig.prefill(lane, 0, 89)
    rig.prefill(other, 0, 40)
    spans = [(lane, 89, 1), (other, 40, 5)]
    got, wanted = rig.logits(spans), rig.logits(spans, with_plans=True)
    assert (got - wanted).norm() / wanted.norm() < 0.02


def test_a_row_has_the_bits_it_has_alone_and_in_any_chunk(rig: Rig) -> None:
    lane, other = rig.lane(1, 300), rig.lane(2, 120)
    rig.prefill(lane, 0, 299)
    rig.prefill(other, 0, 119)
    alone = rig.logits([(lane, 299, 1)])
    beside = rig.logits([(other, 110, 10), (lane, 299, 1)])
    assert torch.equal(beside[-1:], alone)
    if has_amx():
        return  # prompts are multiplied in tiles there, another arithmetic than answers have
    kept = [storage.clone() for storage in rig.pool.storage]

    again = Rig(rig.model)
    lane, other = again.lane(1, 300), again.lane(2, 120)
    first = 0
    for count in (7, 1, 60, 130, 50):
        again.prefill(lane, first, count)
        first += count
    other_rows = [(other, 0, 1)]
    for position in range(first, 296):  # decoded, with company
        again.logits([*other_rows, (lane, position, 1)])
    assert torch.equal(again.logits([(lane, 296, 4)])[-1:], alone)
    for before, after in zip(kept, again.pool.storage, strict=True):
        for block in lane.tables[0].blocks[:9]:
            assert torch.equal(before[:, block], after[:, block])


def test_taps_are_the_layers_outputs_and_embeddings_may_be_given(rig: Rig) -> None:
    lane = rig.lane(3, 20)
    rig.prefill(lane, 0, 19)
    span = [RowSpan(lane, 19, 1)]  # type: ignore[arg-type]
    outputs = []
    for with_plans in (False, True):
        batch = build_batch(
            span, rig.pool, prefill=False, device=torch.device("cpu"), with_plans=with_plans
        )
        last = len(rig.runner.memory) - 1
        embeds = torch.randn(1, 96, generator=torch.Generator().manual_seed(4))
        batch = type(batch)(**{**_fields(batch), "taps": (0, last), "embeds": embeds})
        outputs.append(rig.model.forward(batch, rig.runner.memory))
    ours, torchs = outputs
    assert set(ours.taps) == {0, last}
    for tap in ours.taps:
        assert (ours.taps[tap] - torchs.taps[tap]).norm() / torchs.taps[tap].norm() < 0.02


def test_memory_it_cannot_read_is_left_to_torch(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", **SIZES)
    model = load_tiny(tmp_path, "bfloat16")
    pool = BlockPool(
        group_layers(model.layers_topology),
        block_tokens=8,
        budget_bytes=1 << 20,
        dtype=model.kv_dtype,
    )
    assert not model.reads_block_tables(Runner(model, pool).memory, prefill=False)
    assert not load_tiny(tmp_path).reads_block_tables([], prefill=False)  # float32

"""Mixers whose memory is state, and those that have both kinds.

Each is one step function over [B] slots: state in, state out. `scan` runs it over a batch,
one token of every slot at a time, gathering and scattering the slots' state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.topology.base import LayerTopology
from osaurus.topology.cca import convolutional_attention
from osaurus.topology.composite import CompositeTopology, NoMemory
from osaurus.topology.pool import PoolBranch, compressed_pool
from osaurus.topology.recurrent import gated_delta, linear_attention, short_conv, ssm
from synthetic.attend import DIM, HEADS, HIDDEN, KV_HEADS, Attention, Weights, product

#: (state arrays [B, ...], inputs [B, K], positions [B]) -> (outputs [B, N], new state arrays)
Step = Callable[[list[Tensor], Tensor, Tensor], tuple[Tensor, list[Tensor]]]

TAPS = 3


def scan(step: Step, inputs: Tensor, batch: ForwardBatch, state: Sequence[Tensor]) -> Tensor:
    """Run a step over the batch's rows in order; updates the slots' state in place."""
    assert batch.state_slot is not None
    starts = torch.tensor(batch.q_start[:-1])
    lengths = torch.tensor(batch.q_start[1:]) - starts
    outputs: Tensor | None = None
    for index in range(int(lengths.max())):
        live = lengths > index
        rows, slots = starts[live] + index, batch.state_slot[live]
        gathered = [array.index_select(0, slots) for array in state]
        out, updated = step(gathered, inputs[rows], batch.positions[rows])
        for array, new in zip(state, updated, strict=True):
            array.index_copy_(0, slots, new)
        if outputs is None:
            outputs = out.new_zeros(inputs.shape[0], out.shape[1])
        outputs[rows] = out
    assert outputs is not None
    return outputs


def convolve(window: Tensor, new: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise over [B, C, taps - 1] past inputs and one new [B, C]: output and new window."""
    whole = torch.cat([window, new.unsqueeze(-1)], dim=-1)
    return (whole * taps).sum(-1), whole[..., 1:]


class ShortConv:
    """Gated short convolution, as in LFM2."""

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self.topology: LayerTopology = short_conv(HIDDEN, TAPS)
        self._in = weights.matrix(3 * HIDDEN, HIDDEN)
        self._taps = weights.matrix(HIDDEN, TAPS)
        self._out = weights.matrix(HIDDEN, HIDDEN)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        return product(scan(self._step, product(x, self._in), batch, memory.state), self._out)

    def _step(self, state: list[Tensor], x: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        before, after, value = x.chunk(3, dim=-1)
        out, window = convolve(state[0], before * value, self._taps)
        return after * out, [window]


class GatedDelta:
    """Gated delta rule over one matrix a head, as in Qwen3-Next."""

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self._channels = 3 * HEADS * DIM
        self.topology: LayerTopology = gated_delta(self._channels, TAPS, HEADS, DIM, DIM)
        self._in = weights.matrix(self._channels + 2 * HEADS, HIDDEN)
        self._taps = weights.matrix(self._channels, TAPS)
        self._out = weights.matrix(HIDDEN, HEADS * DIM)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        return product(scan(self._step, product(x, self._in), batch, memory.state), self._out)

    def _step(self, state: list[Tensor], x: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        mixed, window = convolve(state[0], x[:, : self._channels], self._taps)
        q, k, v = F.silu(mixed).view(-1, 3, HEADS, DIM).unbind(1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        decay, rate = x[:, self._channels :].sigmoid().view(-1, 2, HEADS, 1).unbind(1)
        matrix = state[1] * decay.unsqueeze(-1)
        missed = v - (matrix * k.unsqueeze(-1)).sum(-2)
        matrix = matrix + k.unsqueeze(-1) * (rate * missed).unsqueeze(-2)
        return (matrix * q.unsqueeze(-1)).sum(-2).flatten(1), [window, matrix]


class StateSpace:
    """A Mamba-2 layer: convolution, then a decaying [head dim, N] matrix a head."""

    #: With it a row has 64 inputs: torch takes 32 at a time, and leftovers round otherwise.
    N = 16

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self._channels = HEADS * DIM + 2 * self.N
        self.topology: LayerTopology = ssm(self._channels, TAPS + 1, HEADS, DIM, self.N)
        self._in = weights.matrix(self._channels + HEADS, HIDDEN)
        self._taps = weights.matrix(self._channels, TAPS + 1)
        self._rate = weights.vector(HEADS).exp()
        self._skip = weights.vector(HEADS)
        self._out = weights.matrix(HIDDEN, HEADS * DIM)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        return product(scan(self._step, product(x, self._in), batch, memory.state), self._out)

    def _step(self, state: list[Tensor], x: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        mixed, window = convolve(state[0], x[:, : self._channels], self._taps)
        inner, enter, leave = F.silu(mixed).split([HEADS * DIM, self.N, self.N], dim=-1)
        inner = inner.view(-1, HEADS, DIM)
        # Roots and quotients round alike anywhere, exponentials of 4 values do not.
        raw = x[:, self._channels :]
        step = (raw + (raw * raw + 4.0).sqrt()) / 2
        matrix = state[1] / (1.0 + step * self._rate)[..., None, None]
        matrix = matrix + (step.unsqueeze(-1) * inner).unsqueeze(-1) * enter[:, None, None, :]
        out = (matrix * leave[:, None, None, :]).sum(-1) + self._skip[:, None] * inner
        return out.flatten(1), [window, matrix]


class LinearAttention:
    """Linear attention with a fixed decay a head."""

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self.topology: LayerTopology = linear_attention(HEADS, DIM, DIM)
        self._in = weights.matrix(3 * HEADS * DIM, HIDDEN)
        self._decay = weights.vector(HEADS).sigmoid()[:, None, None]
        self._out = weights.matrix(HIDDEN, HEADS * DIM)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        return product(scan(self._step, product(x, self._in), batch, memory.state), self._out)

    def _step(self, state: list[Tensor], x: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v = x.view(-1, 3, HEADS, DIM).unbind(1)
        matrix = state[0] * self._decay + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (matrix * q.unsqueeze(-1)).sum(-2).flatten(1), [matrix]


class Pool:
    """A local window beside rows that each stand for a run of tokens, as in DeepSeek-V4.

    With overlap a row is a gated mean over two runs: the second half of the projection for its
    own tokens and the first half for those before.
    """

    ROW = 6

    def __init__(self, seed: int, window: int, tokens_per_row: int, overlaps: bool) -> None:
        weights = Weights(seed)
        self._local = Attention(seed + 1, window)
        branch = PoolBranch(
            name="compressor", row_dim=self.ROW, tokens_per_row=tokens_per_row, overlaps=overlaps
        )
        paged = self._local.topology.paged
        assert paged is not None
        self.topology: LayerTopology = compressed_pool(paged, [branch])
        self._run, self._overlaps = tokens_per_row, overlaps
        self._width = self.ROW * (2 if overlaps else 1)
        self._in = weights.matrix(2 * self._width + self.ROW, HIDDEN)
        self._out = weights.matrix(HIDDEN, self.ROW)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        pooled = scan(self._step, product(x, self._in), batch, memory.state)
        return self._local(x, batch, memory) + product(pooled, self._out)

    def _step(self, state: list[Tensor], x: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        rows, kv, gate = (array.clone() for array in state)
        value, weight, query = x.split([self._width, self._width, self.ROW], dim=-1)
        slots = torch.arange(x.shape[0])
        place = at % self._run + (self._run if self._overlaps else 0)
        kv[slots, place], gate[slots, place] = value, weight
        full = (at + 1) % self._run == 0
        if bool(full.any()):
            made = self._fold(kv[full], gate[full], at[full])
            rows[slots[full], at[full] // self._run] = made
            if self._overlaps:
                kv[full, : self._run] = kv[full, self._run :]
                gate[full, : self._run] = gate[full, self._run :]
        visible = torch.arange(rows.shape[1]) < ((at + 1) // self._run).unsqueeze(1)
        known = rows.masked_fill(~visible.unsqueeze(-1), 0.0)
        scores = (known * query.unsqueeze(1)).sum(-1).exp() * visible
        # The 1 is a sink: without any row the answer is zero.
        out = (scores.unsqueeze(-1) * known).sum(1) / (1.0 + scores.sum(1, keepdim=True))
        return out, [rows, kv, gate]

    def _fold(self, kv: Tensor, gate: Tensor, at: Tensor) -> Tensor:
        """One row of each full run: [b, 6] from [b, run or 2 * run, width]."""
        if self._overlaps:
            kv = torch.cat([kv[:, : self._run, : self.ROW], kv[:, self._run :, self.ROW :]], 1)
            gate = torch.cat(
                [gate[:, : self._run, : self.ROW], gate[:, self._run :, self.ROW :]], 1
            )
            first = (at < self._run)[:, None, None]
            before = torch.arange(2 * self._run)[None, :, None] < self._run
            gate = gate.masked_fill(first & before, float("-inf"))
        return (gate.softmax(1) * kv).sum(1)


class ConvolutionalAttention:
    """Attention behind a convolution, half of its values from the token before, as in ZAYA."""

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self._attention = Attention(seed + 1)
        paged = self._attention.topology.paged
        assert paged is not None
        self._channels = (HEADS + KV_HEADS) * DIM
        self.topology: LayerTopology = convolutional_attention(paged, self._channels, TAPS, HIDDEN)
        self._in = weights.matrix(self._channels, HIDDEN)
        self._taps = weights.matrix(self._channels, TAPS)
        self._now = weights.matrix(KV_HEADS * DIM // 2, HIDDEN)
        self._before = weights.matrix(KV_HEADS * DIM // 2, HIDDEN)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        return self._attention.mix(scan(self._step, x, batch, memory.state), batch, memory)

    def _step(self, state: list[Tensor], x: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        qk, window = convolve(state[0], product(x, self._in), self._taps)
        v = torch.cat([product(x, self._now), product(state[1], self._before)], dim=-1)
        return torch.cat([qk, v], dim=-1), [window, x]


class Parallel:
    """Attention and a state space side by side in one layer, as in Falcon-H1."""

    def __init__(self, seed: int) -> None:
        self._parts: tuple[Attention, StateSpace] = (Attention(seed), StateSpace(seed + 1))
        self.topology: LayerTopology = CompositeTopology(
            children=tuple(part.topology for part in self._parts)
        )

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        attention, space = self._parts
        return attention(x, batch, memory) + space(x, batch, memory)


class Gate:
    """A layer without memory."""

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        self.topology: LayerTopology = NoMemory()
        self._up, self._down = weights.matrix(2 * HIDDEN, HIDDEN), weights.matrix(HIDDEN, HIDDEN)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        gate, up = product(x, self._up).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self._down)

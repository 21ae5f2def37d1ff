"""What a codec of KV blocks promises, and which of a request's blocks may be coded.

A block is coded once, from the values it was computed with, and never again: decoding and
encoding anew would lose a little more each time. Prefill reads exact blocks only.

    | first block | coded blocks ...           | newest 64 tokens and the open block |
    | exact       | one code each, raw dropped | exact                               |
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from osaurus.kernels.coded_attention import CodedReader

#: The first tokens draw a large share of attention and stay exact.
SINK_TOKENS = 4
#: So do the newest: the instruction being worked on and the turn's markers.
TAIL_TOKENS = 64


class KVCodec(CodedReader, Protocol):
    """Blocks of one attention layer's keys and values to bytes and back.

    Bound to one geometry (block_tokens, k_dim, v_dim) and device; holds tables, no state. A
    block's bytes depend on that block alone.
    """

    @property
    def tag(self) -> str:
        """Everything that changes the meaning of the bytes, in one short string."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one kv head of one layer."""
        ...

    def fits(self, kv: Tensor) -> Tensor:
        """Whether each block can be coded: its norms and scales are finite in float16.

        kv: [B, K, block_tokens, Dk + Dv]. Returns [B] bool. A block that does not fit in
        one layer stays exact in all.
        """
        ...

    def encode(self, kv: Tensor) -> Tensor:
        """kv: [B, K, block_tokens, Dk + Dv] of any float dtype; B is layers, blocks or both.

        Returns [B, K, block_bytes] uint8. The caller has asked `fits`.
        """
        ...

    def decode(self, coded: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """coded: [B, K, block_bytes] uint8. Returns [B, K, block_tokens, Dk + Dv] in `dtype`,
        computed in float32. The plain form of reading; attention uses `CodedReader`."""
        ...


def codable_blocks(num_tokens: int, block_tokens: int) -> range:
    """Indices of a request's blocks that may be coded once `num_tokens` have keys and values.

    Worked example, blocks of 32: at 191 tokens the newest 64 begin at 127, inside block 3, so
    blocks 1 and 2 may be coded; at 192 block 3 may as well.
    """
    first = -(-SINK_TOKENS // block_tokens)
    return range(first, max(first, (num_tokens - TAIL_TOKENS) // block_tokens))


def rows_until_coding(position: int, block_tokens: int) -> int:
    """How many rows from `position` on may run in one step and read the same codes as one by
    one: a row at position p reads `codable_blocks(p)` coded.

    Worked example, blocks of 32: at 160 a block becomes codable, so rows verified together
    from 157 on may be three.
    """
    return block_tokens - (position - TAIL_TOKENS) % block_tokens

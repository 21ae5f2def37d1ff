"""GGUF block formats Q4_0, Q4_1 and Q8_0 to grouped codes.

Source: the block structs of the GGUF format (32 weights a block; d and m are float16).
Q4 packs weight i in the low nibble of byte i and weight i + 16 in the high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant.grouped import GroupedWeight

BLOCK = 32
#: Bytes of one 32-weight block.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def is_quantized(encoding: str) -> bool:
    return encoding in BLOCK_BYTES


def decode(encoding: str, data: Tensor, shape: tuple[int, ...]) -> GroupedWeight:
    """Decode the raw bytes of one matrix.

    data: 1-D uint8, may be a read-only mapping (it is not written to). shape: (N, K).
    Raises `UnsupportedBundle` for another encoding or a K that is not whole blocks.
    """
    if encoding not in BLOCK_BYTES:
        raise UnsupportedBundle(f"GGUF encoding {encoding} is not supported yet")
    n, k = shape
    if k % BLOCK:
        raise UnsupportedBundle(f"{encoding} rows of {k} weights are not whole blocks of {BLOCK}")
    blocks = data.view(n, k // BLOCK, BLOCK_BYTES[encoding])
    scale = _float16(blocks, 0)
    if encoding == "Q8_0":
        # Signed bytes become unsigned codes by adding 128; the bias takes it back.
        codes = blocks[..., 2:].bitwise_xor(128).reshape(n, k)
        # 128 * d overflows float16 beyond d = 511; float32 holds it exactly.
        return GroupedWeight(
            bits=8, group_size=BLOCK, codes=codes, scale=scale, bias=-128 * scale.float()
        )
    offset = _float16(blocks, 2) if encoding == "Q4_1" else -8 * scale
    nibbles = blocks[..., 4 if encoding == "Q4_1" else 2 :]
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).reshape(n, k)
    return GroupedWeight(bits=4, group_size=BLOCK, codes=codes, scale=scale, bias=offset)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """[N, K / 32] float16 read from two bytes of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)

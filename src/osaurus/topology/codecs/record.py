"""Where the parts of one coded block of one kv head lie in its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Field:
    """`count` elements of `dtype` for each token."""

    name: str
    count: int
    dtype: torch.dtype


class RecordLayout:
    """Fields one after another, each [block_tokens, count]; wider elements come first, so
    that every field is aligned and can be read as a view.

        | key words | value words | key norms | value norms | padding to 4 bytes |
    """

    def __init__(self, fields: Sequence[Field], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._fields: dict[str, tuple[Field, int]] = {}
        end = 0
        for field in sorted(fields, key=lambda f: -f.dtype.itemsize):
            self._fields[field.name] = (field, end)
            end += block_tokens * field.count * field.dtype.itemsize
        self.nbytes = -(-end // 4) * 4

    def starts(self) -> dict[str, int]:
        """Where in a block's bytes each field begins, by its name."""
        return {name: start for name, (_, start) in self._fields.items()}

    def write(self, parts: Mapping[str, Tensor]) -> Tensor:
        """parts: by field name [B, K, block_tokens, count]. Returns [B, K, nbytes] uint8."""
        batch, heads = next(iter(parts.values())).shape[:2]
        device = next(iter(parts.values())).device
        coded = torch.zeros(batch, heads, self.nbytes, dtype=torch.uint8, device=device)
        for name, part in parts.items():
            self.read(coded, name).copy_(part)
        return coded

    def read(self, coded: Tensor, name: str) -> Tensor:
        """[..., nbytes] uint8 to a view [..., block_tokens, count] of one field."""
        field, start = self._fields[name]
        size = self._block_tokens * field.count * field.dtype.itemsize
        flat = coded[..., start : start + size].view(field.dtype)
        return flat.unflatten(-1, (self._block_tokens, field.count))

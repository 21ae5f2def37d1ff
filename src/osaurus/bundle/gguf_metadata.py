"""One architecture's numbers in a GGUF's metadata, asked for by name and checked."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from osaurus.bundle.gguf_reader import GgufFile
from osaurus.errors import DamagedBundle, IncompleteBundle, UnsupportedBundle


class MetadataReader:
    """Reads `{architecture}.{key}`; numbers that must be there are asked for by name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture

    def value(self, key: str) -> Any:
        """A scalar; an array with one value for each layer counts when all are equal."""
        value = self.file.metadata.get(f"{self.prefix}.{key}")
        if isinstance(value, Sequence) and not isinstance(value, str):
            distinct = set(value)
            if len(distinct) != 1:
                raise UnsupportedBundle(
                    f"{self.file.path}: {self.prefix}.{key} differs between layers "
                    f"({sorted(distinct)}), which this architecture does not support"
                )
            return distinct.pop()
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        return default if value is None else bool(value)

    def each(self, key: str, num_layers: int) -> list[Any] | None:
        """One value for each layer, where there are so many."""
        value = self.file.metadata.get(f"{self.prefix}.{key}")
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != num_layers:
            return None
        return list(value)

    def optional_integer(self, key: str) -> int | None:
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DamagedBundle(f"{self.file.path}: {self.prefix}.{key} is {value!r}, not a count")
        return value

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if not value:
            raise IncompleteBundle(
                f"{self.file.path}: the metadata lacks {self.prefix}.{key}; the file is not a "
                "whole model"
            )
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise DamagedBundle(f"{self.file.path}: {self.prefix}.{key} is {value!r}, not a number")
        if not math.isfinite(value):
            raise DamagedBundle(f"{self.file.path}: {self.prefix}.{key} is {value}")
        return shortest_decimal(value)

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise IncompleteBundle(
                f"{self.file.path}: the metadata lacks {self.prefix}.{key}; the file is not a "
                "whole model"
            )
        return value


def shortest_decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.

    The converter rounded the published value to float32; this gives the published one back.
    """
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value

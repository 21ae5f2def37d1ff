"""JSON Schemas by seed, out of everything that can be enforced, small enough to be filled in."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "tags", "note", "unit", "x-y", "straße", "is it?", "deep", "next")
_WORDS = ("red", "blue", "C", 'with "quotes"', "", "a/b", "日本", "true", "null", "7")


def random_schema(seed: int) -> Any:
    """An object's schema mostly; any other one at times."""
    rng = random.Random(seed)
    maker = _Maker(rng)
    schema = maker.object(3) if rng.random() < 0.85 else maker.any(3)
    if maker.uses_definition and isinstance(schema, dict):
        schema["$defs"] = {"shared": maker.shared}
    return schema


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.uses_definition = False
        self.shared = self._leaf()

    def any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds = [self._leaf, self._leaf]
        if depth:
            kinds += [
                lambda: self.object(depth - 1),
                lambda: self._array(depth - 1),
                lambda: self._union(depth - 1),
                self._reference,
            ]
        schema = rng.choice(kinds)()
        if rng.random() < 0.2:
            schema = {"description": "what it is", **schema}
        return schema

    def object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randrange(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.any(depth) for name in names},
            "required": [name for name in names if rng.random() < 0.8],
        }
        if rng.random() < 0.6:
            schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._rng.randrange(3)
        most = least + self._rng.randrange(1, 3)
        return {"type": "array", "items": self.any(depth), "minItems": least, "maxItems": most}

    def _union(self, depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.4:
            return {"anyOf": [self.any(depth), {"type": "null"}]}
        return {"anyOf": [self.any(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _reference(self) -> dict[str, Any]:
        self.uses_definition = True
        return {"$ref": "#/$defs/shared"}

    def _leaf(self) -> dict[str, Any]:
        rng = self._rng
        low = rng.randrange(-5, 50)
        return rng.choice(
            [
                lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 500)},
                lambda: {"type": "integer", "exclusiveMinimum": low, "maximum": low + 9},
                lambda: {"type": "number", "minimum": low, "maximum": low + 2.5},
                lambda: {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 5},
                lambda: {"type": "boolean"},
                lambda: {"type": "null"},
                lambda: {"type": "string", "maxLength": rng.randrange(1, 12)},
                lambda: {"type": "string", "minLength": 2, "maxLength": rng.randrange(2, 9)},
                lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
                lambda: {"type": "string", "format": rng.choice(("date", "time", "ipv4", "uuid"))},
                lambda: {"enum": rng.sample(_WORDS, rng.randrange(1, 5))},
                lambda: {"enum": [rng.choice(_WORDS), 3, None, 2.5, {"a": [1]}]},
                lambda: {"const": rng.choice(_WORDS)},
                lambda: {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
            ]
        )()


_PATTERNS = (
    r"^[A-Z]{3}-\d{2}$",
    r"^\w{1,6}$",
    r"^(yes|no|may\s?be)$",
    r"^[^\s/]{2,5}$",
    r"^é+x{0,3}$",
)

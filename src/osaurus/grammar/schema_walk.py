"""The schemas inside a schema, each with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("additionalProperties", "items")


class SchemaProblem(ValueError):
    """A schema that cannot be enforced: `pointer` is the place, `words` what is wrong there."""

    def __init__(self, pointer: str, words: str) -> None:
        super().__init__(f"{pointer}: {words}")
        self.pointer = pointer
        self.words = words


@dataclass(frozen=True, slots=True)
class Node:
    """One schema; `pointer` is a JSON pointer with `#` before it."""

    pointer: str
    value: Any
    depth: int

    def at(self, *steps: str | int) -> str:
        return self.pointer + "".join(f"/{escaped(str(step))}" for step in steps)


def escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def children(node: Node) -> Iterator[Node]:
    """The schemas right below. What is not shaped as it should be has none."""
    value, depth = node.value, node.depth + 1
    for keyword in _MAPS:
        inner = value.get(keyword)
        if isinstance(inner, Mapping):
            for name, each in inner.items():
                yield Node(node.at(keyword, name), each, depth)
    for keyword in _LISTS:
        inner = value.get(keyword)
        if isinstance(inner, list):
            for i, each in enumerate(inner):
                yield Node(node.at(keyword, i), each, depth)
    for keyword in _SINGLES:
        if keyword in value and not isinstance(value[keyword], list):
            yield Node(node.at(keyword), value[keyword], depth)


def resolve(reference: str, root: Any) -> Any:
    """What a local reference names; None for anything else."""
    if not reference.startswith("#"):
        return None
    found = root
    steps = reference[1:].split("/")
    if steps[0]:
        return None
    for step in steps[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found if isinstance(found, Mapping | bool) else None

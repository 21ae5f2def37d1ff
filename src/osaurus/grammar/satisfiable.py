"""Schemas that no finite value satisfies: an answer to one would never end.

A schema has an end when some value of it needs only schemas that have one. The set is the least
fixed point of that rule; what is not in it is reported by its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osaurus.grammar.schema_walk import Node, SchemaProblem, resolve

_EVERY_TYPE = ("string", "integer", "number", "boolean", "object", "array", "null")


def first_without_end(nodes: Sequence[Node], root: Any) -> tuple[str, str] | None:
    """The place of a schema that no value satisfies, and why. Raises `SchemaProblem` for a
    reference that leads nowhere."""
    for node in nodes:
        if "$ref" not in node.value:
            continue
        reference = node.value["$ref"]
        if not isinstance(reference, str) or resolve(reference, root) is None:
            raise SchemaProblem(
                node.at("$ref"), f"{str(reference)[:200]!r} names no schema in this one"
            )
    ending = _Ending(root)
    grows = True
    while grows:
        grows = False
        for node in reversed(nodes):
            if id(node.value) not in ending.known and ending.holds(node.value):
                ending.known.add(id(node.value))
                grows = True
    endless = [node for node in nodes if id(node.value) not in ending.known]
    if not endless:
        return None
    for node in reversed(endless):
        if "$ref" in node.value:
            return node.at("$ref"), "leads back to itself with no way to end"
    return endless[-1].pointer, "no value satisfies it"


class _Ending:
    def __init__(self, root: Any) -> None:
        self._root = root
        self.known: set[int] = set()

    def _is_known(self, schema: Any) -> bool:
        return schema if isinstance(schema, bool) else id(schema) in self.known

    def holds(self, value: Mapping[str, Any]) -> bool:
        if "$ref" in value and not self._is_known(resolve(value["$ref"], self._root)):
            return False
        if not all(map(self._is_known, value.get("allOf", ()))):
            return False
        for union in ("anyOf", "oneOf"):
            if union in value and not any(map(self._is_known, value[union])):
                return False
        if "enum" in value or "const" in value:
            return True
        named = value.get("type", _EVERY_TYPE)
        names = [named] if isinstance(named, str) else named
        return any(self._has_value(value, name) for name in names)

    def _has_value(self, value: Mapping[str, Any], name: str) -> bool:
        if name == "object":
            declared, others = value.get("properties", {}), value.get("additionalProperties", True)
            return all(
                self._is_known(declared.get(key, others)) for key in value.get("required", ())
            )
        if name == "array":
            first = value.get("prefixItems", [])
            needed = int(value.get("minItems", 0))
            listed = all(map(self._is_known, first[:needed]))
            return listed and (needed <= len(first) or self._is_known(value.get("items", True)))
        return True

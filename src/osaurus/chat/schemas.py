"""Tool schemas as chat templates see them: a plain copy of what the client sent.

Templates test `type == 'string'` and walk `properties`; real schemas have lists of types, unions,
references. The copy has one type everywhere and no references; the original, which is never
touched, goes on to type and to check arguments. A schema that was plain comes out equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from osaurus.types.chat import Tool

#: Beyond these a copy says `object` and no more: references can multiply a schema without end.
_MAX_DEPTH = 48
_MAX_NODES = 20_000

_UNIONS = ("anyOf", "oneOf", "allOf")
_DEFINITIONS = ("$defs", "definitions")


def tool_views(
    tools: Sequence[Tool], *, describes_tools: bool = False, describes_parameters: bool = False
) -> list[dict[str, Any]]:
    """The tools in OpenAI's wrapping, their schemas made plain.

    A missing description stays missing, unless the template joins it to other text: then
    `describes_tools` or `describes_parameters` put an empty one.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **(
                    {"description": tool.description} if tool.description or describes_tools else {}
                ),
                "parameters": plain_schema(
                    tool.parameters, describes_parameters=describes_parameters
                ),
            },
        }
        for tool in tools
    ]


def plain_schema(
    schema: Mapping[str, Any], *, describes_parameters: bool = False
) -> dict[str, Any]:
    """A copy for templates. The same input gives the same output in every process."""
    if not schema:
        return {"type": "object", "properties": {}}
    return _Copier(schema, describes_parameters=describes_parameters).copy(schema, 0, ())


def tools_in_words(tools: Sequence[Tool], *, must_call: bool) -> str:
    """What a system message says of tools where the template itself has no place for them."""
    listed = "\n".join(json.dumps(view, ensure_ascii=False) for view in tool_views(tools))
    duty = (
        "Now call one of these functions."
        if must_call
        else "Call a function only when the answer needs it; else answer in plain words."
    )
    return (
        "You can call functions. Each line between <tools> and </tools> describes one:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "A call is a JSON object with the function's name and its arguments, written as\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>\n' + duty
    )


class _Copier:
    def __init__(self, root: Mapping[str, Any], *, describes_parameters: bool) -> None:
        self._root = root
        self._describes_parameters = describes_parameters
        self._num_nodes = 0

    def copy(self, schema: Any, depth: int, path: tuple[str, ...]) -> dict[str, Any]:
        """`path` are the references being followed: one that comes again is a cycle."""
        self._num_nodes += 1
        if not isinstance(schema, Mapping) or not schema:
            return {"type": "string"}
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            return {"type": "object"}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self._target(reference)
            if target is not None:
                if reference in path:
                    return {"type": "object"}
                beside = {key: value for key, value in schema.items() if key != "$ref"}
                return self.copy({**target, **beside}, depth + 1, (*path, reference))
        return self._copy_keys(_without_null_union(schema), depth, path)

    def _copy_keys(
        self, schema: Mapping[str, Any], depth: int, path: tuple[str, ...]
    ) -> dict[str, Any]:
        kind, is_nullable = _type_of(schema)
        is_nullable = is_nullable or schema.get("nullable") is True
        copy: dict[str, Any] = {}
        if "type" not in schema:
            copy["type"] = kind
        for key, value in schema.items():
            if key == "type":
                copy["type"] = kind
            elif value is None and key not in ("default", "const"):
                continue
            elif key in _DEFINITIONS and isinstance(value, Mapping):
                continue  # every reference to them is inlined
            elif key == "properties" and isinstance(value, Mapping):
                copy[key] = {
                    name: self._property(each, depth + 1, path) for name, each in value.items()
                }
            elif key in _UNIONS and isinstance(value, list):
                copy[key] = [self.copy(each, depth + 1, path) for each in value]
            elif key == "items":
                copy[key] = (
                    [self.copy(each, depth + 1, path) for each in value]
                    if isinstance(value, list)
                    else self.copy(value, depth + 1, path)
                )
            elif key == "additionalProperties":
                if isinstance(value, Mapping):
                    copy[key] = self.copy(value, depth + 1, path)
            elif key in ("parameters", "response") and isinstance(value, Mapping):
                copy[key] = self.copy(value, depth + 1, path)
            elif key == "enum" and isinstance(value, list) and is_nullable:
                copy[key] = [each for each in value if each is not None and each != "null"]
            else:
                copy[key] = value
        if is_nullable:
            copy["nullable"] = True
        return copy

    def _property(self, schema: Any, depth: int, path: tuple[str, ...]) -> dict[str, Any]:
        copy = self.copy(schema, depth, path)
        return copy if not self._describes_parameters else {"description": "", **copy}

    def _target(self, reference: str) -> Mapping[str, Any] | None:
        """What a reference into this same document points at."""
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in filter(None, reference[1:].split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
        return found if isinstance(found, Mapping) else None


def _type_of(schema: Mapping[str, Any]) -> tuple[str, bool]:
    """One type word, and whether null was among the types."""
    declared = schema.get("type")
    words = [declared] if isinstance(declared, str) else declared
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        is_nullable = "null" in words
        for word in words:
            if word != "null":
                return word, is_nullable
        return _inferred(schema), is_nullable
    return _inferred(schema), False


def _inferred(schema: Mapping[str, Any]) -> str:
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else "string"


def _without_null_union(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`anyOf` of one schema and null, as Pydantic writes an optional field, as that schema."""
    for key in ("anyOf", "oneOf"):
        members = schema.get(key)
        if not isinstance(members, list) or "type" in schema:
            continue
        others = [each for each in members if not _is_null(each)]
        if len(others) == 1 and len(others) < len(members) and isinstance(others[0], Mapping):
            beside = {name: value for name, value in schema.items() if name != key}
            return {**others[0], **beside, "nullable": True}
    return schema


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") in ("null", ["null"])

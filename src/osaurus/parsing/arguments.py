"""Tool arguments: which types a schema admits, text to those types, and what does not fit.

Typing turns the text a model wrote into JSON values of the declared types; it never fills a
default, drops a key or clamps. Validation only reports: what to do about an argument that
breaks its schema is the caller's decision. Schemas come from clients, so any shape is met
without raising, and no reference is ever fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema_rs
import regex

from osaurus.parsing.python_values import parse_python
from osaurus.parsing.source import Malformed
from osaurus.parsing.values import MAX_NUMBER, finite, parse_json
from osaurus.types.chat import Tool

#: How deep values are followed into their schema when strings are typed.
_MAX_HOPS = 16
_INTEGER = regex.compile(r"[+-]?[0-9]+")
_NUMBER = regex.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})

#: How an argument written as text is read.
#: text: one line break trimmed at each end; undeclared arguments stay text.
#: loose: stripped; an undeclared argument is JSON, else a Python literal, else text.
TextMode = Literal["text", "loose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentProblem:
    """One way in which arguments break their tool's schema."""

    pointer: str  #: JSON pointer to the argument
    keyword: str  #: the schema keyword that is violated
    message: str


def admitted_types(schema: object, root: object = None) -> frozenset[str]:
    """The JSON types that `schema` allows, unions and local references followed.

    Empty when it names none. `root` is what `#/...` references start from.
    """
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        # Each node once: references may form cycles, and unions of them explode.
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        named = node.get("type")
        types.update(
            name
            for name in _listed([named] if isinstance(named, str) else named)
            if isinstance(name, str) and name in _JSON_TYPES
        )
        if node.get("nullable") is True:
            types.add("null")
        for union in ("anyOf", "oneOf", "allOf"):
            waiting.extend(_listed(node.get(union)))
        if "$ref" in node:
            waiting.append(_resolved(node["$ref"], root))
        if named is None:
            types.update(map(_type_of, _listed(node.get("enum"))))
            if "const" in node:
                types.add(_type_of(node["const"]))
    return frozenset(types)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for name, kind in (("boolean", bool), ("integer", int), ("number", float), ("string", str)):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else "array"


def _resolved(reference: object, root: object) -> object:
    """The schema a local JSON pointer names; None for anything else."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def typed(text: str, schema: object, root: object = None) -> Any:
    """`text` as the first type that `schema` admits and it fits; else `text` itself."""
    types = admitted_types(schema, root)
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return None
    wanted = types - {"null"}
    if not wanted - {"string"}:
        return text
    if wanted & {"integer", "number"} and _INTEGER.fullmatch(bare) and len(bare) < MAX_NUMBER:
        return int(bare)
    if "number" in wanted and _NUMBER.fullmatch(bare):
        try:
            return finite(bare)
        except Malformed:
            return text
    if "boolean" in wanted and bare.lower() in ("true", "1", "false", "0"):
        return bare.lower() in ("true", "1")
    for name, kind in (("object", dict), ("array", list)):
        if name in wanted:
            value = literal(bare)
            if isinstance(value, kind):
                return value
    return text


def literal(text: str) -> Any:
    """JSON, else a Python literal, else the text."""
    for parse in (parse_json, parse_python):
        try:
            return parse(text)
        except Malformed:
            continue
    return text


def trim_edge_breaks(text: str) -> str:
    """Without one line break at each end; further ones and other blanks are data."""
    if text.startswith("\r\n"):
        text = text[2:]
    elif text.startswith("\n"):
        text = text[1:]
    if text.endswith("\r\n"):
        return text[:-2]
    return text[:-1] if text.endswith("\n") else text


def restored(value: Any, schema: object, root: object = None, hops: int = _MAX_HOPS) -> Any:
    """`value` with its strings typed wherever their schema excludes strings.

    For notations that may write every value as a string. Containers are followed through
    `properties` and `items`.
    """
    if not isinstance(schema, Mapping) or not hops:
        return value
    if isinstance(value, str):
        types = admitted_types(schema, root)
        return typed(value, schema, root) if types and "string" not in types else value
    if "$ref" in schema:
        return restored(value, _resolved(schema["$ref"], root), root, hops - 1)
    if isinstance(value, dict) and isinstance(schema.get("properties"), Mapping):
        inner = schema["properties"]
        return {key: restored(each, inner.get(key), root, hops - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [restored(each, schema.get("items"), root, hops - 1) for each in value]
    return value


class Toolset:
    """The tools of one request: names as offered, declared arguments, validation."""

    __slots__ = ("_folded", "_tools", "_validators")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._folded = {name.casefold(): name for name in reversed(self._tools)}
        self._validators: dict[str, jsonschema_rs.Validator | None] = {}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def resolve(self, name: str) -> str | None:
        """The offered spelling of `name`, which may differ by case; None if not offered."""
        return name if name in self._tools else self._folded.get(name.casefold())

    def schema(self, name: str) -> Mapping[str, Any]:
        tool = self._tools.get(name)
        return tool.parameters if tool is not None else {}

    def declared(self, name: str) -> Mapping[str, Any]:
        """The argument schemas of a tool by argument name; empty when it declares none."""
        properties = self.schema(name).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def required(self, name: str) -> tuple[str, ...]:
        required = _listed(self.schema(name).get("required"))
        return tuple(each for each in required if isinstance(each, str))

    def from_text(self, name: str, key: str, text: str, mode: TextMode) -> Any:
        """The value of an argument that the model wrote as text."""
        declared = self.declared(name)
        text = text.strip() if mode == "loose" else trim_edge_breaks(text)
        if key in declared:
            return typed(text, declared[key], self.schema(name))
        return literal(text) if mode == "loose" else text

    def restore(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments whose strings are typed where the schema excludes strings."""
        return restored(dict(arguments), self.schema(name), self.schema(name))

    def problems(self, name: str, arguments: Mapping[str, Any]) -> tuple[ArgumentProblem, ...]:
        """How `arguments` break the schema of tool `name`, as offered; empty when they fit."""
        if name not in self._validators:
            self._validators[name] = _validator(self.schema(name))
        validator = self._validators[name]
        if validator is None:
            return ()
        return tuple(map(_problem, validator.iter_errors(dict(arguments))))


def argument_problems(tool: Tool, arguments: Mapping[str, Any]) -> tuple[ArgumentProblem, ...]:
    """How `arguments` break `tool`'s schema. A schema that is itself invalid checks nothing."""
    return Toolset([tool]).problems(tool.name, arguments)


def _validator(schema: Mapping[str, Any]) -> jsonschema_rs.Validator | None:
    try:
        return jsonschema_rs.validator_for(
            dict(schema),
            retriever=_refuse,
            # A client's pattern must not be able to stall the thread it runs on.
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=10_000),
        )
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def _refuse(uri: str) -> Any:
    raise ValueError(f"references are not fetched: {uri}")


def _problem(error: jsonschema_rs.ValidationError) -> ArgumentProblem:
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in error.instance_path)
    return ArgumentProblem(
        pointer="".join(f"/{step}" for step in steps),
        keyword=next((str(s) for s in reversed(error.schema_path) if isinstance(s, str)), ""),
        message=error.message,
    )

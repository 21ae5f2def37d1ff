"""Whether a JSON Schema can be enforced, and the form of it that is.

Nothing is ignored in silence: what no mask can enforce is refused by its place, as a JSON
pointer, before a token is generated. Supported is what `KEYWORDS` lists; beside it only
annotations may stand. `satisfiable.py` finds what has no end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from osaurus.grammar.satisfiable import first_without_end
from osaurus.grammar.schema_walk import Node, SchemaProblem, children, escaped, resolve

MAX_SCHEMA_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_NODES = 10_000
MAX_ENUM = 1024
MAX_ANY_OF = 128
MAX_PATTERN = 4096

TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
        "uri",
    }
)  # fmt: skip
#: Keywords that say something to people and nothing about a value.
ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly",
        "writeOnly", "$comment", "$schema", "$id", "id", "$vocabulary", "contentEncoding",
        "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml",
    }
)  # fmt: skip

#: One blank behind a comma or a colon, or none, and no other white space: unbounded white space
#: is where small models get lost, and every blank is a token's time.
JSON_LAYOUT = {
    "item_separator": r",\x20?",
    "key_separator": r":\x20?",
    "whitespace_flexible": False,
}


def _whole(value: Any) -> str | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_whole = is_whole or (isinstance(value, float) and value.is_integer())
    return None if is_whole and value >= 0 else "must be a whole number of at least 0"


def _number(value: Any) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and math.isfinite(value) else "must be a number"


def _positive(value: Any) -> str | None:
    return _number(value) or (None if value > 0 else "must be greater than 0")


def _type(value: Any) -> str | None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        return f"must be one or several of {', '.join(sorted(TYPES))}"
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            return f"{str(name)[:40]!r} is no type; it must be one of {', '.join(sorted(TYPES))}"
    return "names a type twice" if len(set(names)) < len(names) else None


def _names(value: Any) -> str | None:
    fine = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if fine else "must be a list of names"


def _enum(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of at least one value"
    return f"holds {len(value)} values, more than {MAX_ENUM}" if len(value) > MAX_ENUM else None


def _union(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of at least one schema"
    return (
        f"holds {len(value)} schemas, more than {MAX_ANY_OF}" if len(value) > MAX_ANY_OF else None
    )


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "must be an object of schemas"


def _items(value: Any) -> str | None:
    return "must be one schema; a list of them is prefixItems" if isinstance(value, list) else None


def _list(value: Any) -> str | None:
    return None if isinstance(value, list) else "must be a list of schemas"


def _format(value: Any) -> str | None:
    fine = isinstance(value, str) and value in FORMATS
    return (
        None if fine else f"{str(value)[:40]!r} is not supported; use {', '.join(sorted(FORMATS))}"
    )


def _pattern(value: Any) -> str | None:
    if not isinstance(value, str):
        return "must be a regular expression"
    if len(value) > MAX_PATTERN:
        return f"holds {len(value)} characters, more than {MAX_PATTERN}"
    return expression_problem(value)


def _patterns(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return "must be an object of schemas"
    found = ((key, _pattern(key)) for key in value)
    return next((f"{key[:80]!r} {problem}" for key, problem in found if problem), None)


def _anything(value: Any) -> str | None:
    return None


#: What may be said about a value, and what is wrong with how it is said.
KEYWORDS: Mapping[str, Callable[[Any], str | None]] = {
    "type": _type, "enum": _enum, "const": _anything, "$ref": _anything,
    "anyOf": _union, "oneOf": _union, "allOf": _union,
    "properties": _mapping, "patternProperties": _patterns, "additionalProperties": _anything,
    "required": _names, "minProperties": _whole, "maxProperties": _whole,
    "items": _items, "prefixItems": _list, "minItems": _whole, "maxItems": _whole,
    "minLength": _whole, "maxLength": _whole, "pattern": _pattern, "format": _format,
    "minimum": _number, "maximum": _number, "exclusiveMinimum": _number,
    "exclusiveMaximum": _number, "multipleOf": _positive,
}  # fmt: skip

#: Where schemas are kept that say nothing by themselves.
_PLACES = {"$defs": _mapping, "definitions": _mapping}

_PAIRS = (
    ("minItems", "maxItems"),
    ("minLength", "maxLength"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)


def checked_schema(schema: Any, *, lenient: bool = False) -> Mapping[str, Any] | bool:
    """The schema in the form that is enforced. Raises `SchemaProblem`.

    `lenient`: what no mask can enforce is left out instead of refused, for schemas that
    clients write without asking for strictness. Faults are refused all the same.
    """
    if schema is False:
        raise SchemaProblem("#", "no value satisfies it")
    nodes = list(_nodes(schema))
    left_out: set[tuple[int, str]] = set()
    for node in nodes:
        for keyword, words in _problems_of(node):
            if not lenient or keyword not in _OMITTABLE | node.value.keys() - KEYWORDS.keys():
                raise SchemaProblem(node.at(keyword), words)
            left_out.add((id(node.value), keyword))
    if without := first_without_end(nodes, schema):
        raise SchemaProblem(*without)
    is_closed = not any(map(_joins_objects, nodes))
    return _enforced(schema, left_out, is_closed)


#: What a lenient check leaves out where it cannot be enforced.
_OMITTABLE = frozenset({"pattern", "patternProperties", "format", "minProperties"})


def _nodes(schema: Any) -> Iterator[Node]:
    """Every schema in `schema`, each once, parents first. Checks the limits of size."""
    waiting = [Node("#", schema, 0)]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node.pointer in seen:
            continue
        seen.add(node.pointer)
        if isinstance(node.value, bool):
            continue
        if not isinstance(node.value, Mapping):
            raise SchemaProblem(node.pointer, "must be a schema: an object, true or false")
        if len(seen) > MAX_NODES:
            raise SchemaProblem(node.pointer, f"is past the limit of {MAX_NODES} schemas in one")
        if node.depth > MAX_DEPTH:
            raise SchemaProblem(node.pointer, f"is nested more than {MAX_DEPTH} deep")
        yield node
        waiting.extend(reversed(list(children(node))))
        if isinstance(reference := node.value.get("$ref"), str):
            target = resolve(reference, schema)
            # A target in no place of a schema's own is checked where it is used.
            if target is not None and not isinstance(target, bool):
                waiting.append(Node(_normal(reference), target, node.depth))


def _normal(reference: str) -> str:
    return reference.rstrip("/") or "#"


def _problems_of(node: Node) -> Iterator[tuple[str, str]]:
    """Keywords of a node and what is wrong with them."""
    value = node.value
    for keyword, given in value.items():
        if check := KEYWORDS.get(keyword) or _PLACES.get(keyword):
            if words := check(given):
                yield keyword, words
        elif keyword not in ANNOTATIONS and not keyword.startswith("x-"):
            yield keyword, "is not supported"
    if "$id" in value and node.pointer != "#":
        yield "$id", "is not supported inside a schema"
    for low, high in _PAIRS:
        if _both(value, low, high) and value[low] > value[high]:
            yield low, f"is {value[low]}, more than {high}, {value[high]}"
    # Keys that a model makes up may repeat, and then count once.
    needed = len(set(value.get("required") or ())) if _names(value.get("required")) is None else 0
    if (
        _whole(value.get("minProperties")) is None
        and value["minProperties"] > max(1, needed)
        and not _names(value.get("required", []))
    ):
        yield "minProperties", f"above the number of required names, {needed}, is not supported"


def _both(value: Mapping[str, Any], *keywords: str) -> bool:
    return all(k in value and _number(value[k]) is None for k in keywords)


@lru_cache(maxsize=256)
def expression_problem(pattern: str) -> str | None:
    """Why an expression cannot be enforced; None when it can."""
    from llguidance import LLMatcher

    failed, words = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_regex(pattern))
    if not failed:
        return None
    lines = [line.strip() for line in words[0].splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return f"cannot be enforced: {told.removeprefix('error:').strip()[:200]}"


def schema_text(schema: Mapping[str, Any] | bool) -> str:
    """A checked schema as llguidance takes it."""
    options = {"x-guidance": JSON_LAYOUT}
    described = schema if isinstance(schema, Mapping) else {}
    return json.dumps({**described, **options}, ensure_ascii=False)


def _joins_objects(node: Node) -> bool:
    """Whether several schemas describe one object here, so that none of them knows all its
    names."""
    value = node.value
    if "allOf" in value:
        return True
    if "$ref" in value:
        return bool(value.keys() & KEYWORDS.keys() - {"$ref"})
    is_union = bool(value.keys() & {"anyOf", "oneOf"})
    return is_union and bool(value.keys() & {"properties", "required", "additionalProperties"})


_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def _enforced(value: Any, left_out: set[tuple[int, str]], is_closed: bool) -> Any:
    """A copy without what is left out, and with every object closed that lists its names and
    leaves open whether others may follow: such an answer always satisfies the schema too."""
    if isinstance(value, list):
        return [_enforced(each, left_out, is_closed) for each in value]
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for keyword, given in value.items():
        if (id(value), keyword) in left_out or keyword in ("$id", "$schema", "id"):
            continue
        if keyword in ("enum", "const", "default", "examples", "required"):
            found[keyword] = given
        elif keyword in _MAPS and isinstance(given, Mapping):
            found[keyword] = {k: _enforced(v, left_out, is_closed) for k, v in given.items()}
        else:
            found[keyword] = _enforced(given, left_out, is_closed)
    if is_closed and _lists_its_names(value):
        found["additionalProperties"] = False
    return found


def _lists_its_names(value: Mapping[str, Any]) -> bool:
    names = value.get("properties")
    if not isinstance(names, Mapping) or not names:
        return False
    if value.keys() & {"additionalProperties", "patternProperties", "minProperties"}:
        return False
    return set(value.get("required") or ()) <= names.keys()


def part_of(root: Mapping[str, Any], *steps: str) -> Mapping[str, Any]:
    """One schema inside `root` as a schema of its own, its references leading where they did."""
    pointer = "".join(f"/{escaped(step)}" for step in steps)
    moved = _moved({key: value for key, value in root.items() if key != "required"})
    return {"$ref": f"#/$defs/root{pointer}", "$defs": {"root": moved}}


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: f"#/$defs/root{each[1:]}"
        if key == "$ref" and isinstance(each, str)
        else each
        if key in ("enum", "const", "default", "examples")
        else _moved(each)
        for key, each in value.items()
    }

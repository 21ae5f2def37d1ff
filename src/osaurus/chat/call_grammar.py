"""A family's way of writing calls, and a request's tools, as rules of a grammar.

In: a `CallSyntax`, tools, checked parameter schemas. Out: an expression that is one or more
calls with arguments that their schemas accept. What a notation cannot say without ambiguity
raises `NotWritable`; the caller then leaves the model to write calls by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osaurus.grammar.schema import KEYWORDS, part_of
from osaurus.grammar.schema_walk import resolve
from osaurus.grammar.text import GrammarText, regex_literal, without
from osaurus.grammar.vocabulary import quoted
from osaurus.parsing.arguments import admitted_types
from osaurus.parsing.call_syntax import INDEX, CallSyntax, Parameter
from osaurus.types.chat import Tool

_PYTHON_STRING = r"""("([^"\\\n\r]|\\[nrt"'\\])*"|'([^'\\\n\r]|\\[nrt"'\\])*')"""
_KEY_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")
_PYTHON_KEYS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class NotWritable(Exception):
    """This tool cannot be written in this notation for sure."""


def calls_expression(
    text: GrammarText,
    syntax: CallSyntax,
    tools: Sequence[tuple[Tool, Mapping[str, Any]]],
    *,
    only_one: bool,
) -> str:
    """One call or more, to these tools with their checked schemas. Raises `NotWritable`."""
    calls = [_Call(text, syntax, tool, schema).expression() for tool, schema in tools]
    call = text.rule(" | ".join(calls))
    parts = [_literal(text, syntax.begin), call]
    if not (only_one or syntax.is_single):
        parts.append(f"({_literal(text, syntax.between)} {call})*")
    return text.rule(" ".join(filter(None, [*parts, _literal(text, syntax.end)])))


def _literal(text: GrammarText, written: str) -> str:
    """A text of the notation; `INDEX` in it is a number."""
    pieces = [text.literal(piece) for piece in written.split(INDEX)]
    return " /[0-9]{1,4}/ ".join(pieces).strip()


class _Call:
    """One tool's call."""

    def __init__(
        self, text: GrammarText, syntax: CallSyntax, tool: Tool, schema: Mapping[str, Any]
    ) -> None:
        self._text = text
        self._syntax = syntax
        self._schema = schema
        self._name = tool.name

    def expression(self) -> str:
        syntax = self._syntax
        if not re.fullmatch(syntax.names, self._name):
            raise NotWritable(f"the name {self._name!r}")
        name = json.dumps(self._name, ensure_ascii=False)[1:-1] if syntax.is_quoted else self._name
        parts = (
            _literal(self._text, syntax.open + name + syntax.middle),
            self._arguments(),
            _literal(self._text, syntax.close),
        )
        return self._text.rule(" ".join(filter(None, parts)))

    def _arguments(self) -> str:
        style = self._syntax.arguments
        if style == "json":
            return self._text.json(self._schema)
        if style == "tags":
            return " ".join(
                each if needed else f"({each})?"
                for each, needed in self._written(_KEY_NAMES, self._tag)
            )
        if style == "python":
            return self._listed(self._written(_PYTHON_KEYS, self._keyword), quoted(", "))
        written = self._written(_KEY_NAMES, self._member)
        return f"{quoted('{')} {self._listed(written, quoted(','))} {quoted('}')}"

    def _written(
        self, keys: re.Pattern[str], write: Callable[[str, Any], str]
    ) -> list[tuple[str, bool]]:
        """Every argument as a rule, in order, and whether it is required."""
        schema = _plain_object(self._schema)
        declared = dict(schema.get("properties", {}))
        required = schema.get("required", ())
        for name in required:
            declared.setdefault(name, {})
        found: list[tuple[str, bool]] = []
        for name, argument in declared.items():
            if argument is False:
                continue
            if not keys.fullmatch(name):
                if name in required:
                    raise NotWritable(f"the argument {name!r}")
                continue
            rule = self._text.rule(write(name, {} if argument is True else argument))
            found.append((rule, name in required))
        return found

    def _listed(self, written: Sequence[tuple[str, bool]], separator: str) -> str:
        """Arguments with a separator between those that are there."""
        text = self._text
        later = '""'
        first = '""'
        for rule, needed in reversed(written):
            whole = f"{rule} {later}"
            first = text.rule(whole if needed else f"{whole} | {first}")
            later = text.rule(
                f"{separator} {whole}" if needed else f"({separator} {rule})? {later}"
            )
        return first

    def _json(self, name: str) -> str:
        return self._text.json(part_of(self._schema, "properties", name))

    # -- one argument

    def _tag(self, name: str, argument: Any) -> str:
        parameter = self._syntax.parameter
        if parameter is None:
            raise NotWritable("arguments without a notation")
        kind = _Kind(argument, self._schema)
        head = parameter.open + name
        if kind.is_text:
            value = self._raw_text(kind, parameter)
            return f"{_literal(self._text, head + parameter.middle)} {value}"
        middle = parameter.json_middle or parameter.middle
        close = _literal(self._text, parameter.close)
        return f"{_literal(self._text, head + middle)} {self._json(name)} {close}"

    def _raw_text(self, kind: _Kind, parameter: Parameter) -> str:
        """A string as it is, and what ends it."""
        close = parameter.close
        edge = r"\s" if parameter.is_stripped else r"[\r\n]"
        stops = (*parameter.stops, close)
        if kind.choices is not None:
            for choice in kind.choices:
                if any(stop in choice for stop in stops) or re.match(
                    rf"{edge}|[\s\S]*{edge}\Z", choice
                ):
                    raise NotWritable("a choice that the notation cannot hold")
            options = " | ".join(quoted(choice) if choice else '""' for choice in kind.choices)
            return f"({options}) {_literal(self._text, close)}"
        body = without(stops)
        if kind.is_bounded:
            inner = f"(/(?s:{kind.pattern})/ & {body})"
            body = f"({inner} & ~/{edge}(?s:.*)/ & ~/(?s:.*){edge}/)"
        if self._text.vocabulary.control_id(close.strip()) is None:
            return self._text.terminal(f"{body} {quoted(close)}")
        return f"{self._text.terminal(body)} {_literal(self._text, close)}"

    def _keyword(self, name: str, argument: Any) -> str:
        return f"{quoted(name + '=')} {self._python(name, _Kind(argument, self._schema))}"

    def _python(self, name: str, kind: _Kind) -> str:
        if kind.types == frozenset({"boolean"}) and not kind.is_listed:
            return '("True" | "False")'
        if kind.is_text and kind.choices is None and not kind.is_bounded:
            return self._text.terminal(f"/{_PYTHON_STRING}/")
        return self._json(name)

    def _member(self, name: str, argument: Any) -> str:
        kind, quote = _Kind(argument, self._schema), self._syntax.quote
        head = quoted(f"{name}:")
        if not kind.is_text:
            return f"{head} {self._json(name)}"
        mark = _literal(self._text, quote)
        if kind.choices is not None:
            if any(quote in choice for choice in kind.choices):
                raise NotWritable("a choice that the notation cannot hold")
            options = " | ".join(quoted(choice) if choice else '""' for choice in kind.choices)
            return f"{head} {mark} ({options}) {mark}"
        body = without([quote])
        if kind.is_bounded:
            body = f"(/(?s:{kind.pattern})/ & {body})"
        if self._text.vocabulary.control_id(quote) is None:
            return f"{head} {mark} {self._text.terminal(f'{body} {quoted(quote)}')}"
        return f"{head} {mark} {self._text.terminal(body)} {mark}"


class _Kind:
    """What an argument's schema admits, as far as notations that write bare text ask."""

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self.types = admitted_types(schema, root)
        plain = _followed(schema, root)
        listed = _listed_in(plain, root)
        self.is_listed = listed is not None
        #: Readers take a value of a schema without types as text.
        self.is_text = not self.types - {"null"} - {"string"} or (
            "string" in self.types and not self.is_listed
        )
        self.choices: list[str] | None = None
        if self.is_text and listed is not None:
            self.choices = [value for value in listed if isinstance(value, str)]
            if not self.choices:
                self.is_text, self.choices = False, None
        least, most = plain.get("minLength"), plain.get("maxLength")
        pattern = plain.get("pattern")
        self.is_bounded = self.is_text and (least is not None or most is not None or pattern)
        self.pattern = "" if not self.is_bounded else _bounded(least, most, pattern)


def _listed_in(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """The values of an enumeration, a union of them too; None where there is none. Raises
    `NotWritable` for a union whose strings are described in some other way."""
    if "enum" in schema or "const" in schema:
        return list(schema.get("enum", [schema.get("const")]))
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if not branches:
        return None
    followed = [_followed(each, root) for each in branches]
    if "allOf" not in schema and all(each.keys() & {"enum", "const"} for each in followed):
        return [value for each in followed for value in _listed_in(each, root) or ()]
    if any(
        "string" in admitted_types(each, root) and each.keys() & KEYWORDS.keys() - {"type"}
        for each in followed
    ):
        raise NotWritable("a union of strings that are described in several ways")
    return None


def _bounded(least: Any, most: Any, pattern: str | None) -> str:
    """An expression for strings of these lengths, or that hold what the pattern matches."""
    if pattern is None:
        return f".{{{int(least or 0)},{'' if most is None else int(most)}}}"
    if least is not None or most is not None or "|" in pattern or pattern.endswith("\\$"):
        raise NotWritable("a pattern that is not written as plain text")
    before = "" if pattern.startswith("^") else ".*"
    after = "" if pattern.endswith("$") else ".*"
    inner = regex_literal(pattern.removeprefix("^").removesuffix("$"))[1:-1]
    return f"{before}(?-s:{inner}){after}"


def _followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind references that stand alone; a nullable union's other member."""
    for _ in range(16):
        if not isinstance(schema, Mapping):
            return {}
        if isinstance(schema.get("$ref"), str):
            schema = resolve(schema["$ref"], root)
            continue
        union = schema.get("anyOf") or schema.get("oneOf") or ()
        others = [each for each in union if each != {"type": "null"}]
        if len(others) == 1:
            schema = others[0]
            continue
        single = schema.get("allOf", ())
        if len(single) == 1:
            schema = single[0]
            continue
        return schema
    return {}


def _plain_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        raise NotWritable("arguments that are no plain object")
    return schema

"""Calls written as tags: a function element that holds parameter elements with raw text.

    <function=NAME><parameter=KEY>VALUE</parameter></function>        Qwen, Nemotron, Step, ZAYA
    <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>             MiniMax

Values are not escaped, so whatever does not end a value is part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regex

from osaurus.parsing.calls import Calls
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import MAX_GAP, Cut, Reader, Source
from osaurus.parsing.values import MAX_NAME

_GAP = rf"[ \t\r\n]{{0,{MAX_GAP}}}"
_NAME_END = MarkerSet([">"])
_NAME_AHEAD = regex.compile(rf"([^<>\r\n]{{1,{MAX_NAME}}})>")
_ELEMENT_NAME_END = MarkerSet(["</name>"])
_ELEMENT_TYPE_END = MarkerSet(["</type>"])
_ELEMENT_VALUE_END = MarkerSet(["</value>"])

#: (calls, function, key, value text) -> argument
ValueReader = Callable[[Calls, str, str, str], Any]


def schema_text(calls: Calls, name: str, key: str, text: str) -> Any:
    return calls.tools.from_text(name, key, text, "text")


class XmlSyntax:
    """The tags of one family. Openers end where a name begins; `>` ends the name.

    `closers` are the wrapper's. With `has_elements` names may be elements of their own, as
    small ZAYA checkpoints write them: `<function>NAME</function>` and
    `<parameter><name>K</name><type>T</type><value>V</value></parameter>`.
    """

    def __init__(
        self,
        *,
        function: tuple[str, str],
        parameter: tuple[str, str],
        closers: tuple[str, ...],
        value: ValueReader = schema_text,
        has_elements: bool = False,
    ) -> None:
        self.function_open, self.function_close = function
        self.parameter_open, self.parameter_close = parameter
        self.closers = closers
        self.value = value
        elements = ("<function>", "<parameter>") if has_elements else ("", "")
        self.element_function, self.element_parameter = elements
        self.function_opens = tuple(filter(None, (self.function_open, elements[0])))
        self.parameter_opens = tuple(filter(None, (self.parameter_open, elements[1])))
        self.function_end = MarkerSet([self.function_close])
        self.value_stops = MarkerSet(
            [self.parameter_close, self.function_close, self.parameter_open]
        )
        opens = "|".join(map(regex.escape, self.function_opens))
        wrapped = "|".join(map(regex.escape, self.closers))
        #: What makes a function closer inside a value believable: an end, or the next call.
        self.after_function = regex.compile(rf"{_GAP}(?:{wrapped}|{opens}|\Z)")


def read_functions(source: Source, calls: Calls, syntax: XmlSyntax) -> Reader[None]:
    """Functions up to and with the wrapper's closer, if that is there."""
    yield from source.blanks()
    found = yield from source.expect(*syntax.function_opens)
    while found in syntax.function_opens:
        yield from read_function(source, calls, syntax, found)
        found = yield from source.closer(*syntax.closers, *syntax.function_opens)
    calls.is_closed = bool(found)


def read_function(source: Source, calls: Calls, syntax: XmlSyntax, opener: str) -> Reader[None]:
    """One function element behind its opener."""
    names_itself = opener == syntax.element_function
    stops = syntax.function_end if names_itself else _NAME_END
    raw, _ = yield from source.until(stops, at_most=MAX_NAME)
    name = calls.name(_unquoted(raw))
    arguments: dict[str, Any] = {}
    is_open = True
    while is_open:
        yield from source.blanks()
        if names_itself:
            # `<function>NAME</function>` is closed already: the next call or the wrapper ends it.
            if (yield from source.at(*syntax.closers, *syntax.function_opens)):
                break
            found = yield from source.expect(*syntax.parameter_opens)
        else:
            found = yield from source.expect(*syntax.parameter_opens, syntax.function_close)
        if found == syntax.function_close:
            break
        if found == syntax.element_parameter:
            key, text = yield from _read_element(source, syntax)
            arguments[key] = syntax.value(calls, name, key, text)
        else:
            is_open = yield from _read_parameters(source, calls, syntax, name, arguments)
    calls.add(name, arguments)


def _read_parameters(
    source: Source, calls: Calls, syntax: XmlSyntax, name: str, arguments: dict[str, Any]
) -> Reader[bool]:
    """A parameter behind its opener, and those whose openers ended the one before.

    A value ends at its closer; or, its closer lost, at the opener of another declared
    parameter that has no value yet; or, when the stream ends without any closer, at the
    first function closer that something believable follows. False in the last case.
    """
    declared = calls.tools.declared(name)
    raw, _ = yield from source.until(_NAME_END, at_most=MAX_NAME)
    key = _unquoted(raw)
    parts: list[str] = []
    #: Function closers inside the value: their place in the stream and in `parts`.
    ends: list[tuple[int, int]] = []
    while True:
        try:
            text, stop = yield from source.until(syntax.value_stops)
        except Cut:
            count = _last_resort(source, syntax, ends)
            if count is None:
                raise
            arguments[key] = syntax.value(calls, name, key, "".join(parts[:count]))
            return False
        parts.append(text)
        if stop == syntax.parameter_close:
            source.saved = False
            arguments[key] = syntax.value(calls, name, key, "".join(parts))
            return True
        if stop == syntax.function_close:
            ends.append((source.save(), len(parts)))
        else:
            found = yield from source.ahead(_NAME_AHEAD)
            other = _unquoted(found.group(1)) if found else ""
            if found and other in declared and other != key and other not in arguments:
                arguments[key] = syntax.value(calls, name, key, "".join(parts))
                source.pos += len(found.group())
                source.saved = False
                key, parts, ends = other, [], []
                continue
        parts.append(stop)


def _last_resort(source: Source, syntax: XmlSyntax, ends: list[tuple[int, int]]) -> int | None:
    """Go back to the first believable function closer; how many parts were before it."""
    text = source.consumed() + source.text[source.pos :]
    for place, count in ends:
        if syntax.after_function.match(text, place):
            source.restore(place)
            return count
    return None


def _read_element(source: Source, syntax: XmlSyntax) -> Reader[tuple[str, str]]:
    yield from source.blanks()
    yield from source.expect("<name>")
    key, _ = yield from source.until(_ELEMENT_NAME_END, at_most=MAX_NAME)
    yield from source.blanks()
    if (yield from source.expect("<type>", "<value>")) == "<type>":
        yield from source.until(_ELEMENT_TYPE_END, at_most=MAX_NAME)
        yield from source.blanks()
        yield from source.expect("<value>")
    text, _ = yield from source.until(_ELEMENT_VALUE_END)
    yield from source.blanks()
    yield from source.expect(syntax.parameter_close)
    return key.strip(), text


def _unquoted(raw: str) -> str:
    """A name as written in `<parameter=NAME>` or `name="NAME"`."""
    name = raw.strip()
    if len(name) > 1 and name[0] in "\"'" and name[-1] == name[0]:
        return name[1:-1].strip()
    return name

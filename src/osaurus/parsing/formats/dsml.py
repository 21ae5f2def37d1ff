"""DSML, DeepSeek V3.2 and V4: strict, because a wrong call is worse than none.

    <｜DSML｜tool_calls><｜DSML｜invoke name="N">
    <｜DSML｜parameter name="K" string="true|false">V</｜DSML｜parameter>
    </｜DSML｜invoke></｜DSML｜tool_calls>

The flag decides a value's type, not the schema. An envelope counts as a whole: one fault in it,
an unknown name or an argument that breaks its schema rejects all of it. Never from reasoning.
"""

from __future__ import annotations

from typing import Any

import regex

from osaurus.parsing.arguments import trim_edge_breaks
from osaurus.parsing.call_syntax import CallSyntax, Parameter
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import MAX_NAME, parse_json

_QUOTE = MarkerSet(['"'])


class _Tags:
    """The tags of one wrapper; V4.1 has a blank before every tag word."""

    def __init__(self, wrapper: str, blank: str) -> None:
        open_, close = f"<｜DSML｜{blank}", f"</｜DSML｜{blank}"
        self.wrapper = f"{open_}{wrapper}>"
        self.wrapper_close = f"{close}{wrapper}>"
        self.invoke = f'{open_}invoke name="'
        self.invoke_close = f"{close}invoke>"
        self.parameter = f'{open_}parameter name="'
        self.parameter_end = MarkerSet([f"{close}parameter>"])


def _read(source: Source, calls: Calls, tags: _Tags) -> Reader[None]:
    found: list[tuple[str, dict[str, Any]]] = []
    while True:
        yield from source.blanks()
        stop = yield from source.expect(tags.invoke, tags.wrapper_close)
        if stop == tags.wrapper_close:
            break
        name, arguments = yield from _read_invoke(source, calls, tags)
        if calls.tools.problems(name, arguments):
            raise Malformed("arguments break the schema")
        found.append((name, arguments))
    for name, arguments in found:
        calls.add(name, arguments)
    calls.is_closed = True


def _read_invoke(source: Source, calls: Calls, tags: _Tags) -> Reader[tuple[str, dict[str, Any]]]:
    raw, _ = yield from source.until(_QUOTE, at_most=MAX_NAME)
    name = calls.name(raw)
    # Without offered tools the envelope is only removed, so any name will do.
    if calls.tools and calls.tools.resolve(raw) is None:
        raise Malformed("the tool was not offered")
    yield from source.expect(">")
    arguments: dict[str, Any] = {}
    while True:
        yield from source.blanks()
        stop = yield from source.expect(tags.parameter, tags.invoke_close)
        if stop == tags.invoke_close:
            return name, arguments
        key, _ = yield from source.until(_QUOTE, at_most=MAX_NAME)
        yield from source.expect(' string="')
        flag = yield from source.expect('true">', 'false">')
        text, _ = yield from source.until(tags.parameter_end)
        if key in arguments:
            raise Malformed("a parameter is repeated")
        is_text = flag == 'true">'
        arguments[key] = trim_edge_breaks(text) if is_text else parse_json(text, unique=True)


def _opener(wrapper: str, blank: str = "") -> Opener:
    tags = _Tags(wrapper, blank)

    def read(source: Source, calls: Calls) -> Reader[None]:
        return _read(source, calls, tags)

    return Opener(
        marker=tags.wrapper,
        commit=regex.compile(GAP + regex.escape(tags.invoke)),
        read=read,
        closers=(tags.wrapper_close,),
        in_reasoning=False,
    )


#: V4, V3.2, drift seen on V4, V4.1.
DSML_OPENERS = (
    _opener("tool_calls"),
    _opener("function_calls"),
    _opener("toolcalls"),
    _opener("tool"),
    _opener("calls", " "),
)
DSML_ORPHANS = tuple(opener.closers[0] for opener in DSML_OPENERS)


def _syntax(wrapper: str, blank: str = "", needs: tuple[str, ...] = ()) -> CallSyntax:
    tags = _Tags(wrapper, blank)
    close = f"</｜DSML｜{blank}parameter>"
    return CallSyntax(
        begin=f"{tags.wrapper}\n",
        open=tags.invoke,
        middle='">\n',
        close=f"{tags.invoke_close}\n",
        end=tags.wrapper_close,
        arguments="tags",
        parameter=Parameter(
            open=tags.parameter,
            middle='" string="true">',
            json_middle='" string="false">',
            close=f"{close}\n",
            stops=(close,),
        ),
        needs=needs,
    )


DSML = ToolFormat(
    name="dsml",
    openers=DSML_OPENERS,
    orphans=DSML_ORPHANS,
    writes=(
        _syntax("function_calls", needs=("<｜DSML｜function_calls>",)),
        _syntax("calls", " ", needs=("<｜DSML｜ calls>",)),
        _syntax("tool_calls"),
    ),
)

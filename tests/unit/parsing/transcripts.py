"""Running the machine over text, and writing calls in each family's own notation.

The writers are an independent description of the formats: they share no code with the readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from osaurus.parsing.build import build_machine
from osaurus.parsing.pieces import OutputMachine, Rail
from osaurus.parsing.reasoning import Start
from osaurus.types.chat import Tool

#: The reasoning envelope that goes with each tool format in the golden cases.
REASONING: Mapping[str, str | None] = {
    "hunyuan": "hunyuan",
    "mistral": "bracket",
    "gemma4": "channel",
    "harmony": "harmony",
    "granite": "sentence",
    "llama3": None,
    "pythonic": None,
    "gemma": None,
}


def reasoning_of(family: str) -> str | None:
    return REASONING.get(family, "think")


@dataclass(frozen=True, slots=True)
class Outcome:
    content: str
    reasoning: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    unclosed: bool
    failed: bool

    def as_json(self) -> str:
        """A form that tells `1` from `true` and `1.0`, and keeps the order of arguments."""
        return json.dumps([self.content, self.reasoning, self.calls, self.unclosed, self.failed])


def machine_for(
    family: str,
    tools: Sequence[Tool] = (),
    *,
    thinking: bool = False,
    reasoning: str | None = "of family",
) -> OutputMachine:
    machine = build_machine(
        family,
        reasoning_of(family) if reasoning == "of family" else reasoning,
        tools=tools,
        start=Start.REASONING if thinking else Start.CONTENT,
    )
    assert machine is not None
    return machine


def separate(machine: OutputMachine, pieces: Iterable[str]) -> Outcome:
    """Feed `pieces`; check that what comes out is a partition of what went in."""
    pieces = list(pieces)
    out = [piece for text in pieces for piece in machine.push(text)]
    unclosed = machine.in_reasoning
    out += machine.finish()
    assert "".join(piece.text for piece in out) == "".join(pieces)
    return Outcome(
        content="".join(piece.text for piece in out if piece.rail is Rail.CONTENT),
        reasoning="".join(piece.text for piece in out if piece.rail is Rail.REASONING),
        calls=tuple((call.name, dict(call.arguments)) for piece in out for call in piece.calls),
        unclosed=unclosed,
        failed=machine.has_failed,
    )


def read(
    family: str,
    text: str,
    tools: Sequence[Tool] = (),
    *,
    thinking: bool = False,
    cuts: Sequence[int] | None = None,
) -> Outcome:
    """One response, whole or cut at the given places."""
    return separate(machine_for(family, tools, thinking=thinking), cut(text, cuts or ()))


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def every(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


TOOLS = (
    Tool(
        name="put_note",
        parameters={
            "type": "object",
            "properties": {
                "body": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "pinned": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "meta": {"type": "object"},
            },
            "required": ["body"],
        },
    ),
    Tool(name="list.notes", parameters={"type": "object", "properties": {}}),
)

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _each(write: Callable[[str, dict[str, Any]], str], between: str = "") -> Writer:
    return lambda calls: between.join(write(name, arguments) for name, arguments in calls)


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return _json({"name": name, key: arguments})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _tagged(tag: str) -> Writer:
    return _each(lambda n, a: f"<{tag}>\n{_object(n, a)}\n</{tag}>", "\n")


def _array(opener: str, closer: str = "") -> Writer:
    return lambda calls: f"{opener}[{', '.join(_object(*call) for call in calls)}]{closer}"


def _xml(opener: str, closer: str) -> Writer:
    def function(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<function={name}>\n{inner}</function>\n"

    return lambda calls: opener + "\n" + _each(function)(calls) + closer


def _minimax(calls: Sequence[Call]) -> str:
    def invoke(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<parameter name="{key}">{_text(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    return f"<minimax:tool_call>\n{_each(invoke)(calls)}</minimax:tool_call>"


def _pairs(arguments: dict[str, Any], suffix: str = "") -> str:
    return "".join(
        f"<arg_key{suffix}>{key}</arg_key{suffix}>\n"
        f"<arg_value{suffix}>{_text(value)}</arg_value{suffix}>\n"
        for key, value in arguments.items()
    )


def _hunyuan(suffix: str) -> Writer:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return (
            f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{_pairs(arguments, suffix)}"
            f"</tool_call{suffix}>\n"
        )

    return lambda calls: f"<tool_calls{suffix}>\n{_each(one)(calls)}</tool_calls{suffix}>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _dsml(calls: Sequence[Call]) -> str:
    def invoke(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<｜DSML｜parameter name="{key}" string="{_json(isinstance(value, str))}">'
            f"{_text(value)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'

    return f"<｜DSML｜tool_calls>\n{_each(invoke)(calls)}</｜DSML｜tool_calls>"


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        inner = (f"{quote}{key}{quote}:{_gemma_value(each, quote)}" for key, each in value.items())
        return "{" + ",".join(inner) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(each, quote) for each in value) + "]"
    return _json(value)


def _gemma(opener: str, closer: str, quote: str) -> Writer:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = ",".join(f"{key}:{_gemma_value(value, quote)}" for key, value in arguments.items())
        return f"{opener}call:{name}{{{inner}}}{closer}"

    return _each(one)


def _python(calls: Sequence[Call]) -> str:
    return (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        )
        + "]"
    )


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


#: Every notation that stands between markers, by format; the first is the usual one.
WRITERS: Mapping[str, tuple[Writer, ...]] = {
    "json": (_tagged("tool_call"), _array("<tool_call>", "</tool_call>")),
    "longcat": (_tagged("longcat_tool_call"),),
    "function_call": (_tagged("function_call"),),
    "nemotron_v2": (_array("<TOOLCALL>", "</TOOLCALL>"),),
    "llama3": (
        lambda calls: "<|python_tag|>" + "; ".join(_object(*c, key="parameters") for c in calls),
    ),
    "pythonic": (lambda calls: f"<|python_start|>{_python(calls)}<|python_end|>",),
    "xml_function": (
        _xml("<tool_call>", "</tool_call>"),
        _xml("<seed:tool_call>", "</seed:tool_call>"),
        _tagged("tool_call"),
    ),
    "nemotron": (_xml("<tool_call>", "</tool_call>"), _dsml),
    "step": (_xml("<tool_call>", "</tool_call>"),),
    "zaya_xml": (_xml("<zyphra_tool_call>", "</zyphra_tool_call>"),),
    "glm4": (
        _each(lambda n, a: f"<tool_call>{n}\n{_pairs(a)}</tool_call>", "\n"),
        _tagged("tool_call"),
    ),
    "hunyuan": (_hunyuan(""), _hunyuan(":opensource"), _array("<tool_calls>", "</tool_calls>")),
    "kimi_k2": (_kimi,),
    "deepseek_v3": (_deepseek_v3, _deepseek_v31),
    "deepseek_v31": (_deepseek_v31, _deepseek_v3),
    "dsml": (_dsml,),
    "gemma": (_gemma("<start_function_call>", "<end_function_call>", "<escape>"),),
    "gemma4": (_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),),
    "lfm2": (lambda calls: f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>",),
    "minimax_m2": (_minimax,),
    "mistral": (_mistral, _array("[TOOL_CALLS] ")),
    "granite": (_array("<tool_call>"), _array("<|tool_call|>"), _tagged("tool_call")),
}

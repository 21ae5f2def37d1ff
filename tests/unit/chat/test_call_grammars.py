"""Claims: whatever a model writes under a call grammar, the family's own parser reads as calls
that the request allows, with arguments that their schemas accept.

The model is a random walk through the mask, the hardest one there is. Conformance over every
format; a new format adds no test code.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from api.scripted_engine import ByteTokenizer, ScriptedEngine
from osaurus.chat.answer_grammar import AnswerGrammar, answer_grammar
from osaurus.chat.prompt import PreparedPrompt
from osaurus.grammar.matcher import GrammarConstraint
from osaurus.parsing.build import build_machine
from osaurus.parsing.formats import TOOL_FORMATS
from osaurus.parsing.output import OutputPipeline
from osaurus.parsing.reasoning import REASONING_FORMATS, Start
from osaurus.parsing.selection import FormatChoice
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Message, Tool
from osaurus.types.events import Chunk, Reasoning, ToolCall

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
NESTED = Tool(
    name="store",
    parameters={
        "type": "object",
        "$defs": {"id": {"type": "integer"}},
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "place": {
                "type": "object",
                "properties": {
                    "x": {"type": "number", "maximum": 1000},
                    "id": {"$ref": "#/$defs/id"},
                },
                "required": ["x", "id"],
                "additionalProperties": False,
            },
            "code": {"type": "string", "minLength": 2, "maxLength": 5},
        },
        "required": ["place", "code"],
        "additionalProperties": False,
    },
)
PING = Tool(name="ping")
TOOLS = (WEATHER, NESTED, PING)

#: Control tokens that bundles of the families have, so that both spellings of markers occur.
CONTROL = (
    "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel|>", "<|message|>", "<|constrain|>",
    "<|start|>", "<|end|>", "<|call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call|>", "<escape>",
)  # fmt: skip
PLAIN: tuple[str, ...] = ("<|im_end|>",)
#: Tokens of several bytes, so that tokens cross the edges of rules.
WORDS = ('{"', '":', '", "', '"}', "</", "tool_call>", "\n\n", "}}", "<parameter=", ' "', "é", "👍")

FAMILIES = [*TOOL_FORMATS, "harmony"]


class WordTokenizer(ByteTokenizer):
    """Bytes, a few words, and control tokens."""


def _model(
    family: str | None, control: Sequence[str] = PLAIN, reasoning: str | None = None
) -> LoadedModel:
    tokenizer = WordTokenizer(control, tuple(w for w in WORDS if w not in control))
    if family == "harmony":
        reasoning = "harmony"
    formats = FormatChoice(
        tool_format=family, tool_origin="test", reasoning=reasoning, reasoning_origin="test"
    )
    return LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=tokenizer,
        template=None,
        eos_token_ids=frozenset({tokenizer.added_tokens["<|im_end|>"]}),
        conventions=Conventions(formats=formats),
    )


def _grammar(
    model: LoadedModel,
    tools: Sequence[Tool],
    start: Start = Start.CONTENT,
    text: str = "",
    **fields: Any,
) -> AnswerGrammar | None:
    request = ChatRequest(
        model="m",
        messages=(Message(role="user", content="hi"),),
        tools=tuple(tools),
        needs_call=fields.pop("needs_call", True),
        **fields,
    )
    formats = model.conventions.formats
    prompt = PreparedPrompt(token_ids=[1], text=text, start=start, tool_format=formats.tool_format)
    return answer_grammar(model, prompt, request)


def walk(constraint: GrammarConstraint, rng: random.Random, limit: int = 1500) -> list[int] | None:
    """Random tokens that the mask allows until it ends; None when that takes too long. Bytes
    that close things get likelier, so that most walks end."""
    closing = frozenset(b'"}])>/<\n0')
    ids: list[int] = []
    while not constraint.is_finished:
        bits = np.unpackbits(constraint.masks()[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, "a mask without a token"
        ends = [token for token in allowed if token in constraint.end_token_ids]
        if ends and (len(allowed) == len(ends) or rng.random() < 0.4):
            return ids
        nearer = [token for token in allowed if token in closing or token >= 256]
        token = rng.choice(nearer if nearer and rng.random() < 0.5 else allowed)
        if token in constraint.end_token_ids:
            return ids
        constraint.commit(token)
        ids.append(token)
        if len(ids) > limit:
            return None
    return ids


def _events(model: LoadedModel, ids: Sequence[int], tools: Sequence[Tool], start: Start) -> Any:
    formats = model.conventions.formats
    machine = build_machine(formats.tool_format, formats.reasoning, tools=tools, start=start)
    output = OutputPipeline(model.tokenizer, machine=machine)
    events = [event for token in ids for event in output.push(token)]
    return events + output.finish()


def _check(model: LoadedModel, ids: Sequence[int], start: Start = Start.CONTENT) -> list[ToolCall]:
    text = b"".join(map(model.tokenizer.token_bytes, ids)).decode(errors="replace")
    events = _events(model, ids, TOOLS, start)
    calls = [event for event in events if isinstance(event, ToolCall)]
    shown = "".join(event.text for event in events if isinstance(event, Chunk))
    assert calls, text
    assert not shown.strip(), (text, shown)
    for call in calls:
        tool = next((each for each in TOOLS if each.name == call.name), None)
        assert tool is not None, text
        faults = list(jsonschema_rs.validator_for(tool.parameters).iter_errors(call.arguments))
        assert not faults, (text, call.arguments, faults[0].message)
    return calls


@pytest.mark.parametrize("control", [PLAIN, CONTROL], ids=["plain", "control"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_random_model_writes_is_a_valid_call(family: str, control: Sequence[str]) -> None:
    model = _model(family, control)
    grammar = _grammar(model, TOOLS)
    assert grammar is not None, "every format can be enforced"
    finished = 0
    for seed in range(25):
        ids = walk(grammar.fork(), random.Random(seed))
        if ids is not None:
            finished += 1
            _check(model, ids)
    assert finished >= 8


OTHER_LAYOUTS = [
    ("hunyuan", ("<tool_sep>",)),
    ("hunyuan", ("<tool_sep:opensource>",)),
    ("pythonic", ("<function_calls>",)),
    ("dsml", ("<｜DSML｜function_calls>",)),
    ("dsml", ("<｜DSML｜ calls>",)),
    ("xml_function", ("<seed:tool_call>",)),
]


@pytest.mark.parametrize(("family", "marks"), OTHER_LAYOUTS)
def test_a_layout_that_the_bundle_shows_is_used(family: str, marks: Sequence[str]) -> None:
    model = _model(family, (*PLAIN, *marks))
    grammar = _grammar(model, TOOLS)
    assert grammar is not None
    finished = 0
    for seed in range(15):
        ids = walk(grammar.fork(), random.Random(seed))
        if ids is not None:
            finished += 1
            _check(model, ids)
    assert finished >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_may_follow_each_other(family: str) -> None:
    model = _model(family, CONTROL)
    grammar = _grammar(model, [PING])
    assert grammar is not None
    found = [walk(grammar.fork(), random.Random(seed)) for seed in range(120)]
    most = max(len(_check(model, ids)) for ids in found if ids is not None)
    assert most == 1 if family == "harmony" else most > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_function_is_called_exactly_once(family: str) -> None:
    model = _model(family, CONTROL)
    grammar = _grammar(model, TOOLS, forced_tool="ping")
    one = _grammar(model, TOOLS, parallel_tool_calls=False)
    assert grammar is not None
    assert one is not None
    for seed in range(6):
        ids = walk(grammar.fork(), random.Random(seed))
        assert ids is not None
        assert [(c.name, c.arguments) for c in _check(model, ids)] == [("ping", {})]
        ids = walk(one.fork(), random.Random(seed))
        assert ids is None or len(_check(model, ids)) == 1


@pytest.mark.parametrize("control", [PLAIN, (*PLAIN, "<think>", "</think>", "[THINK]", "[/THINK]")])
@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
@pytest.mark.parametrize("start", [Start.CONTENT, Start.REASONING])
def test_thinking_comes_before_the_call(
    reasoning: str, start: Start, control: Sequence[str]
) -> None:
    model = _model("json", control, reasoning)
    grammar = _grammar(model, TOOLS, start)
    assert grammar is not None
    finished = 0
    for seed in range(12):
        ids = walk(grammar.fork(), random.Random(seed))
        if ids is None:
            continue
        finished += 1
        _check(model, ids, start)
    assert finished or start is Start.REASONING


def test_harmony_thinks_in_messages_of_their_own() -> None:
    model = _model("harmony", CONTROL)
    tokenizer = model.tokenizer
    grammar = _grammar(model, TOOLS)
    assert grammar is not None
    constraint = grammar.fork()
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}"
    )
    ids = tokenizer.encode(text, parse_special=True, add_bos=False)
    for token in ids:
        constraint.commit(token)
    assert constraint.is_finished
    calls = _check(model, ids)
    assert [call.name for call in calls] == ["ping"]
    thought = [
        e.text for e in _events(model, ids, TOOLS, Start.CONTENT) if isinstance(e, Reasoning)
    ]
    assert "".join(thought) == "hm"


def test_tools_that_a_notation_cannot_hold_are_left_to_the_model() -> None:
    odd = Tool(name="not an identifier")
    assert _grammar(_model("lfm2"), [odd]) is None
    assert _grammar(_model("json"), [odd]) is not None
    union = Tool(
        name="f",
        parameters={"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
    )
    assert _grammar(_model("xml_function"), [union]) is None
    assert _grammar(_model(None), [PING]) is None

"""A call rendered by a family's template and read back by its machine is the same call.

The templates in `tests/golden/templates` follow the formats page, one a family, quirks included.
Everything between is the real path: formats chosen from the bundle's facts, the template probed,
the conversation prepared, the start taken from the prompt's tail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.scripted_engine import ByteTokenizer, ScriptedEngine
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.prompt import PreparedPrompt, prepare_prompt
from osaurus.parsing.build import build_machine
from osaurus.parsing.pieces import Rail
from osaurus.parsing.selection import BundleFacts, choose_formats
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Message, Tool, ToolCallRef

TEMPLATES = Path(__file__).parents[2] / "golden" / "templates"

TOOLS = (
    Tool(
        name="get_weather",
        description="The weather of a place",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": ["integer", "null"]},
                "celsius": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object"},
            },
            "required": ["city"],
        },
    ),
    Tool(name="now", parameters={}),
)

ARGUMENTS: dict[str, Any] = {
    "city": 'Zürich "HB"\n  Gleis 3, {x} [y]',
    "days": 3,
    "celsius": True,
    "tags": ["a b", "c"],
    "more": {"k": 1.5, "none": None},
}


@dataclass(frozen=True, eq=False)
class Family:
    """`ends` are what stops the model in earnest; `marks` the markers that are tokens of it."""

    template: str
    model_type: str
    tool_format: str
    reasoning: str | None
    ends: tuple[str, ...]
    marks: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    keeps_text: bool = True
    keeps_reasoning: bool = True
    joins_text: bool = False  #: text beside thinking and a call goes into the thinking
    one_call: bool = False
    quotes: bool = True  #: strings may hold quotes and line breaks


THINK = ("<think>", "</think>")
CHATML = ("<|im_end|>\n",)
FAMILIES = (
    Family("json", "qwen3", "json", "think", CHATML, THINK),
    Family("json_without_thinking", "qwen2", "json", None, CHATML, keeps_reasoning=False),
    Family("xml_function", "qwen3_5", "xml_function", "think", CHATML, THINK),
    Family("nemotron", "nemotron_h", "nemotron", "think", CHATML, THINK),
    Family("step", "step3p5", "step", "think", CHATML, THINK),
    Family("zaya_xml", "zaya", "zaya_xml", "think", CHATML, THINK),
    Family(
        "lfm2",
        "lfm2",
        "lfm2",
        None,
        CHATML,
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        keeps_reasoning=False,
        quotes=False,
    ),
    Family("glm4", "glm4_moe", "glm4", "think", (), THINK),
    Family("kimi_k2", "kimi_k2", "kimi_k2", "think", ("<|im_end|>",), THINK),
    Family("minimax_m2", "minimax_m2", "minimax_m2", "think", ("[e~[\n",), THINK),
    Family(
        "deepseek_v3",
        "deepseek_v3",
        "deepseek_v3",
        "think",
        ("<｜end▁of▁sentence｜>",),
        keeps_reasoning=False,
    ),
    Family(
        "deepseek_v31",
        "deepseek_v3",
        "deepseek_v31",
        "think",
        ("<｜end▁of▁sentence｜>",),
        THINK,
        {"thinking": False},
        keeps_reasoning=False,
    ),
    Family("dsml", "deepseek_v32", "dsml", "think", ("<｜end▁of▁sentence｜>",), THINK),
    Family(
        "gemma",
        "gemma3_text",
        "gemma",
        None,
        ("<end_of_turn>\n",),
        ("<escape>",),
        keeps_reasoning=False,
    ),
    Family(
        "gemma4",
        "gemma4",
        "gemma4",
        "channel",
        ("<turn|>\n",),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        keeps_reasoning=False,
    ),
    Family(
        "llama3",
        "llama",
        "llama3",
        None,
        ("<|eom_id|>",),
        ("<|python_tag|>",),
        facts={"vocab_size": 128_256},
        keeps_text=False,
        keeps_reasoning=False,
        one_call=True,
    ),
    Family(
        "pythonic",
        "llama4",
        "pythonic",
        None,
        ("<|eot|>",),
        facts={"vocab_size": 202_048},
        keeps_reasoning=False,
    ),
    Family("mistral_v3", "mistral", "mistral", None, ("</s>",), keeps_reasoning=False),
    Family("mistral_v13", "mistral3", "mistral", None, ("</s>",), keeps_reasoning=False),
    Family("olmo3", "olmo3", "pythonic", None, CHATML, keeps_reasoning=False),
    Family("hunyuan", "hy_v3", "hunyuan", "hunyuan", ("<｜hy_eos｜>",)),
    Family("hunyuan_preview", "hy_v3", "hunyuan", "hunyuan", ("<｜hy_eos｜>",)),
    Family("hunyuan_a13b", "hunyuan_v1_moe", "hunyuan", "hunyuan", ("<|eos|>",)),
    Family("ling", "bailing_moe", "json", "think", ("<|role_end|>",)),
    Family(
        "nemotron_v2",
        "nemotron_h",
        "nemotron_v2",
        "think",
        ("\n<SPECIAL_12>\n",),
        THINK,
        {"enable_thinking": False},
        keeps_reasoning=False,
    ),
    Family("harmony", "gpt_oss", "harmony", "harmony", ("<|call|>",), joins_text=True),
    Family(
        "granite_3_0",
        "granite",
        "granite",
        None,
        ("<|end_of_text|>\n",),
        ("<|tool_call|>",),
        keeps_reasoning=False,
    ),
    Family(
        "granite_4_0",
        "granitemoehybrid",
        "json",
        None,
        ("<|end_of_text|>\n",),
        keeps_reasoning=False,
    ),
    Family(
        "granite_4_2",
        "granitemoehybrid",
        "xml_function",
        "think",
        ("<|end_of_text|>\n",),
        THINK,
    ),
    Family(
        "granite", "granite", "granite", "sentence", ("<|end_of_text|>\n",), keeps_reasoning=False
    ),
)


@cache
def _model(family: Family) -> LoadedModel:
    source = (TEMPLATES / f"{family.template}.jinja").read_text()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    formats = choose_formats(
        BundleFacts(model_type=family.model_type, template=source, **family.facts)
    )
    return LoadedModel(
        model_id=family.template,
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(
            ("<|end|>", *filter(None, map(str.strip, family.ends))), family.marks
        ),
        template=ChatTemplate(source, special_tokens=special),
        conventions=Conventions(
            formats=formats, facts=BundleFacts(model_type=family.model_type, template=source)
        ),
    )


def _prompt(
    family: Family, messages: Sequence[Message], *, tail: bool = True, effort: str | None = "high"
) -> PreparedPrompt:
    kwargs = dict(family.kwargs)
    if family.keeps_reasoning and effort is not None:
        kwargs["reasoning_effort"] = effort
    return prepare_prompt(
        _model(family),
        ChatRequest(
            model="m",
            messages=tuple(messages),
            tools=TOOLS,
            template_kwargs=kwargs,
            add_generation_prompt=tail,
        ),
    )


def _read(family: Family, prompt: PreparedPrompt, text: str) -> tuple[str, str, list[Any]]:
    """Content, reasoning and calls of an answer, fed one character at a time."""
    formats = _model(family).conventions.formats
    machine = build_machine(prompt.tool_format, formats.reasoning, tools=TOOLS, start=prompt.start)
    assert machine is not None
    pieces = [piece for char in text for piece in machine.push(char)] + machine.finish()
    assert not machine.has_failed
    rails = {
        rail: "".join(piece.text for piece in pieces if piece.rail is rail)
        for rail in (Rail.CONTENT, Rail.REASONING)
    }
    calls = [[call.name, dict(call.arguments)] for piece in pieces for call in piece.calls]
    return rails[Rail.CONTENT].strip(), rails[Rail.REASONING].strip(), calls


def _calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[ToolCallRef, ...]:
    return tuple(
        ToolCallRef(
            call_id=f"functions.{name}:{i}",
            name=name,
            arguments=json.dumps(arguments, ensure_ascii=False),
        )
        for i, (name, arguments) in enumerate(calls)
    )


SYSTEM = Message(role="system", content="Be brief.")
QUESTION = Message(role="user", content="How is the weather?")


def _round_trip(
    family: Family,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    text: str = "",
    reasoning: str = "",
) -> None:
    before = [SYSTEM, QUESTION]
    prompt = _prompt(family, before)
    answer = Message(
        role="assistant",
        content=text,
        reasoning_content=reasoning or None,
        tool_calls=_calls(calls),
    )
    whole = _prompt(family, [*before, answer], tail=False).text
    assert whole.startswith(prompt.text)
    written = whole[len(prompt.text) :]
    for end in family.ends:
        written = written.removesuffix(end)
    content, thought, found = _read(family, prompt, written)
    wanted = [[name, dict(arguments)] for name, arguments in calls]
    # As JSON: `1` and `true` differ there, and the order of arguments shows.
    assert json.dumps(found) == json.dumps(wanted)
    if family.joins_text:
        text, reasoning = "", "\n\n".join(filter(None, (reasoning, text)))
    assert content == (text if family.keeps_text else "")
    assert thought == (reasoning if family.keeps_reasoning else "")


def _fitting(family: Family) -> dict[str, Any]:
    if family.quotes:
        return ARGUMENTS
    return {**ARGUMENTS, "city": "Zürich HB, {x} [y]", "more": {"k": 1.5}}


families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)


@families
def test_the_format_is_chosen_from_the_bundle(family: Family) -> None:
    formats = _model(family).conventions.formats
    assert (formats.tool_format, formats.reasoning) == (family.tool_format, family.reasoning)


@families
def test_a_call_with_text_and_thinking_comes_back_whole(family: Family) -> None:
    _round_trip(
        family,
        [("get_weather", _fitting(family))],
        text="I look it up.",
        reasoning="They want weather." if family.keeps_reasoning else "",
    )


@families
def test_a_call_without_arguments_and_without_text_comes_back(family: Family) -> None:
    _round_trip(family, [("now", {})], reasoning="hm" if family.keeps_reasoning else "")


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if not family.one_call],
    ids=lambda family: family.template,
)
def test_parallel_calls_come_back_in_order(family: Family) -> None:
    _round_trip(
        family,
        [("get_weather", {"city": "Bern"}), ("now", {}), ("get_weather", {"city": "Oslo"})],
        reasoning="hm" if family.keeps_reasoning else "",
    )


@families
def test_a_prompt_after_results_goes_on_from_the_prompt_before(family: Family) -> None:
    """Prefix stability: what the model read and wrote is found again in front."""
    calls = [("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Oslo"})]
    answer = Message(
        role="assistant",
        reasoning_content="hm" if family.keeps_reasoning else None,
        tool_calls=_calls(calls),
    )
    results = [
        Message(role="tool", content=f"{i} degrees", tool_call_id=call.call_id)
        for i, call in enumerate(answer.tool_calls)
    ]
    first = _prompt(family, [SYSTEM, QUESTION])
    second = _prompt(family, [SYSTEM, QUESTION, answer, *results])
    assert second.text.startswith(first.text)
    assert second.text.index("0 degrees") < second.text.index("1 degrees")
    if family.one_call:
        assert second.text.index("0 degrees") < second.text.index("Oslo")
        assert second.notes == (
            "the template takes one call at a time: parallel calls are one after another",
        )
    else:
        assert second.notes == ()


words = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>|[]｜\ufffe\ufdd0\"'\\"),
    max_size=12,
)


@families
@settings(max_examples=20, deadline=None)
@given(
    city=words,
    days=st.none() | st.integers(-(10**12), 10**12),
    celsius=st.booleans(),
    tags=st.lists(words, max_size=3),
)
def test_any_arguments_come_back(
    family: Family, city: str, days: int | None, celsius: bool, tags: list[str]
) -> None:
    arguments = {"city": city.strip() or "x", "celsius": celsius, "tags": tags, "days": days}
    reasoning = "hm" if family.keeps_reasoning else ""
    _round_trip(family, [("get_weather", arguments)], reasoning=reasoning)

"""Turning thinking off takes effect, whatever the template makes of it, or the answer says why
not; fault F56. And a bundle's own defaults never cost a client its request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.scripted_engine import CHATML, ByteTokenizer, ScriptedEngine
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.prompt import PreparedPrompt, prepare_prompt
from osaurus.parsing.reasoning import Start
from osaurus.parsing.selection import BundleFacts, choose_formats
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Message, Tool

TEMPLATES = Path(__file__).parents[2] / "golden" / "templates"
QUESTION = Message(role="user", content="Why?")
TOOL = Tool(name="look", parameters={"type": "object", "properties": {}})

CANNOT_STOP = "this model cannot stop thinking: its template opens a block"
NO_EFFECT = "the thinking switch has no effect: the template ignores it"
OFF_FOR_CALL = "thinking is off: this model cannot think before a required call"

ALWAYS_OPEN = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
#: Opens no block itself: the model does.
IGNORES = CHATML + "{# <think> </think> #}"


def _golden(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def _prepare(
    model_type: str,
    template: str,
    *messages: Message,
    needs_call: bool = False,
    declared: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
    **given: Any,
) -> PreparedPrompt:
    facts = BundleFacts(model_type=model_type, template=template)
    model = LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(others=("<think>", "</think>")),
        template=ChatTemplate(template, special_tokens={"bos_token": "", "eos_token": ""}),
        conventions=Conventions(
            formats=choose_formats(facts), facts=facts, template_defaults=declared or {}
        ),
    )
    request = ChatRequest(
        model="m",
        messages=messages or (QUESTION,),
        tools=(TOOL,) if needs_call else (),
        needs_call=needs_call,
        template_kwargs=given,
        **(fields or {}),
    )
    return prepare_prompt(model, request)


@pytest.mark.parametrize("name", ["minimax_m2", "step"])
@pytest.mark.parametrize("given", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_a_block_that_the_stock_template_always_opens_is_closed(
    name: str, given: dict[str, Any]
) -> None:
    model_type = {"step": "step3p5"}.get(name, name)
    on = _prepare(model_type, _golden(name), enable_thinking=True)
    assert on.text.endswith("<think>\n")
    off = _prepare(model_type, _golden(name), **given)
    assert off.text == on.text + "</think>\n\n"
    assert (off.start, off.notes) == (Start.CONTENT, ())
    closer = ByteTokenizer(others=("<think>", "</think>")).added_tokens["</think>"]
    assert off.token_ids == [*on.token_ids, closer, *b"\n\n"]


def test_without_a_choice_the_familys_row_decides_about_the_block() -> None:
    assert _prepare("minimax_m2", _golden("minimax_m2")).start is Start.CONTENT
    assert _prepare("step3p5", _golden("step")).start is Start.REASONING
    declared = {"enable_thinking": True}
    prompt = _prepare("minimax_m2", _golden("minimax_m2"), declared=declared)
    assert prompt.start is Start.REASONING


def test_a_template_that_reads_the_switch_gets_no_second_closer() -> None:
    prompt = _prepare("qwen3_5", _golden("xml_function"), enable_thinking=False)
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    assert prompt.text.count("</think>") == 1
    assert prompt.notes == ()


def test_a_required_call_is_written_outside_a_block_where_thinking_has_no_bound() -> None:
    prompt = _prepare("step3p5", _golden("step"), needs_call=True)
    assert prompt.text.endswith("<think>\n</think>\n\n")
    assert (prompt.start, prompt.notes) == (Start.CONTENT, ())
    prompt = _prepare("step3p5", _golden("step"), needs_call=True, enable_thinking=True)
    assert (prompt.start, prompt.notes) == (Start.CONTENT, (OFF_FOR_CALL,))
    tools = "{{ tools | tojson if tools }}"
    template = tools + ALWAYS_OPEN.replace("<think>\n", "<think>")
    prompt = _prepare("mimo_v2", template, needs_call=True)
    assert prompt.text.endswith("<think></think>\n\n")


@pytest.mark.parametrize(
    ("model_type", "template", "note"),
    [
        ("deepseek_v3", ALWAYS_OPEN, CANNOT_STOP),
        ("qwen3", ALWAYS_OPEN, CANNOT_STOP),
        ("kimi_k2", IGNORES, NO_EFFECT),
        ("lfm2", IGNORES, NO_EFFECT),
    ],
)
def test_thinking_that_cannot_be_turned_off_is_said_to_who_asked(
    model_type: str, template: str, note: str
) -> None:
    assert _prepare(model_type, template, enable_thinking=False).notes == (note,)
    assert _prepare(model_type, template, reasoning_effort="none").notes == (note,)
    assert _prepare(model_type, template).notes == ()
    assert _prepare(model_type, template, enable_thinking=True).notes == ()


def test_a_model_without_thinking_says_nothing_of_a_switch() -> None:
    assert _prepare("llama", CHATML, enable_thinking=False).notes == ()


def test_a_message_that_is_continued_keeps_the_block_that_it_began() -> None:
    begun = Message(role="assistant", content="<think>\nHm")
    prompt = _prepare(
        "minimax_m2",
        CHATML,
        QUESTION,
        begun,
        enable_thinking=False,
        fields={"continue_final_message": True},
    )
    assert prompt.text.endswith("<think>\nHm")
    assert prompt.start is Start.REASONING


@pytest.mark.parametrize("system", [(), (Message(role="system", content="Be brief."),)])
def test_older_nemotrons_are_told_in_the_system_message(system: tuple[Message, ...]) -> None:
    template = _golden("nemotron_v2")
    off = _prepare("nemotron_h", template, *system, QUESTION, enable_thinking=False)
    assert off.text.endswith("<think></think>")
    assert (off.start, off.notes) == (Start.CONTENT, ())
    for given in ({}, {"enable_thinking": True}):
        prompt = _prepare("nemotron_h", template, *system, QUESTION, **given)
        assert prompt.text.endswith("<think>\n")
    declared = {"enable_thinking": False}
    assert _prepare("nemotron_h", template, *system, QUESTION, declared=declared).text == off.text


def test_nemotron_3_is_told_by_its_switch_alone() -> None:
    template = _golden("nemotron") + "{# /no_think was for older ones #}"
    prompt = _prepare("nemotron_h", template, enable_thinking=False)
    assert prompt.text.endswith("<think></think>")
    assert "/no_think" not in prompt.text


STRICT = CHATML + (
    "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'medium') %}"
    "{{ raise_exception('effort is low or medium') }}{% endif %}{{ reasoning_effort }}"
)


def test_defaults_that_the_bundles_own_template_refuses_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    declared: dict[str, Any] = {"reasoning_effort": "high", "enable_thinking": True}
    for _ in range(2):
        assert _prepare("strict", STRICT, declared=declared).text.endswith("assistant\n")
    given = {"reasoning_effort": "low"}
    assert _prepare("strict", STRICT, declared=declared, **given).text.endswith("assistant\nlow")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["m: its template refuses the bundle's own default switches"]
    declared = {"reasoning_effort": "medium"}
    assert _prepare("strict", STRICT, declared=declared).text.endswith("assistant\nmedium")


def test_defaults_under_the_servers_own_names_are_left_out() -> None:
    declared = {"messages": [], "tools": 1, "enable_thinking": False}
    assert "Why?" in _prepare("qwen3", CHATML, declared=declared).text

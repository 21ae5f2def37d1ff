"""Templates that refuse or drop something get the conversation in a form they take, and the
answer says so; the same conversation is prepared the same way in every turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.scripted_engine import CHATML, ByteTokenizer, ScriptedEngine
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.probes import traits_of
from osaurus.chat.prompt import PreparedPrompt, prepare_prompt
from osaurus.chat.traits import Traits, fallbacks
from osaurus.errors import InvalidField, TemplateError
from osaurus.parsing.selection import FormatChoice
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Message, Tool, ToolCallRef

USER_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM_IGNORED = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SYSTEM_NEEDED = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('No system message') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else raise_exception('Only parts') }}{% endfor %}"
    "{% endfor %}"
)
USER_LAST = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('Expected a user last') }}"
    "{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
FLAT_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.name }}{{ c.arguments | tojson }}{% endfor %}{% endfor %}"
)
TRIMMING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

SYSTEM = Message(role="system", content="Be brief.")
LATE = Message(role="system", content="Now be long.")
QUESTION = Message(role="user", content="Why?")
ANSWER = Message(role="assistant", content="Because.")
MORE = Message(role="user", content="And how?")


def _prepare(template: str, *messages: Message, **fields: Any) -> PreparedPrompt:
    model = LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(),
        template=ChatTemplate(template),
    )
    return prepare_prompt(model, ChatRequest(model="m", messages=messages, **fields))


@pytest.mark.parametrize("template", [USER_ONLY, SYSTEM_IGNORED, ALTERNATING])
def test_a_refused_system_message_begins_the_first_user_message(template: str) -> None:
    prompt = _prepare(template, SYSTEM, QUESTION, ANSWER, MORE)
    assert prompt.text.startswith("[user]Be brief.\n\nWhy?[assistant]Because.[user]And how?")
    assert any("refuses a system message" in note for note in prompt.notes)


def test_a_system_message_is_given_where_one_is_needed() -> None:
    assert _prepare(SYSTEM_NEEDED, QUESTION).text == "[system][user]Why?"
    assert _prepare(SYSTEM_NEEDED, SYSTEM, QUESTION).text == "[system]Be brief.[user]Why?"


def test_late_system_messages_are_merged_into_the_first() -> None:
    prompt = _prepare(SYSTEM_FIRST, SYSTEM, QUESTION, ANSWER, LATE, MORE)
    assert prompt.text.startswith("[system]Be brief.\n\nNow be long.[user]Why?")
    assert prompt.notes
    assert not _prepare(CHATML, SYSTEM, QUESTION, ANSWER, LATE, MORE).notes


def test_neighbours_of_one_role_are_merged_where_turns_must_alternate() -> None:
    prompt = _prepare(ALTERNATING, QUESTION, MORE, ANSWER, QUESTION)
    assert prompt.text == "[user]Why?\n\nAnd how?[assistant]Because.[user]Why?"
    assert any("alternate" in note for note in prompt.notes)


def test_content_comes_in_parts_where_a_template_wants_a_list() -> None:
    assert _prepare(PARTS, SYSTEM, QUESTION).text == "[system]Be brief.[user]Why?"


def test_calls_are_flat_where_a_template_reads_them_so() -> None:
    call = ToolCallRef(call_id="c", name="f", arguments='{"b": 1, "a": 2.50}')
    prompt = _prepare(FLAT_CALLS, QUESTION, Message(role="assistant", tool_calls=(call,)))
    assert 'f{"b": 1, "a": 2.5}' in prompt.text


def test_calls_and_results_that_a_template_drops_are_written_as_text() -> None:
    call = ToolCallRef(call_id="c", name="f", arguments='{"a": "é"}')
    other = ToolCallRef(call_id="d", name="g", arguments="")
    prompt = _prepare(
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        QUESTION,
        Message(role="assistant", content="I look.", tool_calls=(call, other)),
        Message(role="tool", content="12", tool_call_id="c"),
        Message(role="tool", content="13", tool_call_id="d"),
    )
    assert prompt.text == (
        '[user]Why?[assistant]I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n"
        "</tool_response>"
    )
    assert len(prompt.notes) == 2


def test_tools_that_a_template_drops_are_described_with_the_clients_system_message() -> None:
    tool = Tool(name="look", parameters={"type": "object", "properties": {}})
    prompt = _prepare(CHATML, SYSTEM, QUESTION, tools=(tool,))
    system = prompt.text.partition("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    line = next(line for line in system.splitlines() if line.startswith("{"))
    assert json.loads(line)["function"]["name"] == "look"
    assert prompt.tool_format == "json"
    assert _prepare(CHATML, SYSTEM, QUESTION).tool_format is None


def test_a_trailing_answer_that_is_refused_is_continued() -> None:
    prompt = _prepare(USER_LAST, QUESTION, ANSWER)
    assert prompt.text == "[user]Why?[assistant]Because."
    assert prompt.notes
    assert _prepare(CHATML, QUESTION, ANSWER).text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_a_continued_message_keeps_its_white_space_and_is_not_ended(template: str) -> None:
    started = Message(role="assistant", content=" So then \n")
    prompt = _prepare(template, QUESTION, started, continue_final_message=True)
    assert prompt.text.endswith("assistant\n So then \n" if template == CHATML else "] So then \n")
    with pytest.raises(InvalidField, match="continue_final_message"):
        _prepare(template, QUESTION, continue_final_message=True)


def test_without_generation_prompt_only_the_tail_is_missing() -> None:
    whole = _prepare(CHATML, QUESTION).text
    assert whole == _prepare(CHATML, QUESTION, add_generation_prompt=False).text + (
        "<|im_start|>assistant\n"
    )


def test_short_ids_are_the_same_for_call_and_result_in_every_turn() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "<{{ c.id }}>{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
    )
    call = ToolCallRef(call_id="call_0123456789", name="f", arguments="{}")
    turns = (
        QUESTION,
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="12", tool_call_id=call.call_id),
    )
    text = _prepare(template, *turns).text
    short = text.partition("<")[2].partition(">")[0]
    assert len(short) == 9
    assert f"({short})" in text
    assert _prepare(template, *turns, MORE).text.startswith(text)


def test_thinking_left_in_a_past_answer_is_separated_where_the_tags_are_no_tokens() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    )
    model = LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(),
        template=ChatTemplate(template),
        conventions=Conventions(
            formats=FormatChoice(
                tool_format=None, tool_origin="none", reasoning="think", reasoning_origin="stamp"
            )
        ),
    )
    past = Message(role="assistant", content="<think>\nhm\n</think>\n\nBecause.")
    prompt = prepare_prompt(model, ChatRequest(model="m", messages=(QUESTION, past, MORE)))
    assert "[assistant]hm|Because." in prompt.text


def test_a_usual_template_needs_no_fallback_for_conversations() -> None:
    found = traits_of(ChatTemplate(CHATML))
    assert (found.has_system, found.must_alternate, found.content) == (True, False, "text")
    assert fallbacks(Traits()) == []


def test_a_template_that_always_refuses_speaks_for_itself() -> None:
    with pytest.raises(TemplateError, match="Never"):
        _prepare("{{ raise_exception('Never') }}", QUESTION)


def test_a_template_that_is_not_valid_is_refused_before_anything_is_probed() -> None:
    with pytest.raises(TemplateError, match=r"not valid.*line 1"):
        _prepare("{% if %}", QUESTION)

"""Past calls and results in the form that each template reads them; faults F31 and F50."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.scripted_engine import CHATML, ByteTokenizer, ScriptedEngine
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.probes import traits_of
from osaurus.chat.prompt import PreparedPrompt, prepare_prompt
from osaurus.errors import InvalidField
from osaurus.parsing.selection import FormatChoice
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Message, Tool, ToolCallRef

TEMPLATES = Path(__file__).parents[2] / "golden" / "templates"

#: DeepSeek R1 and V3: content that is none tells a call from an answer, and hides neither text.
NONE_IS_A_CALL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[user]{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}[call]"
    "{% for c in m['tool_calls'] %}{{ c['function']['name'] + c['function']['arguments'] }}"
    "{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is not none %}[answer]{{ m['content'] }}"
    "{% endif %}{% if m['role'] == 'tool' %}[result]{{ m['content'] }}{% endif %}{% endfor %}"
)
#: The distilled ones: calls are shown either way, with an empty answer behind an empty text.
NONE_IS_NO_ANSWER = NONE_IS_A_CALL.replace(
    "m['role'] == 'assistant' and m['content'] is none", "m['tool_calls']"
)

WEATHER = Tool(name="get_weather", parameters={"type": "object", "properties": {}})
SYSTEM = Message(role="system", content="Be brief.")
QUESTION = Message(role="user", content="Why?")
MORE = Message(role="user", content="And now?")
BERN = ToolCallRef(call_id="a", name="get_weather", arguments='{"city": "Bern"}')
NOW = ToolCallRef(call_id="b", name="now", arguments="{}")


def _calling(*calls: ToolCallRef, text: str = "", thinking: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning_content=thinking, tool_calls=calls)


def _result(text: str, call_id: str | None = "a") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def _says(text: str) -> Message:
    return Message(role="assistant", content=text)


def _golden(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def _prepare(
    template: str,
    *messages: Message,
    tools: Sequence[Tool] = (),
    tool_format: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> PreparedPrompt:
    formats = FormatChoice(
        tool_format=tool_format, tool_origin="stamp", reasoning=None, reasoning_origin="none"
    )
    model = LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(),
        template=ChatTemplate(template, special_tokens={"bos_token": "", "eos_token": ""}),
        conventions=Conventions(formats=formats),
    )
    request = ChatRequest(
        model="m",
        messages=messages,
        tools=tuple(tools),
        template_kwargs=template_kwargs or {},
    )
    return prepare_prompt(model, request)


# Results inside the calling message.

_BERN = '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>}<tool_call|>'
_RAIN = '<|tool_response>response:get_weather{value:<|"|>RAIN<|"|>}<tool_response|>'
_NOON = '<|tool_response>response:now{value:<|"|>NOON<|"|>}<tool_response|>'


def test_f31_a_result_goes_into_the_calling_turn_which_stays_open() -> None:
    prompt = _prepare(_golden("gemma4"), QUESTION, _calling(BERN), _result("RAIN"))
    assert prompt.text.endswith(f"<|turn>model\n{_BERN}{_RAIN}")
    assert "<|turn>tool" not in prompt.text
    assert traits_of(ChatTemplate(_golden("gemma4"))).results == "folded"


def test_f31_results_of_parallel_calls_stand_in_one_turn() -> None:
    messages = (QUESTION, _calling(BERN, NOW), _result("RAIN"), _result("NOON", "b"))
    text = _prepare(_golden("gemma4"), *messages).text
    assert text.endswith(f"<|turn>model\n{_BERN}<|tool_call>call:now{{}}<tool_call|>{_RAIN}{_NOON}")


def test_f31_the_answer_that_follows_goes_on_in_the_open_turn() -> None:
    before = (QUESTION, _calling(BERN), _result("RAIN"))
    open_turn = _prepare(_golden("gemma4"), *before).text
    text = _prepare(_golden("gemma4"), *before, _says("It rains."), MORE).text
    assert text == open_turn + (
        "It rains.<turn|>\n<|turn>user\nAnd now?<turn|>\n<|turn>model\n"
    )  # fmt: skip


def test_f31_text_before_a_call_does_not_end_the_turn_of_its_result() -> None:
    text = _prepare(_golden("gemma4"), QUESTION, _calling(BERN, text="I look."), _result("RAIN"))
    assert text.text.endswith(f"<|turn>model\nI look.<turn|>\n<|turn>model\n{_BERN}{_RAIN}")


def test_f31_text_between_two_calls_goes_on_in_the_open_turn() -> None:
    messages = (QUESTION, _calling(BERN), _result("RAIN"), _calling(NOW, text="And the time."))
    text = _prepare(_golden("gemma4"), *messages, _result("NOON", "b")).text
    call = "<|tool_call>call:now{}<tool_call|>"
    assert text.endswith(f"{_RAIN}And the time.<turn|>\n<|turn>model\n{call}{_NOON}")


def test_an_answer_at_the_end_is_not_hidden_in_the_open_turn() -> None:
    messages = (QUESTION, _calling(BERN), _result("RAIN"), _says("It rains."))
    text = _prepare(_golden("gemma4"), *messages).text
    assert text.endswith("It rains.<turn|>\n<|turn>model\n")


def test_a_template_that_writes_text_before_results_keeps_the_calling_message_whole() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% for r in m.tool_responses or [] %}"
        "({{ r.name }}: {{ r.response }}){% endfor %}{% endfor %}"
    )
    messages = (QUESTION, _calling(BERN, text="I look."), _result("RAIN"), _says("Rain."), MORE)
    assert _prepare(template, *messages).text == (
        '[user]Why?[assistant]I look.{"city": "Bern"}(get_weather: RAIN)'
        "[assistant]Rain.[user]And now?"
    )


# Text, thinking and calls in one message.


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (NONE_IS_A_CALL, '[call]get_weather{"city": "Bern"}'),
        (NONE_IS_NO_ANSWER, '[call]get_weather{"city": "Bern"}'),
    ],
)
def test_a_call_without_text_has_no_content_where_the_template_asks_for_none(
    template: str, call: str
) -> None:
    prompt = _prepare(template, QUESTION, _calling(BERN), _result("RAIN"))
    assert prompt.text == f"[user]Why?{call}[result]RAIN"
    assert prompt.notes == ()


def test_a_template_that_joins_the_content_gets_an_empty_one() -> None:
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    assert _prepare(template, QUESTION, _calling(BERN)).text.startswith("[user]Why?[assistant]")


def test_calls_that_a_template_drops_beside_text_follow_the_text() -> None:
    prompt = _prepare(NONE_IS_A_CALL, QUESTION, _calling(BERN, text="I look."), _result("RAIN"))
    assert prompt.text == (
        '[user]Why?[answer]I look.[call]get_weather{"city": "Bern"}[result]RAIN'
    )  # fmt: skip
    assert prompt.notes == (
        "the template drops calls beside text: the text is a message before them",
    )


def test_text_and_thinking_that_a_template_refuses_beside_a_call_are_joined() -> None:
    calling = _calling(BERN, text="I look.", thinking="They ask.")
    prompt = _prepare(_golden("harmony"), QUESTION, calling, _result("RAIN"))
    assert "<|channel|>analysis<|message|>They ask.\n\nI look.<|end|>" in prompt.text
    assert "Bern" in prompt.text
    assert len(prompt.notes) == 1
    for alone in (_calling(BERN, text="I look."), _calling(BERN, thinking="They ask.")):
        assert _prepare(_golden("harmony"), QUESTION, alone, _result("RAIN")).notes == ()


# Which call a result answers.


@pytest.mark.parametrize(
    ("messages", "index", "words"),
    [
        ((QUESTION, _result("RAIN")), 1, "'a' is not there"),
        ((QUESTION, _calling(BERN), _result("RAIN", "x")), 2, "'x' is not there"),
        ((QUESTION, _calling(BERN), _result("RAIN"), _result("RAIN")), 3, "'a' was answered"),
        ((QUESTION, _result("RAIN"), _calling(BERN)), 1, "'a' is not there"),
        ((QUESTION, _result("RAIN", None)), 1, "is not there"),
    ],
)
def test_a_result_that_answers_no_call_is_refused_by_its_place(
    messages: tuple[Message, ...], index: int, words: str
) -> None:
    billing = Message(role="system", content="x-anthropic-billing-header: cch=1;\n")
    for before in ((), (SYSTEM,), (billing,)):
        with pytest.raises(InvalidField) as caught:
            _prepare(CHATML, *before, *messages)
        assert caught.value.field == f"messages[{index + len(before)}].tool_call_id"
        assert words in str(caught.value)


def test_results_are_named_by_the_call_that_they_answer() -> None:
    template = (
        "{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}[{{ m.name }} {{ m.tool_call_id }}: {{ m.content }}]"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    again = ToolCallRef(call_id="a", name="other", arguments="{}")
    nameless = ToolCallRef(call_id="", name="open", arguments="{}")
    messages = (
        *(QUESTION, _calling(BERN, NOW), _result("NOON", "b"), _result("RAIN")),
        *(_calling(again), _result("x")),
        *(_calling(BERN), _calling(again), _result("latest")),
        *(_calling(nameless), _result("y", "unheard")),
        *(_calling(BERN, NOW), _result("first", None), _result("second", None)),
    )
    text = _prepare(template, *messages).text
    found = [part.partition("]")[0] for part in text.split("[")[1:]]
    assert found == [
        "now b: NOON",
        "get_weather a: RAIN",
        "other a: x",
        "other a: latest",
        "open call_0_open: y",
        "get_weather a: first",
        "now b: second",
    ]


# Roles.

_ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
_REFUSES_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developer') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (_ROLES, "[system]Be kind."),
        (_ROLES + "{# not for the developer #}", "[developer]Be kind."),
        (_REFUSES_DEVELOPER, "[system]Be kind."),
    ],
)
def test_a_developer_stays_one_where_the_template_knows_the_role(template: str, shown: str) -> None:
    developer = Message(role="developer", content="Be kind.")
    assert _prepare(template, developer, QUESTION).text.startswith(shown)


def test_developer_and_system_messages_are_merged_where_one_is_taken() -> None:
    developer = Message(role="developer", content="Be kind.")
    text = _prepare(_golden("harmony"), SYSTEM, developer, QUESTION).text
    assert "# Instructions\n\nBe brief.\n\nBe kind." in text
    text = _prepare(_golden("harmony"), developer, QUESTION, SYSTEM).text
    assert "# Instructions\n\nBe kind.\n\nBe brief." in text


# The fallback's own notation.


def test_calls_written_in_words_are_read_and_stripped_in_that_notation() -> None:
    messages = (QUESTION, _calling(BERN), _result("RAIN"))
    assert _prepare(CHATML, *messages).tool_format == "json"
    assert _prepare(CHATML, QUESTION).tool_format is None
    for own in ("mistral", "gemma"):
        prompt = _prepare(CHATML, *messages, tool_format=own)
        assert (prompt.tool_format, prompt.second_format) == (own, "json")
    prompt = _prepare(_golden("gemma4"), *messages, tool_format="gemma4")
    assert (prompt.tool_format, prompt.second_format) == ("gemma4", None)


# Descriptions.

_JOINED_TOOL = "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
_JOINED_PARAMETER = (
    "{% for t in tools or [] %}{{ t.function.name }}"
    "{% for k, p in t.function.parameters.properties | items %}{{ k + ': ' + p.description }}"
    "{% endfor %}"
)
_WHOLE = "{% for t in tools or [] %}{{ t | tojson }}"
_END = "{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_missing_description_is_empty_only_where_a_template_joins_it() -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
    assert "description" not in _prepare(_WHOLE + _END, QUESTION, tools=[tool]).text
    assert _prepare(_JOINED_TOOL + _END, QUESTION, tools=[tool]).text == "f: [user]Why?"
    assert _prepare(_JOINED_PARAMETER + _END, QUESTION, tools=[tool]).text == "fa: [user]Why?"
    for template, tool_joins, parameter_joins in (
        (_WHOLE, False, False),
        (_JOINED_TOOL, True, False),
        (_JOINED_PARAMETER, False, True),
    ):
        traits = traits_of(ChatTemplate(template + _END))
        assert (traits.joins_tool_description, traits.joins_parameter_description) == (
            tool_joins,
            parameter_joins,
        )
    with_words = Tool(name="f", description="Does it.", parameters=tool.parameters)
    assert '"description": "Does it."' in _prepare(_WHOLE + _END, QUESTION, tools=[with_words]).text

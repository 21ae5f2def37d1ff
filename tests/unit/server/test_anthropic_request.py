"""Claim: an Anthropic body means the conversation, tools and switches that it says; what is wrong
in it is named by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from osaurus.errors import InvalidField
from osaurus.server.apis.anthropic_request import MessagesRequest, check_version, to_chat_request
from osaurus.server.apis.anthropic_wire import MessagesBody
from osaurus.server.body import decode_json
from osaurus.types.chat import ChatRequest, MediaPart, Message, TextPart
from osaurus.types.response_format import JsonSchemaFormat

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "get_weather", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BASH = {"type": "bash_20250124", "name": "bash"}


def _read(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": HI, **fields}
    given = {key: value for key, value in body.items() if value is not None}
    return to_chat_request(decode_json(json.dumps(given).encode(), MessagesBody), "req_1")


def _chat(**fields: Any) -> ChatRequest:
    return _read(**fields).chat


def _refused(**fields: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        _read(**fields)
    return caught.value


def _user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def _text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _use(call_id: str = "toolu_1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": given}


def _result(content: Any = "12 C", call_id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def test_a_system_is_a_text_or_its_blocks_in_order() -> None:
    assert _chat(system="Be brief.").messages[0] == Message(role="system", content="Be brief.")
    cached = _text("b", cache_control={"type": "ephemeral"})
    (system, user) = _chat(system=[_text("a"), cached]).messages
    assert system.content == (TextPart(text="a"), TextPart(text="b"))
    assert (system.role, user.text) == ("system", "hi")
    assert [each.role for each in _chat(system="").messages] == ["user"]
    assert _refused(system=[{"type": "image"}]).field == "system[0].type"


def test_results_go_before_the_text_of_their_turn() -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                _text("Let me look."),
                _use(city="Bern", at=1),
                _use("toolu_2"),
            ],
        },
        *_user(_text("And now?"), _result(), _result("no", "toolu_2", is_error=True)),
    ]
    read = _read(messages=messages)
    _, called, first, second, user = read.chat.messages
    assert (called.text, called.reasoning_content) == ("Let me look.", "hm")
    assert [call.arguments for call in called.tool_calls] == ['{"at":1,"city":"Bern"}', "{}"]
    assert (first.role, first.tool_call_id, first.text) == ("tool", "toolu_1", "12 C")
    assert (second.tool_call_id, second.text) == ("toolu_2", "Error: no")
    assert (user.role, user.text) == ("user", "And now?")
    assert read.places == (
        "messages[0]",
        "messages[1]",
        "messages[2].content[1]",
        "messages[2].content[2]",
        "messages[2]",
    )


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    messages = [
        {"role": "user", "content": "a"},
        *_user(_text("b"), _text("c")),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [_use()]},
        *_user(_text("e")),
        *_user(_result()),
    ]
    user, answer, result, last = _chat(messages=messages).messages
    assert user.text == "a\n\nbc"
    assert (answer.reasoning_content, answer.text, len(answer.tool_calls)) == ("t", "d", 1)
    assert (result.role, last.text) == ("tool", "e")


def test_a_result_may_hold_blocks_and_a_picture_becomes_a_note() -> None:
    picture = {"type": "image", "source": {"type": "base64", "data": "x"}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "x"}}
    plain = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    found = {"type": "search_result", "title": "S", "source": "u", "content": [_text("hit")]}
    content = [_text("12 C, "), _text("dry"), picture, pdf, plain, found]
    messages = [*HI, {"role": "assistant", "content": [_use()]}, *_user(_result(content))]
    *_, result = _chat(messages=messages).messages
    assert result.text == "12 C, dryT\nbodyS\nhit"
    kinds = [part.kind for part in result.content if isinstance(part, MediaPart)]
    assert kinds == ["image", "document"]
    messages[-1] = _user(_result(None))[0]
    assert _chat(messages=messages).messages[-1].text == ""


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([{"type": "image", "source": {}}], "messages[1].content[0]"),
        ([{"type": "text", "text": "x"}, {"type": "document"}], "messages[1].content[1]"),
        ([{"type": "hologram"}], "messages[1].content[0].type"),
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([{"type": "tool_result"}], "messages[1].content[0].tool_use_id"),
        ([{"type": "tool_result", "content": 3}], "messages[1].content[0].content"),
        ([_result([{"type": "hologram"}])], "messages[1].content[0].content[0].type"),
        ([_result(["x"])], "messages[1].content[0].content[0]"),
        ([], "messages[1].content"),
    ],
)
def test_a_block_that_cannot_be_read_is_named(content: Any, field: str) -> None:
    messages = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": content}]
    assert _refused(messages=messages).field == field


def test_what_anthropics_own_tools_left_in_a_history_is_left_out_with_a_note() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        _text("Found."),
    ]
    read = _read(messages=[*HI, {"role": "assistant", "content": blocks}, *HI])
    assert read.chat.messages[1].text == "Found."
    assert any("server_tool_use" in note for note in read.notes)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    prefill = [*HI, {"role": "assistant", "content": "The answer is ("}]
    assert _chat(messages=prefill).continue_final_message
    empty = _chat(messages=[*HI, {"role": "assistant", "content": []}])
    assert not empty.continue_final_message
    assert len(empty.messages) == 1
    assert _refused(messages=[{"role": "assistant", "content": ""}]).field == "messages[0].content"
    calling = [*HI, {"role": "assistant", "content": [_use()]}]
    refused = _refused(messages=calling)
    assert refused.field == "messages[1]"
    assert "tool_result" in refused.message


def test_tools_of_other_types_are_left_out_and_functions_stay() -> None:
    read = _read(tools=[SEARCH, WEATHER, BASH, {**WEATHER, "description": "again"}])
    (tool,) = read.chat.tools
    assert (tool.name, tool.description, tool.parameters) == ("get_weather", "", {"type": "object"})
    assert [note.split(" ")[0] for note in read.notes] == ["tools[0]", "tools[2]"]
    assert _chat(tools=[{**WEATHER, "type": "custom", "strict": True}]).tools[0].strict
    assert _refused(tools=[{"name": "f"}]).field == "tools[0].input_schema"
    assert _refused(tools=[{"input_schema": {}}]).field == "tools[0].name"


def test_which_tool_must_be_called() -> None:
    tools = [WEATHER, {"name": "note", "input_schema": {}}]

    def chosen(**choice: Any) -> ChatRequest:
        return _chat(tools=tools, tool_choice=choice)

    assert not chosen(type="auto").needs_call
    assert chosen(type="none").tools == ()
    assert (chosen(type="any").needs_call, chosen(type="any").forced_tool) == (True, None)
    assert chosen(type="tool", name="note").forced_tool == "note"
    assert chosen(type="auto").parallel_tool_calls
    assert not chosen(type="any", disable_parallel_tool_use=True).parallel_tool_calls


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([WEATHER], {"type": "tool", "name": "absent"}, "tool_choice"),
        ([WEATHER], {"type": "tool"}, "tool_choice.name"),
        ([WEATHER], {"type": "sometimes"}, "tool_choice.type"),
        ([WEATHER], "any", "tool_choice"),
        ([WEATHER, SEARCH], {"type": "tool", "name": "web_search"}, "tool_choice"),
        ([SEARCH], {"type": "any"}, "tool_choice"),
        (None, {"type": "any"}, "tool_choice"),
    ],
)
def test_a_choice_that_cannot_be_met_names_tool_choice(tools: Any, choice: Any, field: str) -> None:
    assert _refused(tools=tools, tool_choice=choice).field == field


def test_thinking_is_switched_and_its_budget_is_a_goal() -> None:
    def switches(**fields: Any) -> dict[str, Any]:
        chat = _chat(**fields)
        assert chat.thinking_budget is None
        return dict(chat.template_kwargs)

    assert switches() == {}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert switches(thinking=enabled) == {"enable_thinking": True}
    assert switches(thinking={"type": "adaptive"}) == {"enable_thinking": True}
    assert switches(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert switches(output_config={"effort": "low"}) == {"reasoning_effort": "low"}
    assert switches(effort="max") == {"reasoning_effort": "max"}
    assert _chat(thinking_budget=7).thinking_budget == 7
    assert _read(thinking={**enabled, "display": "summarized"}).shows_thinking
    assert not _read(thinking={**enabled, "display": "omitted"}).shows_thinking


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "loud"}}, "thinking.display"),
        ({"thinking_budget": "x"}, "thinking_budget"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    assert _refused(**fields).field == field


def test_sampling_holds_what_was_set() -> None:
    fields = {"temperature": 1.5, "top_p": 0.5, "top_k": 3, "stop_sequences": ["END", ""]}
    assert _chat(**fields).sampling == {
        "max_tokens": 9,
        "temperature": 1.5,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ("END",),
    }


def test_an_output_format_is_the_shape_of_the_answer() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": shape}}, {"output_format": shape}):
        found = _chat(**fields).response_format
        assert isinstance(found, JsonSchemaFormat)
        assert found.schema == {"type": "object"}
    both = _refused(output_config={"format": shape}, output_format=shape)
    assert both.field.startswith("output_format")


def test_a_fault_found_later_is_named_by_its_own_place() -> None:
    messages = [*HI, {"role": "assistant", "content": [_use()]}, *_user(_text("x"), _result())]
    read = _read(system="s", messages=messages)
    fault = InvalidField("messages[3].tool_call_id", "must be known")
    assert read.renamed(fault).message == "messages[2].content[1].tool_use_id: must be known"
    fault = InvalidField("reasoning_effort", "must be low")
    assert read.renamed(fault).field == "output_config.effort"
    assert read.renamed(InvalidField("top_k", "is wrong")).message == "top_k: is wrong"


@pytest.mark.parametrize("version", [None, "2023-06-01", "2030-01-01", "vertex-2023-10-16"])
def test_any_version_is_served(version: str | None) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["", "latest", "2023", "2023-06-01; drop"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(InvalidField, match="anthropic-version"):
        check_version(version)

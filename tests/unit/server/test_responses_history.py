"""Items of an Open Responses conversation as messages, and the store that keeps them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osaurus.errors import InvalidField
from osaurus.server.apis.responses_history import Conversation
from osaurus.server.apis.responses_items import whole_items
from osaurus.server.apis.responses_store import (
    PreviousResponseNotFound,
    ResponseStore,
    StoredResponse,
)
from osaurus.server.apis.responses_wire import Item, ResponseObject
from osaurus.server.errors import RequestRefused
from osaurus.types.chat import MediaPart, Message, TextPart


def _nothing(item_id: str) -> Item | None:
    return None


def _messages(*items: Item) -> list[Message]:
    conversation = Conversation()
    conversation.add(whole_items(items, _nothing), "input[{}]")
    return conversation.messages


def _said(role: str, text: str) -> Item:
    return {"role": role, "content": text}


def _thought(text: str) -> Item:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def _call(call_id: str, arguments: Any = "{}") -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def _result(call_id: str, output: Any = "ok") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_thinking_text_and_calls_of_one_turn_are_one_message() -> None:
    _, answer, first, second = _messages(
        _said("user", "Go"),
        _thought("hm"),
        _said("assistant", "I call twice."),
        _call("a"),
        _call("b"),
        _result("a"),
        _result("b"),
    )
    assert answer.role == "assistant"
    assert answer.reasoning_content == "hm"
    assert answer.text == "I call twice."
    assert [call.call_id for call in answer.tool_calls] == ["a", "b"]
    assert (first.tool_call_id, second.tool_call_id) == ("a", "b")


def test_calls_made_one_after_another_are_turns_of_their_own() -> None:
    roles = [m.role for m in _messages(_call("a"), _result("a"), _call("b"), _result("b"))]
    assert roles == ["assistant", "tool", "assistant", "tool"]


def test_thinking_after_text_begins_a_turn_unless_calls_wait() -> None:
    split = _messages(_thought("a"), _said("assistant", "b"), _thought("c"), _call("x"))
    assert [(m.reasoning_content, m.text) for m in split] == [("a", "b"), ("c", "")]
    (joined,) = _messages(_call("x"), _thought("a"), _said("assistant", "b"))
    assert (joined.reasoning_content, joined.text, len(joined.tool_calls)) == ("a", "b", 1)


def test_two_answers_in_a_row_stay_two() -> None:
    assert [m.text for m in _messages(_said("assistant", "a"), _said("assistant", "b"))] == [
        "a",
        "b",
    ]


def test_raw_thinking_outranks_its_summary_and_encrypted_thinking_is_passed_over() -> None:
    both = {**_thought("short"), "content": [{"type": "reasoning_text", "text": "long"}]}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert _messages(both, _said("assistant", "a"))[0].reasoning_content == "long"
    (answer,) = _messages(sealed, _said("assistant", "a"))
    assert (answer.reasoning_content, answer.text) == (None, "a")
    assert _messages(sealed) == []


def test_pictures_and_files_in_a_tools_output_leave_its_text_usable() -> None:
    picture = {"type": "input_image", "image_url": "data:,"}
    text = {"type": "input_text", "text": "12 C"}
    _, result = _messages(
        _call("a"), _result("a", [text, picture, {"type": "input_file", "file_id": "f"}])
    )
    assert result.content == (
        TextPart(text="12 C"),
        MediaPart(kind="image", source="data:,"),
        TextPart(text="[file left out: this server reads text only]"),
    )


def test_items_that_are_not_served_are_left_out_with_a_note_and_kept() -> None:
    items = whole_items([{"type": "web_search_call", "action": {}}, _said("user", "a")], _nothing)
    conversation = Conversation()
    conversation.add(items, "input[{}]")
    assert [m.text for m in conversation.messages] == ["a"]
    assert "web_search_call" in conversation.notes[0]
    assert items[0]["action"] == {}
    assert items[0]["id"]


def test_arguments_may_come_as_an_object_or_not_at_all() -> None:
    (message,) = _messages(_call("a", {"b": 1, "a": 2}), _call("b", None), _call("c", "not json"))
    assert [call.arguments for call in message.tool_calls] == ['{"a":2,"b":1}', "", "not json"]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({}, "input[0].type"),
        ({"type": 3}, "input[0].type"),
        ({"role": "robot", "content": ""}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": ["a"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "sculpture"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "a", "name": ""}, "input[0].name"),
        (
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": 1},
            "input[0].arguments",
        ),
        ({"type": "function_call_output", "call_id": "a"}, "input[0].output"),
        ({"type": "reasoning", "summary": "a"}, "input[0].summary"),
        ({"type": "item_reference", "id": "msg_x"}, "input[0].id"),
        ({"id": "msg_x"}, "input[0].id"),
    ],
)
def test_a_malformed_item_is_named(item: Item, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        _messages(item)
    assert caught.value.field == field


def test_a_fault_in_a_message_is_named_by_the_item_it_came_from() -> None:
    conversation = Conversation()
    conversation.add_instructions("Be brief.")
    earlier = whole_items([_said("user", "a")], _nothing)
    conversation.add(earlier, "previous_response_id")
    conversation.add(whole_items([_call("a"), _result("b")], _nothing), "input[{}]")
    fault = InvalidField("messages[3].tool_call_id", "must be the id of a call")
    assert conversation.renamed(fault).field == "input[1].call_id"
    assert conversation.renamed(fault).message == "input[1].call_id: must be the id of a call"
    assert conversation.renamed(InvalidField("messages[1].content", "x")).field == (
        "previous_response_id.content"
    )
    assert conversation.renamed(InvalidField("temperature", "x")).field == "temperature"


_KEYS = st.sampled_from(
    [
        *("type", "role", "content", "id", "call_id", "name", "arguments", "output"),
        *("summary", "text", "refusal", "image_url", "status", "encrypted_content", "url"),
    ]
)
_VALUES = st.recursive(
    st.none()
    | st.integers(0, 3)
    | st.sampled_from(
        [
            *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
            *("compaction", "web_search_call", "user", "assistant", "developer", "robot"),
            *("input_text", "output_text", "refusal", "summary_text", "input_image", "input_file"),
            *("call_a", "call_b", "{}", "x", "", "completed", "data:,", "osaurus.summary.1.eA=="),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(_KEYS, _VALUES, max_size=6), max_size=5))
def test_no_input_is_worse_than_a_named_fault(items: list[Any]) -> None:
    store = ResponseStore()
    try:
        whole = whole_items(items, _nothing)
        conversation = Conversation()
        conversation.add(whole, "input[{}]")
    except InvalidField as fault:
        field = fault.field
    else:
        field = ""
    if field:
        assert field.startswith("input[")
        return
    stored = _stored("a")
    stored.own = tuple(whole)
    store.put(stored)
    find = store.finder()
    assert all(find(item["id"]) is not None for item in whole)
    # What was kept can be said again, and means the same.
    again = Conversation()
    again.add(whole_items(whole, _nothing), "input[{}]")
    assert again.messages == conversation.messages


# The store.


def _stored(response_id: str, text: str = "hi", status: str = "completed") -> StoredResponse:
    own = whole_items([{"role": "user", "content": text, "id": f"msg_{response_id}"}], _nothing)
    response = ResponseObject(
        id=response_id,
        created_at=1,
        model="m",
        status=status,
        text={},
        temperature=1.0,
        top_p=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        metadata={},
    )
    return StoredResponse(response=response, before=(), own=tuple(own))


def test_the_oldest_that_has_ended_makes_room() -> None:
    store = ResponseStore(max_responses=3)
    store.put(_stored("a", status="in_progress"))
    for name in "bcde":
        store.put(_stored(name))
    with pytest.raises(RequestRefused):
        store.get("b")
    assert [store.get(name).response.id for name in "ade"] == ["a", "d", "e"]


def test_the_store_is_bounded_in_bytes_too() -> None:
    store = ResponseStore(max_bytes=4000)
    for name in "abc":
        store.put(_stored(name, text="x" * 1500))
    with pytest.raises(PreviousResponseNotFound):
        store.items_up_to("a")
    assert store.items_up_to("c")[0]["content"][0]["text"] == "x" * 1500


def test_a_response_that_runs_cannot_be_gone_on_from() -> None:
    store = ResponseStore()
    store.put(_stored("a", status="in_progress"))
    with pytest.raises(InvalidField, match="has not ended"):
        store.items_up_to("a")


def test_an_item_is_found_by_its_id_the_newest_first() -> None:
    store = ResponseStore()
    store.put(_stored("a", text="old"))
    newer = _stored("b", text="new")
    newer.own[0]["id"] = "msg_a"
    store.put(newer)
    find = store.finder()
    found = find("msg_a")
    assert found is not None
    assert found["content"][0]["text"] == "new"
    assert find("msg_z") is None


def test_what_was_removed_does_not_come_back_when_it_ends() -> None:
    store = ResponseStore()
    stored = _stored("a", status="in_progress")
    store.put(stored)
    store.remove("a")
    store.recount(stored)
    with pytest.raises(RequestRefused):
        store.get("a")

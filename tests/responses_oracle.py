"""Two judges of what `/responses` sends: the published Open Responses document, as the types that
`openresponses-types` makes from it, and the `openai` package's own types.

Beyond the shape of each event, the order: `check_stream` walks a whole stream as a client would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, get_args

import openresponses_types.types as published
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}

#: Events that add to a part, with the fields of the delta and of the whole.
_DELTAS = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_summary_text.delta": ("response.reasoning_summary_text.done", "text"),
    "response.function_call_arguments.delta": (
        "response.function_call_arguments.done",
        "arguments",
    ),
}


def _published_events() -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    for name, value in vars(published).items():
        if name.endswith("StreamingEvent"):
            kinds: type[Enum] = value.model_fields["type"].annotation
            found.update((kind.value, value) for kind in kinds)
    return found


def _openai_events() -> dict[str, type[BaseModel]]:
    union = get_args(ResponseStreamEvent)[0]
    return {get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(union)}


PUBLISHED_EVENTS = _published_events()
OPENAI_EVENTS = _openai_events()


def check_response(response: Mapping[str, Any]) -> None:
    published.ResponseResource.model_validate(_without_schema(response))
    Response.model_validate(response)


def check_event(event: Mapping[str, Any]) -> None:
    shown = event
    if "response" in event:
        shown = {**event, "response": _without_schema(event["response"])}
    PUBLISHED_EVENTS[event["type"]].model_validate(shown)
    OPENAI_EVENTS[event["type"]].model_validate(event)


def check_stream(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The final response, once every rule of the order has been found kept."""
    for event in events:
        check_event(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [kind for kind in kinds if kind in TERMINAL] == kinds[-1:]
    items: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    for event in events[2:-1]:
        assert event["output_index"] == len(items)
        match event["type"]:
            case "response.output_item.added":
                assert open_item is None
                assert event["item"]["status"] == "in_progress"
                open_item = {"shown": event["item"], "text": "", "done": False, "parts": []}
            case "response.output_item.done":
                assert open_item is not None
                assert event["item"]["id"] == open_item["shown"]["id"]
                assert event["item"]["type"] == open_item["shown"]["type"]
                assert _words(event["item"]) == open_item["text"]
                assert open_item["done"]
                items.append(event["item"])
                open_item = None
            case kind:
                assert open_item is not None
                assert event["item_id"] == open_item["shown"]["id"]
                assert event.get("content_index", event.get("summary_index", 0)) == 0
                _grow(open_item, kind, event)
    assert open_item is None
    final = events[-1]["response"]
    assert final["output"] == items
    assert final["id"] == events[0]["response"]["id"]
    return final


def _grow(item: dict[str, Any], kind: str, event: Mapping[str, Any]) -> None:
    if kind in _DELTAS:
        assert not item["done"]
        assert item["parts"] == ["added"] or item["shown"]["type"] == "function_call"
        item["text"] += event["delta"]
    elif kind.endswith("part.added"):
        assert item["parts"] == []
        item["parts"].append("added")
    elif kind.endswith("part.done"):
        assert item["done"]
        assert item["parts"] == ["added"]
        assert event["part"]["text"] == item["text"]
        item["parts"].append("done")
    else:
        (field,) = (field for done, field in _DELTAS.values() if done == kind)
        assert event[field] == item["text"]
        assert not item["done"]
        item["done"] = True


def _words(item: Mapping[str, Any]) -> str:
    match item["type"]:
        case "function_call":
            return item["arguments"]
        case "reasoning":
            return "".join(part["text"] for part in item["summary"])
        case _:
            return "".join(part["text"] for part in item["content"])


def _without_schema(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document allows nothing but null for the schema that a request asked for: a slip of
    it, since clients read it there."""
    wanted = response["text"]["format"]
    if wanted["type"] != "json_schema":
        return response
    return {**response, "text": {"format": {**wanted, "schema": None}}}

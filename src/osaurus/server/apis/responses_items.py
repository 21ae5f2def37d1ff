"""The items of a conversation: as they come from a client, are kept, and become messages.

In: `input` as it was sent. Out: whole items, each with an id, that can be listed, referred to
and said again; and from any sequence of them the messages that `chat/` takes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osaurus.errors import InvalidField
from osaurus.runtime.canonical import canonical_json
from osaurus.server.apis.responses_wire import Item, new_id

_ROLES = ("user", "assistant", "system", "developer")

#: Parts whose content is text, by the field that holds it.
TEXT_PARTS: Mapping[str, str] = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
#: Parts that hold something else, by the field that holds it.
MEDIA_PARTS: Mapping[str, str] = {
    "input_image": "image_url",
    "input_video": "video_url",
    "input_audio": "input_audio",
}

Find = Callable[[str], Item | None]

#: Begins the content of a compaction item of ours. It is coded, not encrypted: it holds nothing
#: that its reader may not know, and counts as the client's own text when it comes back.
_SUMMARY_MARK = "osaurus.summary.1."


def compaction(summary: str) -> Item:
    coded = base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()
    return {
        "type": "compaction",
        "id": new_id("cmp"),
        "encrypted_content": _SUMMARY_MARK + coded,
    }


def summary_of(item: Item) -> str | None:
    """What a compaction item says; None for another server's."""
    content = item.get("encrypted_content")
    if not isinstance(content, str) or not content.startswith(_SUMMARY_MARK):
        return None
    try:
        coded = content[len(_SUMMARY_MARK) :]
        return base64.b64decode(coded, altchars=b"-_", validate=True).decode()
    except ValueError:  # not base64, not ASCII, not UTF-8
        return None


def whole_items(value: str | Sequence[Item], find: Find) -> list[Item]:
    """`input` with ids, texts as lists of parts, and references replaced by what `find` knows.

    Items of types that are not served here stay as they came: they are history, and the thread
    they stand in must go on. Raises `InvalidField` naming the item.
    """
    if isinstance(value, str):
        return [_message("input", {"role": "user", "content": value})]
    return [_item(f"input[{i}]", item, find) for i, item in enumerate(value)]


def _item(where: str, item: Item, find: Find) -> Item:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    match kind:
        case "message":
            return _message(where, item)
        case "function_call":
            return _call(where, item)
        case "function_call_output":
            return _result(where, item)
        case "reasoning":
            return _reasoning(where, item)
        case "item_reference":
            known_id = _string(where, item, "id")
            found = find(known_id)
            if found is None:
                raise InvalidField(
                    f"{where}.id",
                    f"no item {known_id[:80]!r} is stored; send the item itself",
                )
            return found
        case str():
            return {**item, "id": _own_id(item, "item")}
        case _:
            raise InvalidField(f"{where}.type", "is required")


def _message(where: str, item: Item) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidField(
            f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {str(role)[:40]!r}"
        )
    content = item.get("content")
    if isinstance(content, str):
        text_type = "output_text" if role == "assistant" else "input_text"
        content = [{"type": text_type, "text": content}]
    elif not isinstance(content, list):
        raise InvalidField(f"{where}.content", "must be a string or an array of parts")
    parts = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
    return {
        "type": "message",
        "id": _own_id(item, "msg"),
        "role": role,
        "status": _status(item),
        "content": parts,
    }


def _part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise InvalidField(where, "must be an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in TEXT_PARTS:
        if not isinstance(part.get(TEXT_PARTS[kind]), str):
            raise InvalidField(f"{where}.{TEXT_PARTS[kind]}", "must be a string")
        defaults: dict[str, Any] = {}
        if kind == "output_text":
            defaults = {"annotations": [], "logprobs": []}
        return {**defaults, **{key: v for key, v in part.items() if v is not None}}
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        return {"detail": "auto", **part} if kind == "input_image" else dict(part)
    if kind == "input_file":
        return dict(part)
    raise InvalidField(f"{where}.type", f"{str(kind)[:40]!r} is not supported")


def _call(where: str, item: Item) -> Item:
    arguments = item.get("arguments")
    if isinstance(arguments, dict):
        arguments = canonical_json(arguments)
    if not isinstance(arguments, str) and arguments is not None:
        raise InvalidField(f"{where}.arguments", "must be a string of JSON")
    return {
        "type": "function_call",
        "id": _own_id(item, "fc"),
        "call_id": _string(where, item, "call_id"),
        "name": _string(where, item, "name"),
        "arguments": arguments or "",
        "status": _status(item),
    }


def _result(where: str, item: Item) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [_part(f"{where}.output[{i}]", part) for i, part in enumerate(output)]
    elif not isinstance(output, str):
        raise InvalidField(f"{where}.output", "must be a string or an array of parts")
    return {
        "type": "function_call_output",
        "id": _own_id(item, "fco"),
        "call_id": _string(where, item, "call_id"),
        "output": output,
        "status": _status(item),
    }


def _reasoning(where: str, item: Item) -> Item:
    kept: Item = {"type": "reasoning", "id": _own_id(item, "rs"), "summary": []}
    for field in ("summary", "content"):
        parts = item.get(field)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise InvalidField(f"{where}.{field}", "must be an array of parts")
        kept[field] = [_part(f"{where}.{field}[{i}]", part) for i, part in enumerate(parts)]
    if item.get("encrypted_content") is not None:
        kept["encrypted_content"] = _string(where, item, "encrypted_content")
    return kept


def _string(where: str, item: Item, field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidField(f"{where}.{field}", "is required, as a string")
    return value


def _own_id(item: Item, prefix: str) -> str:
    known_id = item.get("id")
    return known_id if isinstance(known_id, str) and known_id else new_id(prefix)


def _status(item: Item) -> str:
    status = item.get("status")
    return status if status in ("completed", "incomplete", "in_progress") else "completed"

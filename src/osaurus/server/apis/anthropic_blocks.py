"""The turns of an Anthropic conversation as messages, block by block.

In: wire messages. Out: `Message`s, each with its place in the request, so that a fault found
later can still name the block. Turns of one role in a row are one turn. The results of a turn
go before its text, since they answer the calls of the turn before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from osaurus.errors import InvalidField
from osaurus.runtime.canonical import canonical_json
from osaurus.server.apis.anthropic_wire import WireBlock, WireMessage
from osaurus.types.chat import MediaPart, Message, Part, Role, TextPart, ToolCallRef

_ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}

#: What Anthropic's own tools leave in a history. They ran elsewhere; nothing here reads them.
_FOREIGN_SUFFIX = "_tool_result"
_FOREIGN = frozenset({"server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload"})

#: Between the texts of several messages that are one turn.
_TURN_BREAK = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMessage:
    """`place` is the message, or for a tool's result the block, that it was made from."""

    message: Message
    place: str


@dataclass(slots=True)
class Turns:
    """`notes` say what was left out."""

    messages: list[PlacedMessage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class _Placed:
    """`begins` where it is the first of a message that carries a turn on."""

    place: str
    block: WireBlock
    begins: bool = False


def turns_of(messages: Sequence[WireMessage]) -> Turns:
    """Raises `InvalidField` that names the block."""
    turns = Turns()
    for role, place, blocks in _by_turn(messages):
        match role:
            case "user":
                turns.messages += _user(place, blocks, turns)
            case "assistant":
                turns.messages.append(_assistant(place, blocks, turns))
            case _:
                turns.messages.append(_system(place, blocks))
    return turns


def system_content(system: str | Sequence[WireBlock]) -> str | tuple[Part, ...]:
    """The content of a system message: text, or its blocks as parts."""
    if isinstance(system, str):
        return system
    return _content([_system_text(f"system[{i}]", block) for i, block in enumerate(system)])


def _by_turn(messages: Sequence[WireMessage]) -> Iterator[tuple[Role, str, list[_Placed]]]:
    current: tuple[Role, str, list[_Placed]] | None = None
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidField(
                f"{place}.role", f"must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}"
            )
        blocks = _blocks(place, message)
        if not blocks and role != "assistant":
            raise InvalidField(f"{place}.content", "must hold at least one block")
        if current is not None and role != "system" and current[0] == role:
            if blocks:
                first = _Placed(blocks[0].place, blocks[0].block, begins=True)
                current[2].extend([first, *blocks[1:]])
            continue
        if current is not None:
            yield current
        current = (role, place, blocks)
    if current is not None:
        yield current


def _blocks(place: str, message: WireMessage) -> list[_Placed]:
    if isinstance(message.content, str):
        return [_Placed(f"{place}.content", WireBlock(type="text", text=message.content))]
    return [_Placed(f"{place}.content[{i}]", block) for i, block in enumerate(message.content)]


def _user(place: str, blocks: Sequence[_Placed], turns: Turns) -> Iterator[PlacedMessage]:
    texts: list[Part] = []
    for each in blocks:
        block = each.block
        if block.type == "tool_result":
            yield _result(each)
        elif _is_foreign(block.type):
            turns.note(f"blocks of type {block.type[:60]} are not in the prompt")
        else:
            text = _text_of(each.place, block)
            if text is None:
                raise _refusal(each.place, block.type)
            texts.append(TextPart(text=_joined(text, each, texts)))
    if texts:
        yield PlacedMessage(message=Message(role="user", content=_content(texts)), place=place)


def _assistant(place: str, blocks: Sequence[_Placed], turns: Turns) -> PlacedMessage:
    texts: list[Part] = []
    thoughts: list[str] = []
    calls: list[ToolCallRef] = []
    for each in blocks:
        block = each.block
        match block.type:
            case "text":
                text = _required(each, "text", block.text)
                texts.append(TextPart(text=_joined(text, each, texts)))
            case "thinking":
                thoughts.append(_required(each, "thinking", block.thinking))
            case "redacted_thinking":
                pass  # what it holds can be read by its maker alone
            case "tool_use":
                calls.append(_past_call(each))
            case kind if _is_foreign(kind):
                turns.note(f"blocks of type {kind[:60]} are not in the prompt")
            case kind:
                raise _refusal(each.place, kind)
    message = Message(
        role="assistant",
        content=_content(texts),
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        tool_calls=tuple(calls),
    )
    return PlacedMessage(message=message, place=place)


def _system(place: str, blocks: Sequence[_Placed]) -> PlacedMessage:
    texts = [_system_text(each.place, each.block) for each in blocks]
    return PlacedMessage(message=Message(role="system", content=_content(texts)), place=place)


def _system_text(place: str, block: WireBlock) -> Part:
    if block.type != "text":
        raise InvalidField(f"{place}.type", f"must be text here, got {block.type[:40]!r}")
    return TextPart(text=_required(_Placed(place, block), "text", block.text))


def _past_call(each: _Placed) -> ToolCallRef:
    block = each.block
    given = {} if block.input is None else block.input
    if not isinstance(given, Mapping):
        raise InvalidField(f"{each.place}.input", "must be an object")
    return ToolCallRef(
        call_id=_required(each, "id", block.id),
        name=_required(each, "name", block.name),
        arguments=canonical_json(given),
    )


def _result(each: _Placed) -> PlacedMessage:
    block = each.block
    given = "" if block.content is None else block.content
    if isinstance(given, str):
        parts: list[Part] = [TextPart(text=given)]
    elif isinstance(given, list):
        parts = [_result_part(f"{each.place}.content[{i}]", part) for i, part in enumerate(given)]
    else:
        raise InvalidField(f"{each.place}.content", "must be a string or an array of blocks")
    if block.is_error:  # no template has a place for it
        parts.insert(0, TextPart(text="Error: "))
    message = Message(
        role="tool",
        content=_content(parts),
        tool_call_id=_required(each, "tool_use_id", block.tool_use_id),
    )
    return PlacedMessage(message=message, place=each.place)


def _result_part(place: str, value: Any) -> Part:
    """A picture or file that a tool sent stays as such: the prompt gets a note in its place."""
    try:
        block = msgspec.convert(value, WireBlock)
    except msgspec.ValidationError:
        raise InvalidField(place, "must be an object with a type, as {type, text}") from None
    text = _text_of(place, block)
    if text is not None:
        return TextPart(text=text)
    match block.type:
        case "image":
            return MediaPart(kind="image", source=_address(block))
        case "document":
            return MediaPart(kind="document", source=_address(block))
        case "tool_reference":
            return TextPart(text=block.tool_name or "")
        case kind if _is_foreign(kind) or kind == "browser_state":
            return TextPart(text=f"[{kind[:60]} left out]")
        case kind:
            raise _refusal(place, kind)


def _text_of(place: str, block: WireBlock) -> str | None:
    """The text of a block that is made of text; None for any other."""
    if block.type == "text":
        return _required(_Placed(place, block), "text", block.text)
    if block.type == "search_result":
        return _titled(block.title, _inner_text(f"{place}.content", block.content))
    source = _source(block)
    if block.type == "document" and source.get("type") == "text":
        data = source.get("data")
        if not isinstance(data, str):
            raise InvalidField(f"{place}.source.data", "must be a string")
        return _titled(block.title, data)
    if block.type == "document" and source.get("type") == "content":
        content = source.get("content")
        return _titled(block.title, _inner_text(f"{place}.source.content", content))
    return None


def _inner_text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(place, "must be a string or an array of text blocks")
    texts: list[str] = []
    for i, value in enumerate(content):
        text = value.get("text") if isinstance(value, Mapping) else None
        if not isinstance(text, str):
            raise InvalidField(f"{place}[{i}]", "must be a text block: this model reads text only")
        texts.append(text)
    return "".join(texts)


def _titled(title: str | None, text: str) -> str:
    return f"{title}\n{text}" if title else text


def _refusal(place: str, kind: str) -> InvalidField:
    if kind in ("image", "document"):
        what = "an image" if kind == "image" else "a document that is not plain text"
        return InvalidField(place, f"this model reads text only, got {what}")
    return InvalidField(f"{place}.type", f"{kind[:40]!r} is not supported here")


def _source(block: WireBlock) -> Mapping[str, Any]:
    return block.source if isinstance(block.source, dict) else {}


def _address(block: WireBlock) -> str:
    source = _source(block)
    return str(source.get("url") or source.get("data") or "")


def _is_foreign(kind: str) -> bool:
    return kind in _FOREIGN or kind.endswith(_FOREIGN_SUFFIX)


def _joined(text: str, each: _Placed, before: Sequence[Part]) -> str:
    return _TURN_BREAK + text if each.begins and before else text


def _content(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    if not parts:
        return ""
    first = parts[0]
    return first.text if len(parts) == 1 and isinstance(first, TextPart) else tuple(parts)


def _required(each: _Placed, name: str, value: str | None) -> str:
    if value is None:
        raise InvalidField(f"{each.place}.{name}", "is required")
    return value

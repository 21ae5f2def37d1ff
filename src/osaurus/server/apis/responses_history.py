"""A conversation's items as the messages that `chat/` takes, and the way back for its errors.

What an assistant said between two words of others is one turn: its thinking, its text and its
calls are one message, as chat templates expect them. Thinking or text that follows text begins
a turn of its own, unless calls wait for their results.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from osaurus.errors import InvalidField
from osaurus.server.apis.responses_items import MEDIA_PARTS, TEXT_PARTS, summary_of
from osaurus.server.apis.responses_wire import Item
from osaurus.types.chat import MediaPart, Message, Part, TextPart, ToolCallRef

#: Put where a tool sent a file: nothing here reads files.
_FILE_NOTE = "[file left out: this server reads text only]"

#: Before what stands for the part of a conversation that was summed up.
_SUMMARY_HEAD = "Summary of the conversation so far:"

_PLACE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)


@dataclass(slots=True)
class _Turn:
    """An assistant's, still growing."""

    where: str
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[ToolCallRef] = field(default_factory=list)

    @property
    def takes_more(self) -> bool:
        return bool(self.calls) or not self.text


@dataclass(slots=True)
class Conversation:
    """`notes` say what was left out."""

    messages: list[Message] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _origins: list[str] = field(default_factory=list)
    _turn: _Turn | None = None

    def add_instructions(self, text: str) -> None:
        self._append("instructions", Message(role="system", content=text))

    def add(self, items: Sequence[Item], where: str) -> None:
        """`where` has a place for an item's number: the field that a fault in it is named by."""
        for i, item in enumerate(items):
            self._add(item, where.format(i))
        self._close()

    @contextmanager
    def naming_items(self) -> Generator[None]:
        """A fault that `chat/` finds in a message is named by the item's place in the request."""
        try:
            yield
        except InvalidField as error:
            raise self.renamed(error) from None

    def renamed(self, error: InvalidField) -> InvalidField:
        found = _PLACE.fullmatch(error.field)
        if found is None or int(found[1]) >= len(self._origins):
            return error
        rest = found[2].replace("tool_call_id", "call_id")
        message = error.message.removeprefix(f"{error.field}: ")
        return InvalidField(f"{self._origins[int(found[1])]}{rest}", message)

    def _add(self, item: Item, where: str) -> None:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                self._open(where).text += map(_text, item["content"])
            case "message":
                self._append(
                    where, Message(role=item["role"], content=_spoken(where, item["content"]))
                )
            case "reasoning":
                thoughts = list(map(_text, item.get("content") or item["summary"]))
                if thoughts:  # encrypted thinking is another server's, and unreadable here
                    self._open(where).reasoning += thoughts
            case "function_call":
                call = ToolCallRef(
                    call_id=item["call_id"], name=item["name"], arguments=item["arguments"]
                )
                self._calling(where).calls.append(call)
            case "function_call_output":
                content = item["output"]
                if not isinstance(content, str):
                    content = tuple(map(_seen_by_tool, content))
                self._append(
                    where, Message(role="tool", content=content, tool_call_id=item["call_id"])
                )
            case "compaction" if (summary := summary_of(item)) is not None:
                self._append(where, Message(role="user", content=f"{_SUMMARY_HEAD}\n{summary}"))
            case kind:
                note = f"items of type {str(kind)[:40]!r} are not served: left out of the prompt"
                if note not in self.notes:
                    self.notes.append(note)

    def _open(self, where: str) -> _Turn:
        """The turn that what is thought or said next belongs to."""
        if self._turn is None or not self._turn.takes_more:
            self._close()
            self._turn = _Turn(where)
        return self._turn

    def _calling(self, where: str) -> _Turn:
        if self._turn is None:
            self._turn = _Turn(where)
        return self._turn

    def _close(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        message = Message(
            role="assistant",
            content="".join(turn.text),
            reasoning_content="\n\n".join(turn.reasoning) if turn.reasoning else None,
            tool_calls=tuple(turn.calls),
        )
        self._append(turn.where, message)

    def _append(self, where: str, message: Message) -> None:
        self._close()
        self.messages.append(message)
        self._origins.append(where)


def _text(part: dict[str, Any]) -> str:
    """Of a part that an assistant may have said; pictures in its mouth have no words."""
    return part.get(TEXT_PARTS.get(part["type"], ""), "")


def _spoken(where: str, parts: Sequence[dict[str, Any]]) -> tuple[Part, ...]:
    return tuple(_part(f"{where}.content[{i}]", part) for i, part in enumerate(parts))


def _part(where: str, part: dict[str, Any]) -> Part:
    kind = part["type"]
    if kind in TEXT_PARTS:
        return TextPart(text=_text(part))
    if kind not in MEDIA_PARTS:
        raise InvalidField(f"{where}.type", "'input_file' is not supported; send its text")
    source = _source(part)
    if not source:
        raise InvalidField(f"{where}.{MEDIA_PARTS[kind]}", "is required; file ids are not served")
    return MediaPart(kind=_media_kind(kind), source=source)


def _seen_by_tool(part: dict[str, Any]) -> Part:
    kind = part["type"]
    if kind in TEXT_PARTS:
        return TextPart(text=_text(part))
    if kind in MEDIA_PARTS:
        return MediaPart(kind=_media_kind(kind), source=_source(part))
    return TextPart(text=_FILE_NOTE)


def _media_kind(kind: str) -> Literal["image", "audio", "video"]:
    return "image" if kind == "input_image" else "video" if kind == "input_video" else "audio"


def _source(part: dict[str, Any]) -> str:
    source = part.get(MEDIA_PARTS[part["type"]])
    if isinstance(source, dict):
        source = source.get("url") or source.get("data")
    return source if isinstance(source, str) else ""

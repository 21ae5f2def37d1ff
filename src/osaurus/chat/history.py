"""A conversation as one chat template wants it: plain dictionaries, one per message.

In: messages and the template's `Traits`. Out: what to render, and a note for every fallback that
changed what the template sees. Here alone it is decided what a template sees of past calls and
results, of thinking that a client left inside an answer, and of pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from osaurus.chat.traits import SHORT_ID_LENGTH, Traits, View, as_parts, call_view
from osaurus.chat.turns import (
    answered,
    behind_their_calls,
    call_id,
    folded,
    system_in_user,
    with_text_in_system,
)
from osaurus.errors import InvalidField
from osaurus.types.chat import SYSTEM_ROLES, MediaPart, Message, ToolCallRef

#: Put where a tool sent a picture that this model cannot look at.
_MEDIA_NOTE = "[{kind} left out: this model reads text only]"

#: Thinking markers that clients of servers without a reasoning rail leave in their history.
THINKING_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


class History:
    """Prepares one conversation. `views` is what to render, `notes` say what was done to it;
    `has_worded_calls` where past calls are shown by `call_text`.

    Raises `InvalidField` for media in anything but a tool's output and for a result that answers
    no call. `extra_system` is text of the server's own for the system message; `markers` are the
    thinking markers that are tokens of this model.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        traits: Traits,
        *,
        markers: Sequence[tuple[str, str]] = (),
        extra_system: str = "",
    ) -> None:
        self.notes: list[str] = []
        self.has_worded_calls = False
        self._traits = traits
        self._markers = markers
        self._answered = answered(messages)
        views = [view for i, message in enumerate(messages) for view in self._view(i, message)]
        views = self._with_results(views)
        views = self._with_system(views, extra_system)
        if traits.must_alternate:
            views = self._alternating(views)
        if traits.content == "parts":
            views = [
                view if view["content"] is None else {**view, "content": as_parts(view["content"])}
                for view in views
            ]
        self.views = views

    # One message.

    def _view(self, index: int, message: Message) -> list[View]:
        content, reasoning = _content(index, message), message.reasoning_content
        if message.role == "assistant" and reasoning is None:
            reasoning, content = _separated(content, self._markers)
        is_developer = message.role == "developer" and not self._traits.takes_developer
        view: View = {"role": "system" if is_developer else message.role, "content": content}
        if reasoning is not None:
            view[self._traits.reasoning_key] = reasoning
        if message.name is not None:
            view["name"] = message.name
        if (result := self._answered.get(index)) is not None:
            view["tool_call_id"] = self._id(result.call_id)
            view.setdefault("name", result.tool)
        if not message.tool_calls:
            return [view]
        return self._calling(view, message.tool_calls)

    def _calling(self, view: View, calls: Sequence[ToolCallRef]) -> list[View]:
        if not self._traits.has_calls:
            self._note("the template drops past calls: they are in the answer's text")
            self.has_worded_calls = True
            texts = [view["content"], *map(call_text, calls)]
            return [{**view, "content": "\n".join(filter(None, texts))}]
        before, view = self._apart(view)
        shown = [self._call(i, call) for i, call in enumerate(calls)]
        if len(shown) == 1 or self._traits.takes_several_calls:
            return [*before, {**view, "tool_calls": shown}]
        self._note("the template takes one call at a time: parallel calls are one after another")
        silent = {"role": "assistant", "content": self._no_text}
        others = ({**silent, "tool_calls": [one]} for one in shown[1:])
        return [*before, {**view, "tool_calls": shown[:1]}, *others]

    def _apart(self, view: View) -> tuple[list[View], View]:
        """A calling message without what hides its calls or has it refused, and what goes
        before it instead."""
        text, key = view["content"], self._traits.reasoning_key
        if not text:
            return [], {**view, "content": self._no_text}
        if not self._traits.takes_text_with_calls:
            self._note("the template drops calls beside text: the text is a message before them")
            return [{"role": "assistant", "content": text}], {**view, "content": self._no_text}
        if view.get(key) and not self._traits.takes_text_with_thinking:
            self._note("the template takes no text beside thinking and a call: they were joined")
            return [], {**view, "content": self._no_text, key: f"{view[key]}\n\n{text}"}
        return [], view

    @property
    def _no_text(self) -> str | None:
        return None if self._traits.null_content else ""

    def _call(self, index: int, call: ToolCallRef) -> View:
        function = {"name": call.name, "arguments": self._arguments(call.arguments)}
        shown_id = self._id(call_id(call, index))
        return call_view(shown_id, function, is_flat=self._traits.is_flat)

    def _arguments(self, text: str) -> Any:
        """An object where the text is one and the template wants it, else the raw text."""
        if self._traits.arguments == "text":
            return text or "{}"
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        return text if self._traits.takes_raw_arguments else {"arguments": text}

    def _id(self, known_id: str) -> str:
        """The same short id for a call and its result, in every turn."""
        is_fit = len(known_id) == SHORT_ID_LENGTH and known_id.isalnum() and known_id.isascii()
        if not self._traits.needs_short_ids or is_fit:
            return known_id
        return hashlib.sha256(known_id.encode("utf-8", "replace")).hexdigest()[:SHORT_ID_LENGTH]

    # The conversation.

    def _with_results(self, views: list[View]) -> list[View]:
        """Results behind the calls that they answer, in the template's own place."""
        traits = self._traits
        if not traits.takes_several_calls:
            views = behind_their_calls(views)
        if traits.results == "messages" or not any(view["role"] == "tool" for view in views):
            return views
        if traits.results == "folded":
            return folded(views, text_after_results=traits.text_after_results)
        self._note("the template drops tool results: they are in a user message")
        merged: list[View] = []
        for view in views:
            if view["role"] != "tool":
                merged.append(view)
                continue
            text = f"<tool_response>\n{view['content']}\n</tool_response>"
            if merged and merged[-1].get("is_result"):
                merged[-1]["content"] += "\n" + text
            else:
                merged.append({"role": "user", "content": text, "is_result": True})
        return [
            {key: value for key, value in view.items() if key != "is_result"} for view in merged
        ]

    def _with_system(self, views: list[View], extra: str) -> list[View]:
        is_system = [view["role"] in SYSTEM_ROLES for view in views]
        merges = self._traits.only_first_system or not self._traits.has_system
        if merges and any(is_system):
            first, *_ = system = [view for view in views if view["role"] in SYSTEM_ROLES]
            texts = [view["content"] for view in system]
            others = [view for view in views if view["role"] not in SYSTEM_ROLES]
            if any(is_system[1:]):
                self._note("the template takes one system message, first: they were merged")
            merged = "\n\n".join(filter(None, texts))
            views = [{"role": first["role"], "content": merged}, *others]
        if extra:
            views = with_text_in_system(views, extra)
        if self._traits.needs_system and views[:1] and views[0]["role"] not in SYSTEM_ROLES:
            views = [{"role": "system", "content": ""}, *views]
        if not self._traits.has_system and views and views[0]["role"] in SYSTEM_ROLES:
            self._note("the template refuses a system message: it begins the first user message")
            views = system_in_user(views)
        return views

    def _alternating(self, views: list[View]) -> list[View]:
        merged: list[View] = []
        for view in views:
            last = merged[-1] if merged else None
            is_plain = "tool_calls" not in view and view["role"] in ("user", "assistant")
            if last and is_plain and last["role"] == view["role"] and "tool_calls" not in last:
                self._note("the template wants turns to alternate: neighbours were merged")
                texts = filter(None, (last["content"], view["content"]))
                merged[-1] = {**last, "content": "\n\n".join(texts)}
            else:
                merged.append(view)
        return merged

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def call_text(call: ToolCallRef) -> str:
    """A call as models that were given no notation of their own are asked to write it."""
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    is_object = isinstance(value, dict)
    arguments = json.dumps(value, ensure_ascii=False) if is_object else call.arguments
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _content(index: int, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in message.content:
        if not isinstance(part, MediaPart):
            texts.append(part.text)
        elif message.role == "tool":
            texts.append(_MEDIA_NOTE.format(kind=part.kind))
        else:
            raise InvalidField(
                f"messages[{index}].content", f"this model reads text only, got {part.kind}"
            )
    return "".join(texts)


def _separated(content: str, markers: Sequence[tuple[str, str]]) -> tuple[str | None, str]:
    """Thinking and answer, as the model's output was before a client joined them.

    Left as it is when nothing closes: a mention of a marker is not thinking. A closer without
    opener counts, since many templates open the block in the prompt.
    """
    for opener, closer in markers:
        before, found, after = content.partition(closer)
        if not found:
            continue
        opened = before.lstrip()
        if opened.startswith(opener):
            return opened[len(opener) :].strip("\n"), after.lstrip("\n")
        if opener not in content:
            return before.strip("\n"), after.lstrip("\n")
    return None, content

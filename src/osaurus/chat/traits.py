"""What a chat template takes and what it drops, as values, and what is done about it in words.

`probes.py` finds the traits out by rendering small conversations; `history.py` prepares messages
by them, the same way for every turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: A call id of nine letters and digits is the only kind that some templates let pass.
SHORT_ID_LENGTH = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The defaults are those of a template that takes everything as the usual clients send it."""

    has_system: bool = True
    needs_system: bool = False
    only_first_system: bool = False
    takes_developer: bool = False  #: knows the role, else it is shown system messages
    must_alternate: bool = False
    content: Literal["text", "parts"] = "text"
    arguments: Literal["mapping", "text"] = "mapping"
    #: Whether arguments that are no object may be passed on as they are.
    takes_raw_arguments: bool = True
    is_flat: bool = False  #: reads `call.name` instead of `call.function.name`
    has_calls: bool = True
    takes_several_calls: bool = True
    takes_text_with_calls: bool = True  #: shows the calls of a message that has text too
    #: Shows the calls of a message that has text and thinking too.
    takes_text_with_thinking: bool = True
    null_content: bool = False  #: tells a message without text by its content being none
    results: Literal["messages", "folded", "none"] = "messages"
    #: Where results are folded: shows the calling message's text behind them, which ends the turn.
    text_after_results: bool = False
    needs_short_ids: bool = False
    has_tools: bool = True
    #: Joins descriptions to other text, so that a missing one is an error.
    joins_tool_description: bool = False
    joins_parameter_description: bool = False
    takes_last_answer: bool = True  #: an assistant's message may be the last one
    reasoning_key: str = "reasoning_content"
    reads_tool_choice: bool = False


def fallbacks(traits: Traits) -> list[str]:
    """What `history.py` does to conversations for the sake of this template, in words."""
    usual = Traits()
    words = {
        "has_system": "system messages go into the first user message",
        "needs_system": "an empty system message is put first",
        "only_first_system": "system messages are merged into the first",
        "must_alternate": "neighbouring messages of one role are merged",
        "has_calls": "past calls are written into the answer's text",
        "takes_several_calls": "parallel calls are put one after another",
        "takes_text_with_calls": "text beside a call becomes a message of its own",
        "takes_text_with_thinking": "text beside thinking and a call is joined to the thinking",
        "needs_short_ids": f"call ids become {SHORT_ID_LENGTH} characters",
        "has_tools": "tools are described in the system message",
        "takes_last_answer": "an assistant's message at the end is continued",
    }
    found = [text for name, text in words.items() if getattr(traits, name) != getattr(usual, name)]
    if traits.results == "none":
        found.append("tool results go into user messages")
    elif traits.results == "folded":
        found.append("tool results go into the calling message")
    return found


View = dict[str, Any]


def call_view(call_id: str, function: View, *, is_flat: bool) -> View:
    """One past call as templates read it."""
    view: View = {"id": call_id, "type": "function"}
    return {**view, **function} if is_flat else {**view, "function": dict(function)}


def as_parts(content: str | None) -> list[View]:
    """A text in the form of templates that were made for pictures too."""
    return [{"type": "text", "text": content}] if content else []

"""What is done to a whole conversation for a template's sake, as functions over its messages.

In and out: plain dictionaries, one per message, as `history.py` makes them; none is changed.
Here too: which call each result answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from osaurus.chat.traits import View
from osaurus.errors import InvalidField
from osaurus.types.chat import SYSTEM_ROLES, Message, ToolCallRef


def call_id(call: ToolCallRef, index: int) -> str:
    """The id of a message's call; clients may leave it out."""
    return call.call_id or f"call_{index}_{call.name}"


class Answered(NamedTuple):
    call_id: str
    tool: str


def answered(messages: Sequence[Message]) -> dict[int, Answered]:
    """The call that each result answers, by the index of the result.

    Raises `InvalidField` for one that answers none: templates would refuse it in words about
    something else, or write a result that nobody asked for. A result without id answers the
    first open call of the last calling message; one with an unknown id may answer a call that
    came without.
    """
    found: dict[int, Answered] = {}
    waiting: dict[str, deque[str]] = {}  # tools by call id
    recent: deque[str] = deque()  # ids of the last calling message
    nameless: dict[str, None] = {}  # ids that no client knows
    for index, message in enumerate(messages):
        if message.tool_calls:
            calls = [(call_id(call, i), call) for i, call in enumerate(message.tool_calls)]
            # An id that comes again in a later message means the later call.
            waiting.update({known: deque() for known, _ in calls})
            for known, call in calls:
                waiting[known].append(call.name)
            recent = deque(known for known, _ in calls)
            nameless.update(dict.fromkeys(known for known, call in calls if not call.call_id))
        if message.role != "tool":
            continue
        wanted = message.tool_call_id
        while recent and recent[0] not in waiting:
            recent.popleft()
        known = wanted if wanted in waiting else next(iter(nameless if wanted else recent), None)
        if known is None:
            why = "was answered before" if wanted in _ids(messages[:index]) else "is not there"
            raise InvalidField(
                f"messages[{index}].tool_call_id",
                f"must be the id of a call in an earlier message; {(wanted or '')[:80]!r} {why}",
            )
        found[index] = Answered(known, waiting[known].popleft())
        if not waiting[known]:
            del waiting[known]
            nameless.pop(known, None)
    return found


def _ids(messages: Sequence[Message]) -> set[str]:
    return {call_id(call, i) for each in messages for i, call in enumerate(each.tool_calls)}


def behind_their_calls(views: Sequence[View]) -> list[View]:
    """Each result right behind its call, for templates that know no parallel calls."""
    ordered: list[View] = []
    waiting: list[View] = []

    def settle() -> None:
        results: dict[str, deque[View]] = {}
        for view in waiting:
            if view["role"] == "tool":
                results.setdefault(view["tool_call_id"], deque()).append(view)
        for view in waiting:
            if view["role"] != "tool":
                ordered.append(view)
                own = results.get(view["tool_calls"][0]["id"])
                if own:
                    ordered.append(own.popleft())
        ordered.extend(chain.from_iterable(results.values()))
        waiting.clear()

    for view in views:
        if view["role"] == "tool" or view.get("tool_calls"):
            if view.get("tool_calls") and waiting and waiting[-1]["role"] == "tool":
                settle()
            waiting.append(view)
        else:
            settle()
            ordered.append(view)
    settle()
    return ordered


def folded(views: Sequence[View], *, text_after_results: bool) -> list[View]:
    """Results inside the calling message, whose turn the template then leaves open.

    With `text_after_results` its text is what comes behind them and ends the turn: the answer
    that follows goes there, and what was said before the call into a message before.
    """
    found: list[View] = []
    for i, view in enumerate(views):
        last: View = found[-1] if found else {}
        if view["role"] == "tool" and last.get("tool_calls"):
            if text_after_results and last["content"] and "tool_responses" not in last:
                text = {"role": "assistant", "content": last["content"]}
                found.pop()
                if not _continue(found, text):
                    found.append(text)
                found.append({**last, "content": ""})
            responses = found[-1].setdefault("tool_responses", [])
            responses.append({"name": view.get("name", ""), "response": view["content"]})
            continue
        is_answer = view["role"] == "assistant" and "tool_calls" not in view
        # The last one may have to be continued itself.
        if is_answer and text_after_results and i < len(views) - 1 and _continue(found, view):
            continue
        found.append(dict(view))
    return found


def _continue(views: list[View], answer: View) -> bool:
    """Put an answer into the turn that results left open, if there is one."""
    is_open = bool(views) and "tool_responses" in views[-1] and not views[-1]["content"]
    if is_open:
        views[-1] = {**views[-1], "content": answer["content"]}
    return is_open


def with_text_in_system(views: Sequence[View], text: str) -> list[View]:
    if views and views[0]["role"] in SYSTEM_ROLES:
        first = {**views[0], "content": "\n\n".join(filter(None, (views[0]["content"], text)))}
        return [first, *views[1:]]
    return [{"role": "system", "content": text}, *views]


def system_in_user(views: Sequence[View]) -> list[View]:
    system, *others = views
    text = system["content"]
    if not text:
        return others
    for i, view in enumerate(others):
        if view["role"] == "user":
            joined = "\n\n".join(filter(None, (text, view["content"])))
            return [*others[:i], {**view, "content": joined}, *others[i + 1 :]]
    return [{"role": "user", "content": text}, *others]

"""What a chat template takes and what it drops, found out by rendering small conversations.

Templates refuse, ignore or repeat things without saying so beforehand. Each is probed once, with
made-up words that must come out again, so that `history.py` can prepare messages the same way
for every turn; trying another preparation only after a failure would change prompt prefixes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from osaurus.errors import TemplateError
from osaurus.runtime.model import Template

logger = logging.getLogger(__name__)

#: All probes together. A common template takes a hundredth of it.
PROBE_TIME_S = 0.3

#: A call id of nine letters and digits is the only kind that some templates let pass.
SHORT_ID_LENGTH = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The defaults are those of a template that takes everything as the usual clients send it."""

    has_system: bool = True
    needs_system: bool = False
    only_first_system: bool = False
    must_alternate: bool = False
    content: Literal["text", "parts"] = "text"
    arguments: Literal["mapping", "text"] = "mapping"
    #: Whether arguments that are no object may be passed on as they are.
    takes_raw_arguments: bool = True
    is_flat: bool = False  #: reads `call.name` instead of `call.function.name`
    has_calls: bool = True
    takes_several_calls: bool = True
    results: Literal["messages", "folded", "none"] = "messages"
    needs_short_ids: bool = False
    has_tools: bool = True
    takes_last_answer: bool = True  #: an assistant's message may be the last one
    reasoning_key: str = "reasoning_content"
    reads_tool_choice: bool = False


@lru_cache(maxsize=32)
def traits_of(template: Template) -> Traits:
    """Raises `TemplateError` when it cannot be rendered at all. Deterministic, and kept."""
    template.check()
    traits = _declared(template.source)
    try:
        return _probed(_Prober(template), traits)
    except _OutOfTime:
        logger.warning("a chat template took more than %g s to probe", PROBE_TIME_S)
        return traits


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


_SYSTEM, _LATER, _QUESTION, _ANSWER, _NEXT = (
    f"probe{word}" for word in ("Sigma", "Lambda", "Kappa", "Alpha", "Omega")
)
_RESULT, _KEY, _VALUE, _FUNCTION = (f"probe{word}" for word in ("Rho", "Iota", "Nu", "Phi"))
_IDS = ("call_0", "callZero1")
_TOOL = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "probe"}},
            "required": [_KEY],
        },
    },
}

View = dict[str, Any]


class _OutOfTime(Exception):
    pass


class _Prober:
    def __init__(self, template: Template) -> None:
        self._template = template.within(PROBE_TIME_S)
        self._deadline = time.monotonic() + PROBE_TIME_S

    def render(self, messages: Sequence[View], tools: Sequence[View] = ()) -> str:
        """The prompt; empty when the template refuses."""
        try:
            return self._template.render(
                messages, tools=list(tools) or None, add_generation_prompt=True
            )
        except TemplateError:
            return ""
        finally:
            if time.monotonic() > self._deadline:
                raise _OutOfTime

    def shows(self, messages: Sequence[View], *words: str, tools: Sequence[View] = ()) -> bool:
        rendered = self.render(messages, tools)
        return all(word in rendered for word in words) and bool(rendered)


def _declared(source: str) -> Traits:
    """What only the template's text can say."""
    key = "reasoning_content"
    if key not in source:
        for other in ("thinking", "reasoning"):
            if f"message.{other}" in source or f"message['{other}']" in source:
                key = other
                break
    return Traits(reasoning_key=key, reads_tool_choice="tool_choice" in source)


def _probed(prober: _Prober, traits: Traits) -> Traits:
    user, system = _text("user", _QUESTION), _text("system", _SYSTEM)
    start = [user]
    if not prober.shows(start, _QUESTION):
        if prober.shows([system, user], _QUESTION):
            traits, start = replace(traits, needs_system=True), [_text("system", ""), user]
        elif prober.shows([_parted(user)], _QUESTION):
            traits = replace(traits, content="parts")
        else:
            return traits  # refuses every conversation, or shows none: its own words will tell

    def fit(messages: Sequence[View]) -> list[View]:
        return [_parted(one) for one in messages] if traits.content == "parts" else [*messages]

    answer, following = _text("assistant", _ANSWER), _text("user", _NEXT)
    has_system = prober.shows(fit([system, user]), _SYSTEM, _QUESTION)
    later = _text("system", _LATER)
    takes_later = has_system and (
        prober.shows(fit([system, user, answer, later, following]), _SYSTEM, _LATER, _NEXT)
        and prober.shows(fit([system, later, user]), _SYSTEM, _LATER)
    )
    start = fit(start)
    traits = replace(
        traits,
        has_system=has_system,
        only_first_system=has_system and not takes_later,
        must_alternate=not prober.shows([*start, *fit([following])], _QUESTION, _NEXT),
        has_tools=prober.render(start, [_TOOL]) not in ("", prober.render(start)),
        takes_last_answer=bool(prober.render([*start, *fit([answer])])),
    )
    return _probed_calls(prober, traits, start)


def _probed_calls(prober: _Prober, traits: Traits, start: Sequence[View]) -> Traits:
    tools = [_TOOL] if traits.has_tools else []
    for found in _call_forms(traits):
        call = _call(found)
        result = {"role": "tool", "content": _RESULT, "tool_call_id": _id(found)}
        result["name"] = _FUNCTION
        for end in ([result], []):
            rendered = prober.render([*start, *_fitted(found, [call, *end])], tools)
            # A mapping printed as Python would write it was meant to be text.
            if _VALUE in rendered and f"{{'{_KEY}'" not in rendered:
                traits = replace(found, results="messages" if _RESULT in rendered else "none")
                break
        else:
            continue
        break
    else:
        results = _text("tool", _RESULT)
        has_results = prober.shows([*start, _text("assistant", _ANSWER), results], _RESULT)
        return replace(traits, has_calls=False, results="messages" if has_results else "none")

    if traits.results == "none" and _takes_folded(prober, traits, start, tools):
        traits = replace(traits, results="folded")
    raw = _call(traits, arguments=f"raw {_VALUE}")
    several = _call(traits, num_calls=2)
    results = [
        {"role": "tool", "content": _RESULT, "tool_call_id": _id(traits, i), "name": _FUNCTION}
        for i in range(2)
    ]
    if traits.results != "messages":
        results = []
    tail = results[:1]
    return replace(
        traits,
        takes_raw_arguments=prober.shows(
            [*start, *_fitted(traits, [raw, *tail])], f"raw {_VALUE}", tools=tools
        ),
        takes_several_calls=bool(
            prober.render([*start, *_fitted(traits, [several, *results])], tools)
        ),
    )


def _call_forms(traits: Traits) -> Iterator[Traits]:
    """The usual form first."""
    for needs_short_ids in (False, True):
        for is_flat in (False, True):
            for arguments in ("mapping", "text"):
                yield replace(
                    traits,
                    needs_short_ids=needs_short_ids,
                    is_flat=is_flat,
                    arguments=arguments,
                )


def _takes_folded(
    prober: _Prober, traits: Traits, start: Sequence[View], tools: Sequence[View]
) -> bool:
    call = _call(traits)
    call["tool_responses"] = [{"name": _FUNCTION, "response": _RESULT}]
    return prober.shows([*start, *_fitted(traits, [call])], _RESULT, tools=tools)


def _call(traits: Traits, *, arguments: str | None = None, num_calls: int = 1) -> View:
    given: Any = arguments
    if given is None:
        given = {_KEY: _VALUE} if traits.arguments == "mapping" else f'{{"{_KEY}": "{_VALUE}"}}'
    function = {"name": _FUNCTION, "arguments": given}
    calls = [call_view(_id(traits, i), function, is_flat=traits.is_flat) for i in range(num_calls)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def call_view(call_id: str, function: Mapping[str, Any], *, is_flat: bool) -> View:
    """One past call as templates read it."""
    view: View = {"id": call_id, "type": "function"}
    return {**view, **function} if is_flat else {**view, "function": dict(function)}


def _id(traits: Traits, number: int = 0) -> str:
    return f"{_IDS[traits.needs_short_ids][:-1]}{number}"


def _fitted(traits: Traits, messages: Sequence[View]) -> list[View]:
    return [_parted(one) if traits.content == "parts" else one for one in messages]


def _text(role: str, content: str) -> View:
    return {"role": role, "content": content}


def _parted(message: View) -> View:
    return {**message, "content": as_parts(message["content"])}


def as_parts(content: str) -> list[View]:
    """A text in the form of templates that were made for pictures too."""
    return [{"type": "text", "text": content}] if content else []

"""A chat template's traits, found out by rendering small conversations.

Templates refuse, ignore or repeat things without saying so beforehand. Each is probed once, with
made-up words that must come out again, so that `history.py` can prepare messages the same way
for every turn; trying another preparation only after a failure would change prompt prefixes.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from osaurus.chat.traits import Traits, View, as_parts, call_view
from osaurus.errors import TemplateError
from osaurus.runtime.model import Template

logger = logging.getLogger(__name__)

#: All probes together. A common template takes a hundredth of it.
PROBE_TIME_S = 0.3


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


def tells_apart(template: Template, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two sets of template switches make a difference to a prompt."""
    return _switched(template, _key(one)) != _switched(template, _key(other))


def refuses(template: Template, switches: Mapping[str, Any]) -> bool:
    """Whether the template takes conversations, but not with these switches."""
    return not _switched(template, _key(switches)) and bool(_switched(template, _key({})))


def _key(switches: Mapping[str, Any]) -> str:
    return json.dumps(switches, sort_keys=True, default=str)


@lru_cache(maxsize=64)
def _switched(template: Template, switches: str) -> str:
    """A question as it is rendered with these switches; empty when that is refused."""
    traits = traits_of(template)
    start = [_text("user", _QUESTION)]
    if traits.needs_system:
        start.insert(0, _text("system", ""))
    try:
        return template.within(PROBE_TIME_S).render(
            _fitted(traits, start), tools=None, add_generation_prompt=True, **json.loads(switches)
        )
    except TemplateError:
        return ""


_SYSTEM, _LATER, _QUESTION, _ANSWER, _NEXT = (
    f"probe{word}" for word in ("Sigma", "Lambda", "Kappa", "Alpha", "Omega")
)
_RESULT, _KEY, _VALUE, _FUNCTION = (f"probe{word}" for word in ("Rho", "Iota", "Nu", "Phi"))
_THOUGHT = "probeTheta"
_IDS = ("call_0", "callZero1")


def _tool(*, has_description: bool = True, describes_parameter: bool = True) -> View:
    text = {"description": "probe"}
    parameter = {"type": "string", **(text if describes_parameter else {})}
    return {
        "type": "function",
        "function": {
            "name": _FUNCTION,
            **(text if has_description else {}),
            "parameters": {
                "type": "object",
                "properties": {_KEY: parameter},
                "required": [_KEY],
            },
        },
    }


class _OutOfTime(Exception):
    pass


class _Prober:
    def __init__(self, template: Template) -> None:
        self.source = template.source
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
        takes_developer="developer" in prober.source
        and prober.shows(fit([_text("developer", _SYSTEM), user]), _SYSTEM, _QUESTION),
        only_first_system=has_system and not takes_later,
        must_alternate=not prober.shows([*start, *fit([following])], _QUESTION, _NEXT),
        **_probed_tools(prober, start),
        takes_last_answer=bool(prober.render([*start, *fit([answer])])),
    )
    return _probed_calls(prober, traits, start)


def _probed_tools(prober: _Prober, start: Sequence[View]) -> dict[str, bool]:
    def shows(**tool: bool) -> bool:
        return bool(prober.render(start, [_tool(**tool)]))

    if prober.render(start, [_tool()]) in ("", prober.render(start)):
        return {"has_tools": False}
    if shows(has_description=False, describes_parameter=False):
        return {}
    return {
        "joins_tool_description": not shows(has_description=False),
        "joins_parameter_description": not shows(describes_parameter=False),
    }


def _probed_calls(prober: _Prober, traits: Traits, start: Sequence[View]) -> Traits:
    tools = [_tool()] if traits.has_tools else []
    for found in _call_forms(traits, prober.source):
        call = _call(found)
        for end in ([_result(found)], []):
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

    def shown(*messages: View) -> str:
        return prober.render([*start, *_fitted(traits, messages)], tools)

    # First, since a template may write messages of any role, results among them.
    if "tool_responses" in prober.source:
        text = shown(_folded(traits, content=_ANSWER))
        if _RESULT in text and _VALUE in text:
            traits = replace(
                traits,
                results="folded",
                text_after_results=text.rfind(_ANSWER) > text.find(_RESULT),
            )
    tail = [_result(traits)] if traits.results == "messages" else []
    several = _call(traits, num_calls=2)
    results = [_result(traits, i) for i in range(2)] if tail else []
    takes_text = _VALUE in shown(_call(traits, content=_ANSWER), *tail)
    thinking = {**_call(traits, content=_ANSWER), traits.reasoning_key: _THOUGHT}
    raw = _call(traits, arguments=f"raw {_VALUE}")
    return replace(
        traits,
        takes_raw_arguments=f"raw {_VALUE}" in shown(raw, *tail),
        takes_several_calls=bool(shown(several, *results)),
        takes_text_with_calls=takes_text,
        takes_text_with_thinking=not takes_text or _VALUE in shown(thinking, *tail),
    )


#: A template that asks so tells a call without text from one with an empty text.
_TESTS_NONE = re.compile(r"content\W{0,4}\s(?:is\s+(?:not\s+)?|[!=]=\s*)none\b", re.IGNORECASE)


def _call_forms(traits: Traits, source: str) -> Iterator[Traits]:
    """The usual form first."""
    nulls = (True, False) if _TESTS_NONE.search(source) else (False,)
    for needs_short_ids in (False, True):
        for is_flat in (False, True):
            for arguments in ("mapping", "text"):
                for null_content in nulls:
                    yield replace(
                        traits,
                        needs_short_ids=needs_short_ids,
                        is_flat=is_flat,
                        arguments=arguments,
                        null_content=null_content,
                    )


def _call(
    traits: Traits, *, content: str = "", arguments: str | None = None, num_calls: int = 1
) -> View:
    given: Any = arguments
    if given is None:
        given = {_KEY: _VALUE} if traits.arguments == "mapping" else f'{{"{_KEY}": "{_VALUE}"}}'
    function = {"name": _FUNCTION, "arguments": given}
    calls = [call_view(_id(traits, i), function, is_flat=traits.is_flat) for i in range(num_calls)]
    text = content or (None if traits.null_content else "")
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _result(traits: Traits, number: int = 0) -> View:
    return {
        "role": "tool",
        "content": _RESULT,
        "tool_call_id": _id(traits, number),
        "name": _FUNCTION,
    }


def _folded(traits: Traits, *, content: str) -> View:
    responses = [{"name": _FUNCTION, "response": _RESULT}]
    return {**_call(traits, content=content), "tool_responses": responses}


def _id(traits: Traits, number: int = 0) -> str:
    return f"{_IDS[traits.needs_short_ids][:-1]}{number}"


def _fitted(traits: Traits, messages: Sequence[View]) -> list[View]:
    return [_parted(one) if traits.content == "parts" else one for one in messages]


def _text(role: str, content: str) -> View:
    return {"role": role, "content": content}


def _parted(message: View) -> View:
    content = message["content"]
    return message if content is None else {**message, "content": as_parts(content)}

"""What an OpenAI-like body says about thinking, by whichever of its fields.

Clients of many servers use these routes, each with its server's own field. An earlier field of
this table outranks a later one that says the same kind of thing, on or off or how much:

    enable_thinking   reasoning_effort   reasoning {enabled, effort, max_tokens}
    thinking {type, budget_tokens}   think   chat_template_kwargs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from osaurus.chat.profiles import EFFORT, SWITCH
from osaurus.errors import InvalidField


class ThinkingFields(Protocol):
    """A body that has them all, as they were sent."""

    reasoning_effort: str | None
    enable_thinking: bool | None
    reasoning: Any
    thinking: Any
    think: Any
    chat_template_kwargs: dict[str, Any] | None
    thinking_budget: int | None


_TYPES: Mapping[str, bool | None] = {
    "enabled": True,
    "disabled": False,
    "adaptive": None,
    "auto": None,
}


def thinking_switches(body: ThinkingFields) -> dict[str, Any]:
    """The request's own template switches. Raises `InvalidField`, its `field` as on the wire."""
    switches = dict(body.chat_template_kwargs or {})
    reasoning, thinking, think = _reasoning(body), _thinking(body), body.think
    if think is not None and not isinstance(think, (bool, str)):
        raise InvalidField("think", "must be true, false or an effort")
    enabled = (
        body.enable_thinking,
        _field("reasoning", reasoning, "enabled", bool),
        _type(thinking),
        think if isinstance(think, bool) else None,
    )
    efforts = (
        body.reasoning_effort,
        _field("reasoning", reasoning, "effort", str),
        think if isinstance(think, str) else None,
    )
    for name, values in ((SWITCH, enabled), (EFFORT, efforts)):
        value = _first(values)
        if value is not None:
            switches[name] = value
    return switches


def thinking_budget(body: ThinkingFields) -> int | None:
    """The bound on tokens spent on thinking, if the request names one."""
    fields = {
        "thinking_budget": body.thinking_budget,
        "reasoning.max_tokens": _field("reasoning", _reasoning(body), "max_tokens", int),
        "thinking.budget_tokens": _field("thinking", _thinking(body), "budget_tokens", int),
    }
    for name, budget in fields.items():
        if budget is not None and budget < 0:
            raise InvalidField(name, f"must be at least 0 tokens, got {budget}")
    return _first(fields.values())


def _reasoning(body: ThinkingFields) -> Mapping[str, Any]:
    return _object("reasoning", body.reasoning)


def _thinking(body: ThinkingFields) -> Mapping[str, Any]:
    if isinstance(body.thinking, bool):
        return {"type": "enabled" if body.thinking else "disabled"}
    return _object("thinking", body.thinking)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidField(name, "must be an object")
    return value


def _type(thinking: Mapping[str, Any]) -> bool | None:
    kind = _field("thinking", thinking, "type", str)
    if kind is None:
        return None
    if kind not in _TYPES:
        raise InvalidField(
            "thinking.type", f"must be one of {', '.join(_TYPES)}, got {kind[:40]!r}"
        )
    return _TYPES[kind]


def _field(name: str, value: Mapping[str, Any], key: str, kind: type) -> Any:
    found = value.get(key)
    if found is None:
        return None
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        words = {bool: "true or false", str: "a string", int: "a whole number"}
        raise InvalidField(f"{name}.{key}", f"must be {words[kind]}")
    return found


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)

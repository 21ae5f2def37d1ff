"""The caller's wish to think or not, as the switches that chat templates know.

Only an explicit choice becomes a switch; which families need another name for it, and which
default to off, belongs to the model profiles.
"""

from __future__ import annotations

_OFF_WORDS = frozenset(
    {"none", "off", "instruct", "chat", "no_think", "nothink", "disabled", "false"}
)


def thinking_switches(enable: bool | None, effort: str | None) -> dict[str, bool | str]:
    """Template keyword arguments. An explicit `enable` outranks what `effort` implies."""
    switches: dict[str, bool | str] = {}
    if effort is not None:
        switches["enable_thinking"] = effort.lower() not in _OFF_WORDS
        if switches["enable_thinking"]:
            switches["reasoning_effort"] = effort
    if enable is not None:
        switches["enable_thinking"] = enable
    return switches

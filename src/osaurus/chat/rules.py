"""What a request demands of its calls, kept for one choice, and what is said about the answer.

In: one choice's runtime events. Out: the same events less the calls that the request does not
want, the remarks for its end, or `ToolChoiceUnsatisfied`. Arguments are checked, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from osaurus.chat.arguments import ArgumentChecker
from osaurus.errors import ToolChoiceUnsatisfied
from osaurus.parsing.budget import ThinkingBudget
from osaurus.runtime.degeneration import DegenerationDetector
from osaurus.types.chat import ChatRequest
from osaurus.types.events import (
    Chunk,
    Info,
    Reasoning,
    RuntimeEvent,
    ToolCallProgress,
    ToolInvocation,
)


class ChoiceRules:
    """Feed it every event of a choice in order, the `Info` last.

    Where a call is required, visible text waits for it: an answer without one is an error, and
    an error must not begin as an answer.
    """

    def __init__(
        self,
        request: ChatRequest,
        checker: ArgumentChecker,
        notes: Sequence[str] = (),
        budget: ThinkingBudget | None = None,
        detector: DegenerationDetector | None = None,
    ) -> None:
        self._budget = budget
        self._detector = detector
        self._request = request
        self._checker = checker
        self._notes = list(notes)
        self._held: list[Chunk] = []
        self._num_calls = 0
        self._num_left_out = 0
        self._has_output = False
        self._faults: list[dict[str, Any]] = []

    def take(self, event: RuntimeEvent) -> list[RuntimeEvent]:
        """What of `event` goes on. Raises `ToolChoiceUnsatisfied` at the end of an answer that
        should have held a call; a cut answer is its own excuse."""
        match event:
            case Chunk(text):
                self._has_output = self._has_output or bool(text)
                if self._request.needs_call and not self._num_calls:
                    self._held.append(event)
                    return []
            case ToolCallProgress():
                if self._request.needs_call and not self._num_calls:
                    return []  # the call may turn out to be none that is wanted
            case Reasoning(text):
                self._has_output = self._has_output or bool(text)
            case ToolInvocation():
                return self._take_call(event)
            case Info():
                if self._lacks_call(event):
                    raise ToolChoiceUnsatisfied(self._reason())
                return [*self._release(), event]
            case _:
                pass
        return [event]

    def remarks(self, info: Info) -> Mapping[str, Any]:
        """What this server says about the choice beyond its protocol's fields."""
        found: dict[str, Any] = {}
        if info.unclosed_reasoning:
            found["unclosed_reasoning"] = True
        if info.tool_call_protocol_failure:
            found["tool_call_error"] = True
        if self._budget is not None and self._budget.has_fired:
            found["thinking_budget_reached"] = True
        if self._detector is not None and self._detector.found is not None:
            found["degeneration"] = self._detector.found
        if self._faults:
            found["tool_argument_errors"] = self._faults
        if self._num_left_out:
            found["tool_calls_left_out"] = self._num_left_out
        if not self._has_output and not self._num_calls and self._follows_results():
            found["empty_after_tool_results"] = True
        if self._notes:
            found["notes"] = self._notes
        return found

    def _take_call(self, call: ToolInvocation) -> list[RuntimeEvent]:
        request = self._request
        is_wanted = True
        if request.needs_call:
            is_wanted = self._checker.is_offered(call.name)
        if request.forced_tool is not None:
            is_wanted = call.name == request.forced_tool and self._num_calls == 0
        if not request.parallel_tool_calls and self._num_calls:
            is_wanted = False
        if not is_wanted:
            self._num_left_out += 1
            return []
        self._faults += [
            {"call": self._num_calls, "tool": call.name, **asdict(fault)}
            for fault in self._checker.faults(call)
        ]
        self._num_calls += 1
        return [*self._release(), call]

    def _release(self) -> list[RuntimeEvent]:
        held, self._held = self._held, []
        return list(held)

    def _lacks_call(self, info: Info) -> bool:
        return (
            self._request.needs_call
            and not self._num_calls
            and info.stop_reason == "stop"
            and info.error is None
        )

    def _reason(self) -> str:
        wanted = self._request.forced_tool
        if wanted is None:
            return "tool_choice asks for a call, and the model made none to an offered function"
        return f"tool_choice asks for a call to {wanted!r}, and the model made none"

    def _follows_results(self) -> bool:
        return any(message.role == "tool" for message in self._request.messages)

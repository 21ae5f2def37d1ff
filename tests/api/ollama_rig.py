"""The real `ollama` clients over a scripted server, all four ways of asking for one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ollama

from api.conftest import Running

Way = Literal["plain", "streamed", "async plain", "async streamed"]
WAYS: tuple[Way, ...] = ("plain", "streamed", "async plain", "async streamed")


@dataclass
class Answer:
    """What an answer said, whatever way it came; `lines` are the client's values."""

    lines: list[Any]
    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    logprobs: list[tuple[str, float, list[str]]] = field(default_factory=list)

    @property
    def last(self) -> Any:
        return self.lines[-1]


def collect(lines: Sequence[Any]) -> Answer:
    answer = Answer(list(lines))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    for line in lines:
        is_chat = isinstance(line, ollama.ChatResponse)
        part = line.message if is_chat else line
        answer.text += (part.content if is_chat else part.response) or ""
        answer.thinking += part.thinking or ""
        calls = (part.tool_calls or ()) if is_chat else ()
        answer.calls += [(call.function.name, dict(call.function.arguments)) for call in calls]
        answer.logprobs += [
            (one.token, one.logprob, [top.token for top in one.top_logprobs or ()])
            for one in line.logprobs or ()
        ]
    return answer


def ask(running: Running, way: Way, what: str = "chat", **fields: Any) -> Answer:
    """Raises what the client raises."""
    is_streamed = way.endswith("streamed")
    if way.startswith("async"):
        return collect(asyncio.run(_ask_async(running, is_streamed, what, fields)))
    with ollama.Client(running.url) as client:
        method: Callable[..., Any] = getattr(client, what)
        found = method(stream=is_streamed, **fields)
        return collect(list(found) if is_streamed else [found])


async def _ask_async(
    running: Running, is_streamed: bool, what: str, fields: dict[str, Any]
) -> list[Any]:
    async with ollama.AsyncClient(running.url) as client:
        method: Callable[..., Any] = getattr(client, what)
        found = await method(stream=is_streamed, **fields)
        return [line async for line in found] if is_streamed else [found]

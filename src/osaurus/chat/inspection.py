"""A prompt with what it is made of, for who wants to know what a model would read.

In: a chat request. Out: the prompt as it would run, the digests of its sections, and the text
that every turn of its conversation begins with. Runs nothing; blocking, any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from osaurus.chat.prefix import tool_facts
from osaurus.chat.prompt import Preparation, PreparedPrompt, preparation
from osaurus.runtime.canonical import canonical_json
from osaurus.runtime.model import PromptModel
from osaurus.types.chat import ChatRequest, Message, Role

SectionId = Literal["request_system", "tools", "history", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One message, or all tools. `sha256` is of the text in UTF-8, `chars` its length.

    The text of a message is its own; of one with thinking or calls it is canonical JSON of
    `content`, `reasoning_content` and `tool_calls`; of the tools that of their list.
    """

    id: SectionId
    role: Role
    chars: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPrompt:
    prompt: PreparedPrompt
    sections: tuple[Section, ...]
    static_prefix: str


def inspect_prompt(
    model: PromptModel, request: ChatRequest, *, keeps_attribution: bool = False
) -> InspectedPrompt:
    """Raises as `prepare_prompt` does."""
    made = preparation(model, request, keeps_attribution=keeps_attribution)
    prompt = made.prompt()
    return InspectedPrompt(
        prompt=prompt,
        sections=tuple(_sections(made)),
        static_prefix=made.shared_text(prompt.text),
    )


def _sections(made: Preparation) -> Iterator[Section]:
    """System messages, tools, then the conversation in its order, whose last message of the
    user's is `user`."""
    messages, tools = made.request.messages, made.request.tools
    for message in made.head:
        yield _section("request_system", message.role, _text(message))
    if tools:
        yield _section("tools", "system", canonical_json([tool_facts(tool) for tool in tools]))
    in_head = set(map(id, made.head))
    others = [message for message in messages if id(message) not in in_head]
    last = max((i for i, one in enumerate(others) if one.role == "user"), default=-1)
    for i, message in enumerate(others):
        yield _section("user" if i == last else "history", message.role, _text(message))


def _section(name: SectionId, role: Role, text: str) -> Section:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Section(id=name, role=role, chars=len(text), sha256=digest)


def _text(message: Message) -> str:
    if message.reasoning_content is None and not message.tool_calls:
        return message.text
    return canonical_json(
        {
            "content": message.text,
            "reasoning_content": message.reasoning_content,
            "tool_calls": [
                {"id": call.call_id, "name": call.name, "arguments": call.arguments}
                for call in message.tool_calls
            ],
        }
    )

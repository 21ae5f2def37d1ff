"""What a prompt's tokens do not say of themselves to a cache: their scope, and the part of them
that other prompts are likely to share.

In: resolved template switches; a way to render messages as the prompt was. Out: a salt, a
count of tokens, a text, a digest. None can fail a request: what is not known is empty or zero.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from osaurus.chat.profiles import EFFORT, SWITCH
from osaurus.chat.traits import Traits
from osaurus.errors import OsaurusError
from osaurus.runtime.canonical import canonical_json
from osaurus.runtime.model import Template
from osaurus.types.chat import SYSTEM_ROLES, Message, Tool

#: Time of one render beside the prompt's own. A common template takes a hundredth of it.
HEAD_TIME_S = 0.2

#: Heads remembered of one template: system prompts and sets of tools in use side by side.
_MAX_HEADS = 16

#: Users' texts that no first token has in common.
_PROBES = ("0", "z")

_REASONING_SWITCHES = (SWITCH, "thinking")
_STRENGTH = "reasoning_strength"


def scope_salt(switches: Mapping[str, Any]) -> str:
    """`reasoning=on|effort=high` from the switches that the template is rendered with.

    Only settings that change what the same tokens mean belong here. Tools and the choice among
    them do not: their text is in the tokens, and a salt would make every turn with tools a miss.
    """
    parts = [
        f"reasoning={'on' if switches[name] else 'off'}"  # as a template's `if` sees it
        for name in _REASONING_SWITCHES
        if switches.get(name) is not None
    ]
    parts += [
        f"{label}={_word(switches[name])}"
        for label, name in (("effort", EFFORT), ("strength", _STRENGTH))
        if switches.get(name) is not None
    ]
    return "|".join(dict.fromkeys(parts))


def _word(value: Any) -> str:
    """Without the separator, so that one value cannot pose as two."""
    return str(value).strip().lower().replace("%", "%25").replace("|", "%7c")


class Rendered(NamedTuple):
    token_ids: list[int]
    text: str


#: Renders messages with the prompt's own tools and switches, without the place of an answer.
Render = Callable[[Sequence[Message]], Rendered]


def head_of(messages: Sequence[Message], traits: Traits) -> tuple[Message, ...]:
    """The system messages that a template puts before the conversation."""
    if traits.only_first_system or not traits.has_system:
        return tuple(message for message in messages if message.role in SYSTEM_ROLES)
    return tuple(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))


def stable_tokens(
    template: Template,
    head: Sequence[Message],
    tools: Sequence[Tool],
    switches: Mapping[str, Any],
    prompt_ids: Sequence[int],
    render: Render,
) -> int:
    """How many of `prompt_ids` are the system part and the tools; 0 without either.

    The head is rendered alone; where the template refuses that, drops something or closes the
    text in another way, it is what two conversations that differ in the user's text share.
    Remembered by template, head, tools and switches, so that later turns render nothing. Blocks
    for at most three renders of `HEAD_TIME_S` and the encoding of the head. Any thread.
    """
    if not head and not tools:
        return 0
    return _heads_of(template).shared(head, tools, switches, list(prompt_ids), render)


def shared_text(head: Sequence[Message], prompt_text: str, render: Render) -> str:
    """What every turn of a conversation with this head begins with: the common beginning of its
    prompt and of two others that differ in the user's text. Remembers nothing; blocks for two
    renders."""
    probes = [_rendered(render, [*head, Message(role="user", content=p)]) for p in _PROBES]
    texts = [probe.text for probe in probes if probe is not None]
    if len(texts) < len(_PROBES):
        return ""
    return prompt_text[: min(_num_common(text, prompt_text) for text in texts)]


def tool_facts(tool: Tool) -> dict[str, Any]:
    """What digests of a tool are made of."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def prefix_hash(head: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Equal for requests with the same system text and the same tools in the same order."""
    facts = {
        "system": "\n\n".join(message.text for message in head),
        "tools": [tool_facts(tool) for tool in tools],
    }
    try:
        text = canonical_json(facts)
    except (TypeError, ValueError):  # no wire has such values, a caller in this process may
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class _Heads:
    """The heads of one template, least recently used first. The lock guards the tables alone:
    two first requests may both render."""

    def __init__(self) -> None:
        self._heads: OrderedDict[bytes, list[int]] = OrderedDict()
        #: Whether a head alone was of no use, by whether it held a system message.
        self._is_useless_alone: dict[bool, bool] = {}
        self._lock = threading.Lock()

    def shared(
        self,
        head: Sequence[Message],
        tools: Sequence[Tool],
        switches: Mapping[str, Any],
        prompt_ids: list[int],
        render: Render,
    ) -> int:
        # Templates may write today's date into their system part.
        today = datetime.now().date()
        facts = repr((list(head), list(tools), dict(switches), today))
        key = hashlib.sha256(facts.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._heads.get(key)
            if known is not None:
                self._heads.move_to_end(key)
        if known is None:
            known = self._find(head, tools, prompt_ids, render)
            with self._lock:
                self._heads[key] = known
                while len(self._heads) > _MAX_HEADS:
                    self._heads.popitem(last=False)
        return _num_common(known, prompt_ids)

    def _find(
        self,
        head: Sequence[Message],
        tools: Sequence[Tool],
        prompt_ids: list[int],
        render: Render,
    ) -> list[int]:
        has_text = bool(head)
        if not self._is_useless_alone.get(has_text):
            words = [*(message.text.strip() for message in head), *(tool.name for tool in tools)]
            alone = _rendered(render, head)
            if (
                alone is not None
                and alone.token_ids
                and prompt_ids[: len(alone.token_ids)] == alone.token_ids
                # Some templates write tools, or a system message, only before a user's.
                and all(word in alone.text for word in words)
            ):
                return alone.token_ids
            with self._lock:
                self._is_useless_alone[has_text] = True
        probes = [_rendered(render, [*head, Message(role="user", content=p)]) for p in _PROBES]
        ids = [probe.token_ids for probe in probes if probe is not None]
        return ids[0][: _num_common(ids[0], ids[1])] if len(ids) == len(_PROBES) else []


@lru_cache(maxsize=32)
def _heads_of(template: Template) -> _Heads:
    """A template belongs to one load of one model, and with it the tokenizer."""
    return _Heads()


def _rendered(render: Render, messages: Sequence[Message]) -> Rendered | None:
    try:
        return render(messages)
    except OsaurusError:  # the template's refusal: the prompt itself has passed it
        return None


def _num_common(first: Sequence[object], second: Sequence[object]) -> int:
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])

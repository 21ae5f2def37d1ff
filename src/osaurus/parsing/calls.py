"""Where body readers put the calls they read, and the rules every call has to pass.

Holds the tools of the request and the policy of the format for names that were not offered;
knows no grammar.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

import regex

from osaurus.parsing.arguments import Toolset
from osaurus.parsing.source import Malformed, NotACall
from osaurus.parsing.values import parse_json
from osaurus.types.events import ToolCall

#: What an explicit envelope does with the name of a tool that was not offered.
UnknownName = Literal["forward", "drop"]

#: No tool is called so: the name's own end was not found.
_NO_NAME = regex.compile(r"[<>\r\n]")


def new_call_id() -> str:
    """`call_` and 24 hexadecimal digits, as most clients expect."""
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """The calls of one envelope. `must_be_offered` where no marker vouches for them."""

    __slots__ = (
        "_done",
        "_new_id",
        "_own_id",
        "_unknown",
        "bad",
        "is_closed",
        "last_name",
        "must_be_offered",
        "num_added",
        "tools",
    )

    def __init__(
        self,
        tools: Toolset,
        *,
        unknown: UnknownName = "forward",
        must_be_offered: bool = False,
        new_id: Callable[[], str] = new_call_id,
        own_id: regex.Pattern[str] | None = None,
    ) -> None:
        self.tools = tools
        self.must_be_offered = must_be_offered
        #: The envelope's own closer was read, or the format has none.
        self.is_closed = False
        self.num_added = 0
        self.last_name: str | None = None
        #: Why a single call was left out while its neighbours stand.
        self.bad: str | None = None
        self._unknown: UnknownName = unknown
        self._new_id = new_id
        self._own_id = own_id
        self._done: list[ToolCall] = []

    def name(self, raw: str) -> str:
        """The name to report for `raw`: trimmed, in the offered spelling when offered."""
        name = raw.strip()
        if not name or _NO_NAME.search(name):
            raise Malformed("a call without a name")
        offered = self.tools.resolve(name)
        if offered is None and self.must_be_offered:
            raise NotACall
        self.last_name = offered or name
        return self.last_name

    def add(self, name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> None:
        """A complete call. `name` comes from `self.name`; an id that isn't the family's is lost."""
        self.num_added += 1
        if self._unknown == "drop" and self.tools.resolve(name) is None:
            return
        if call_id is None or self._own_id is None or not self._own_id.fullmatch(call_id):
            call_id = self._new_id()
        self._done.append(ToolCall(name=name, arguments=dict(arguments), call_id=call_id))

    def add_object(self, fields: Mapping[str, Any]) -> None:
        """A complete call written as a JSON object, possibly nested under `function`."""
        call_id = fields.get("id")
        nested = fields.get("function")
        if isinstance(nested, Mapping):
            fields = nested
        name = fields.get("name")
        if not isinstance(name, str):
            raise Malformed("a call without a name")
        arguments = fields["arguments"] if "arguments" in fields else fields.get("parameters")
        self.add(self.name(name), object_arguments(arguments), _text(call_id))

    def take(self) -> tuple[ToolCall, ...]:
        """The calls completed since the last `take`."""
        done, self._done = tuple(self._done), []
        return done


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def object_arguments(value: Any) -> Mapping[str, Any]:
    """Arguments as an object: missing is empty, a JSON string is decoded once more."""
    if isinstance(value, str):
        value = parse_json(value) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Malformed("arguments are not an object")
    return value

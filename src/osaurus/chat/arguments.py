"""Whether a call's arguments fit the schema that the client sent for its tool.

Nothing is repaired and no call is withheld: what does not fit is said beside the answer, and the
client decides. The original schemas are used, never the templates' copies of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import jsonschema_rs

from osaurus.types.chat import Tool
from osaurus.types.events import ToolInvocation

logger = logging.getLogger(__name__)

_MAX_FAULTS = 8
_MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentFault:
    """`path` is a JSON pointer into the arguments; empty for the whole of them."""

    path: str
    message: str


class ArgumentChecker:
    """The validators of one request's tools. Building it compiles every schema."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._validators: dict[str, Any] = {tool.name: _validator(tool) for tool in tools}

    def is_offered(self, name: str) -> bool:
        return name in self._validators

    def faults(self, call: ToolInvocation) -> list[ArgumentFault]:
        if call.name not in self._validators:
            return [ArgumentFault(path="", message="no tool of this name was offered")]
        validator = self._validators[call.name]
        if validator is None:
            return []
        found = islice(validator.iter_errors(json.loads(call.arguments_json)), _MAX_FAULTS)
        return [
            ArgumentFault(path=_pointer(fault.instance_path), message=fault.message[:_MAX_MESSAGE])
            for fault in found
        ]


def _validator(tool: Tool) -> Any:
    """None for a schema that cannot be compiled: it then says nothing about any argument."""
    schema = dict(tool.parameters)
    if not schema:
        return None
    try:
        return jsonschema_rs.validator_for(schema, retriever=_refuse_to_fetch)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        logger.info("arguments of %r are not checked: %s", tool.name, type(error).__name__)
        return None


def _refuse_to_fetch(address: str) -> NoReturn:
    raise ValueError("schemas are not fetched from anywhere")


def _pointer(path: Sequence[str | int]) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)

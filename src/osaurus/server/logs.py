"""The log, one line an event, as text or as JSON. Never what a prompt or an answer says.

What a line is about travels beside its message as `facts`, which text has as `name=value` and
JSON as members, and as `head`, which the message has in words already.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

#: The attributes of a log record that hold them.
FACTS = "facts"
HEAD = "head"


def set_up_logging(level: str, form: LogFormat) -> None:
    """For the whole process, on stderr. `level` is a name of a settings file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    name = level.upper()
    logging.basicConfig(level="DEBUG" if name == "TRACE" else name, handlers=[handler], force=True)


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in _facts(record).items())
        return super().formatMessage(record) + facts


class JsonLines(logging.Formatter):
    """`time` is ISO 8601 in UTC. An exception is one member, line breaks and all."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, HEAD, {}),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def printable(text: str) -> str:
    """Without line breaks and other controls: what a client sent must not make up log lines."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, FACTS, {})


def _word(value: Any) -> str:
    text = printable(str(value))
    return json.dumps(text) if " " in text or not text else text

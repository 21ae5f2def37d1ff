"""How verbs speak to a person: talk on stderr, questions, sizes, columns, dim text.

stdout belongs to data and is written by the verbs themselves. Colour is used only on a
terminal and never when `NO_COLOR` is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

_UNITS = ("B", "KB", "MB", "GB", "TB")


def say(message: str) -> None:
    """One line of talk for the person at the terminal."""
    print(message, file=sys.stderr, flush=True)


def has_color(stream: TextIO) -> bool:
    """Whether escape codes belong on `stream`."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[22m" if has_color(stream) else text


def confirm(question: str) -> bool:
    """Ask a yes/no question; no without a terminal to ask at."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


def human_bytes(count: float) -> str:
    """Decimal units, as disks and hubs count: 92_000_000 is `92.0 MB`."""
    for unit in _UNITS:
        if abs(count) < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns two spaces apart, never cut, so that a pipe sees whole values."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )

"""What a tool format is: its markers, when each commits, and who reads the body behind it.

A format is data. The machine finds an opener, waits until `commit` says whether what follows
can be a body, and then lets `read` consume it; it needs no knowledge of the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import regex

from osaurus.parsing.call_syntax import CallSyntax
from osaurus.parsing.calls import Calls, UnknownName, new_call_id
from osaurus.parsing.source import MAX_GAP, Reader, Source

#: Blanks that may stand between an opener and its body.
GAP = rf"[ \t\r\n]{{0,{MAX_GAP}}}"

BodyReader = Callable[[Source, Calls], Reader[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """A marker that begins an envelope.

    `commit` matches, from right behind the marker, the shortest text that only a call can
    begin with; it has to be of bounded length. Before it matched, the marker may still turn
    out to be prose. `closers` end an envelope that broke, and are kept as text where they
    pair with an opener that was prose.
    """

    marker: str
    commit: regex.Pattern[str]
    read: BodyReader
    closers: tuple[str, ...] = ()
    in_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BareOpener:
    """A call that no envelope vouches for, read only when its name is offered; else it is text.

    It begins with one of the characters `starts`, first on a line or, with `only_first`, first
    in the message; or, anywhere in visible text, with `marker`. `commit` matches from the
    character, or from behind the marker. `closers` stay text where it was text: the first of
    them ends that.
    """

    starts: str = ""
    marker: str = ""
    commit: regex.Pattern[str]
    read: BodyReader
    only_first: bool = False
    closers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One family's way of writing calls.

    `unknown` says what an envelope does with a tool that was not offered. `orphans` are the
    closers that are dropped where no envelope is open; `wrappers` are tags around visible text
    that are always dropped. `own_id` is the shape of call ids that the family writes itself
    and has to see again. `writes` are the layouts that a grammar may hold it to: the first
    whose `needs` the bundle has, the last if none.
    """

    name: str
    openers: tuple[Opener, ...] = ()
    bare: tuple[BareOpener, ...] = ()
    orphans: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    unknown: UnknownName = "forward"
    new_id: Callable[[], str] = new_call_id
    own_id: regex.Pattern[str] | None = None
    writes: tuple[CallSyntax, ...] = ()

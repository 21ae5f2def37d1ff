"""What a tool format is: its markers, when each commits, and who reads the body behind it.

A format is data. The machine finds an opener, waits until `commit` says whether what follows
can be a body, and then lets `read` consume it; it needs no knowledge of the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import regex

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
    """A call without a marker, read only when its name is offered; else it is text.

    With `marker` empty it begins with one of `starts`, first on a line (`anywhere` else on
    it, too, when there is a marker). `start_of_message` restricts it further. `closers` are
    those that stay text with it: the first ends the pairing.
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

    `orphans` are the closers that are dropped where no envelope is open; `wrappers` are tags
    around visible text that are always dropped. `own_id` is the shape of call ids that the
    family writes itself and has to see again.
    """

    name: str
    openers: tuple[Opener, ...] = ()
    bare: tuple[BareOpener, ...] = ()
    orphans: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    unknown: UnknownName = "forward"
    new_id: Callable[[], str] = field(default=new_call_id)
    own_id: regex.Pattern[str] | None = None

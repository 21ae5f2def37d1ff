"""Finding what comes next in a stream, remembered so that no text is searched twice."""

from __future__ import annotations

from osaurus.parsing.markers import Hit, MarkerSet
from osaurus.parsing.plan import Plan
from osaurus.parsing.source import Source


class Finder:
    """The next marker, the next possible call without one, the end of a reasoning block.

    What is remembered outlives a new piece of text, so it is kept in positions of the whole
    stream (`source.base + place`); `marker` alone forgets with each piece.
    """

    def __init__(self, source: Source, plan: Plan) -> None:
        self._source = source
        self._plan = plan
        self._found: tuple[MarkerSet, str, int, Hit | None] | None = None
        #: Calls without a marker were tried, and were none, up to here.
        self._tried = 0
        #: No think closer begins before `_clear`; one begins at `_closer`.
        self._clear = 0
        self._closer = -1

    def marker(self, marks: MarkerSet) -> Hit | None:
        """The next of `marks` from the source's place on."""
        source = self._source
        if self._found is not None:
            searched, text, start, hit = self._found
            is_current = searched is marks and text is source.text and start <= source.pos
            if is_current and (hit is None or hit.start >= source.pos):
                return hit
        hit = marks.find(source.text, source.pos, source.end)
        self._found = (marks, source.text, source.pos, hit)
        return hit

    def bare(self, limit: int, *, may_begin: bool) -> int | None:
        """Where, before `limit`, a line begins with what may be a call without a marker.

        `may_begin` says whether the source's place is one where such a call may stand.
        """
        plan, source = self._plan, self._source
        if not plan.bare_at:
            return None
        text, start = source.text, source.pos
        found = plan.bare_here.match(text, start, limit) if may_begin else None
        while True:
            if found is not None:
                start = found.start(1)
                commit = plan.bare_at[text[start]].commit
                may_be = commit.match(text, start, source.end, partial=True) is not None
                if may_be and not self.was_tried(start):
                    return start
            found = plan.bare_next.search(text, start, limit)
            if found is None:
                return None

    def was_tried(self, place: int) -> bool:
        """Whether a reader had `place` already and found no call without a marker there."""
        return self._source.base + place < self._tried

    def note_tried(self) -> None:
        """What was read so far holds no call without a marker."""
        self._tried = max(self._tried, self._source.base + self._source.pos)

    def bound(self, *, in_block: bool) -> bool:
        """Keep readers inside the reasoning block, if any; whether its closer has come."""
        source, closers = self._source, self._plan.think_closers
        source.end = len(source.text)
        if not in_block:
            return False
        if self._closer < source.base + source.pos:
            start = max(source.pos, self._clear - source.base)
            hit = closers.find(source.text, start, source.end)
            if hit is None:
                if not source.ended:
                    source.end = closers.partial(source.text, start, source.end)
                self._clear = source.base + source.end
                return False
            self._closer = source.base + hit.start
        source.end = self._closer - source.base
        return True

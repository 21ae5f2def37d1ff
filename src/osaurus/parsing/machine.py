"""The output machine: one response's text to visible text, reasoning and tool calls.

Reasoning and calls are one machine, because each is data inside the other: a think tag in a
string argument is text, a closer inside a JSON string closes nothing. The families' formats
are tables (`formats/`, `reasoning.py`); this module holds the rules common to all.

    LEAD      before a message that may begin with a reasoning sentence
    CONTENT   visible text                      opener -> OPENED, think opener -> HEADER/THINKING
    HEADER    behind a think opener, reading the channel's name line          -> THINKING
    THINKING  reasoning                         opener -> OPENED, think closer -> CONTENT
    OPENED    behind a tool opener, waiting for proof that a body follows:
              proof -> READING; none can come -> back, the opener was prose
    READING   a body reader consumes the envelope:
              complete -> back; broken -> SKIPPING; in reasoning or bare -> back, all was text
    SKIPPING  a broken envelope up to its next closer                         -> CONTENT

What a reader has consumed is never scanned a second time for calls, so the work is linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from osaurus.parsing.arguments import Toolset
from osaurus.parsing.calls import CallFailure, Calls
from osaurus.parsing.fences import Fences
from osaurus.parsing.formats.base import BareOpener, Opener, ToolFormat
from osaurus.parsing.markers import MIN_HALF_MARKER, Hit, MarkerSet
from osaurus.parsing.pieces import Piece, Rail
from osaurus.parsing.plan import Plan, plan_for
from osaurus.parsing.reasoning import ReasoningFormat, Start
from osaurus.parsing.source import Cut, Malformed, NotACall, Reader, Source
from osaurus.parsing.stretch import Stretch
from osaurus.types.chat import Tool
from osaurus.types.events import ToolCall


class _State(Enum):
    LEAD = "lead"
    CONTENT = "content"
    HEADER = "header"
    THINKING = "thinking"
    OPENED = "opened"
    READING = "reading"
    SKIPPING = "skipping"


class Machine:
    """`OutputMachine` for every format that is data. One instance a choice.

    Without offered tools it strips envelopes and reports nothing, except inside a fenced
    code block, where markup is what the user asked to see. `failures` lists the envelopes
    that broke; `push` and `finish` never raise for what a model writes.
    """

    def __init__(
        self,
        *,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Sequence[Tool] = (),
        start: Start = Start.CONTENT,
    ) -> None:
        self._tools = Toolset(tools)
        self._format = tool_format
        self._reasoning = reasoning
        self._plan: Plan = plan_for(tool_format, reasoning, has_tools=bool(self._tools))
        self._source = Source()
        self._out: list[Piece] = []
        self._content = Stretch(self._out, Rail.CONTENT, Rail.NOISE)
        self._thought = Stretch(self._out, Rail.REASONING, Rail.THINK_MARK)
        self._fences = None if self._tools or tool_format is None else Fences()
        self.failures: list[CallFailure] = []
        #: The stretch of content before this one ended at a call.
        self._after_call = False
        self._has_content = False
        self._line_is_blank = True
        #: How many openers with these closers were prose: so many closers are text, too.
        self._prose: Counter[tuple[str, ...]] = Counter()
        #: Absolute position before which bare calls were tried already.
        self._bare_floor = 0
        self._opener: Opener | BareOpener | None = None
        self._in_block = False
        self._calls: Calls | None = None
        self._reader: Reader[None] | None = None
        self._envelope_length = 0
        #: Absolute: no think closer begins before `_clear`; one begins at `_closer_at`.
        self._clear = 0
        self._closer_at = -1
        self._found: tuple[MarkerSet, str, int, Hit | None] | None = None
        self._state = self._first_state(start)

    def _first_state(self, start: Start) -> _State:
        if self._reasoning is None:
            return _State.CONTENT
        if start is Start.REASONING:
            return _State.THINKING
        if start is Start.HEADER:
            return _State.HEADER
        return _State.LEAD if self._reasoning.only_first else _State.CONTENT

    # -- OutputMachine

    @property
    def in_reasoning(self) -> bool:
        if self._state in (_State.OPENED, _State.READING):
            return self._in_block
        return self._state in (_State.THINKING, _State.HEADER)

    @property
    def has_failed(self) -> bool:
        return bool(self.failures)

    def push(self, text: str) -> list[Piece]:
        self._source.feed(text)
        self._run()
        return self._taken()

    def finish(self) -> list[Piece]:
        self._source.ended = True
        self._run()
        self._content.end(keep=not self._after_call)
        self._thought.end(keep=False)
        return self._taken()

    def abandon(self) -> list[Piece]:
        self._content.end(keep=True)
        self._thought.end(keep=True)
        source = self._source
        self._out.append(Piece(Rail.CONTENT, source.close() + source.text[source.pos :]))
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces = list(self._out)
        self._out.clear()
        return pieces

    def _run(self) -> None:
        steps = {
            _State.LEAD: self._step_lead,
            _State.CONTENT: self._step_content,
            _State.HEADER: self._step_header,
            _State.THINKING: self._step_thinking,
            _State.OPENED: self._step_opened,
            _State.READING: self._step_reading,
            _State.SKIPPING: self._step_skipping,
        }
        while steps[self._state]():
            pass

    # -- steps: each returns False when it needs more text

    def _step_lead(self) -> bool:
        source, pattern = self._source, self._plan.lead
        found = pattern.match(source.text, source.pos, source.end, partial=True)
        if found is not None and found.partial and not source.ended:
            return False
        if found is None or found.partial:
            self._state = _State.CONTENT
            return True
        self._mark(found.end())
        self._state = _State.THINKING
        return True

    def _step_header(self) -> bool:
        source, pattern = self._source, self._plan.header
        found = pattern.match(source.text, source.pos, source.end, partial=True)
        if found is not None and found.partial and not source.ended:
            return False
        if found is not None:
            self._mark(found.end())
        self._state = _State.THINKING
        return True

    def _step_content(self) -> bool:
        source, marks = self._source, self._plan.content
        text, end = source.text, source.end
        hold = end if source.ended else marks.partial(text, source.pos, end)
        hit = self._find(marks)
        bare = self._find_bare(hit.start if hit else end)
        if bare is not None and bare < hold:
            self._show(bare)
            self._open(self._plan.bare_at[text[bare]], "", in_block=False)
            return True
        if hit is not None and hit.start < hold:
            self._show(hit.start)
            self._handle_in_content(hit)
            return True
        if source.ended:
            half = self._plan.tool_marks.partial(text, source.pos, end)
            if end - half >= MIN_HALF_MARKER and not self._in_fence(half):
                self._show(half)
                self._drop(end)
        self._show(hold)
        return False

    def _handle_in_content(self, hit: Hit) -> None:
        plan, source = self._plan, self._source
        opener = plan.openers.get(hit.marker)
        if hit.marker in plan.think_openers:
            self._content.end(keep=not self._after_call)
            self._after_call = False
            self._mark(hit.end)
            self._begin_block(hit.marker)
        elif hit.marker in plan.think_closers.markers:
            # A closer without an open block: consumed, nothing nests.
            source.pos = hit.end
            self._content.beside(Piece(Rail.THINK_MARK, hit.marker))
        elif self._fences is not None and self._fences.is_open:
            self._show(hit.end)
        elif opener is None:
            if hit.marker in plan.orphans and self._pairs_with_prose(hit.marker):
                self._show(hit.end)
            else:
                self._drop(hit.end)
        elif isinstance(opener, BareOpener) and source.base + hit.start < self._bare_floor:
            self._show(hit.end)
        else:
            self._open(opener, hit.marker, in_block=False)

    def _step_thinking(self) -> bool:
        source, plan = self._source, self._plan
        hold = source.end
        if not source.ended:
            hold = plan.thinking.partial(source.text, source.pos, source.end)
        hit = self._find(plan.thinking)
        if hit is None or hit.start >= hold:
            self._think(hold)
            return False
        self._think(hit.start)
        if hit.marker in plan.think_closers.markers:
            self._thought.end(keep=False)
            self._mark(hit.end)
            self._state = _State.CONTENT
        elif hit.marker in plan.think_openers:
            source.pos = hit.end
            self._thought.beside(Piece(Rail.THINK_MARK, hit.marker))
        else:
            self._open(plan.openers[hit.marker], hit.marker, in_block=True)
        return True

    def _step_opened(self) -> bool:
        source, opener = self._source, self._opener
        if opener is None:
            raise AssertionError("no opener in state OPENED")
        is_cut = self._bound()
        found = opener.commit.match(source.text, source.pos, source.end, partial=True)
        if found is not None and found.partial and not (is_cut or source.ended):
            return False
        if found is None:
            self._back_to_text()
        elif not found.partial:
            self._commit(opener)
        elif self._in_block or isinstance(opener, BareOpener):
            self._back_to_text()
        else:
            # The stream ended where a body could still have begun.
            self._content.end(keep=False)
            source.pos = source.end
            self._break("the stream ended at an opener")
        return True

    def _step_reading(self) -> bool:
        source, reader, calls = self._source, self._reader, self._calls
        if reader is None or calls is None:
            raise AssertionError("no reader in state READING")
        is_cut = self._bound()
        try:
            next(reader)
        except StopIteration:
            self._complete(calls)
        except NotACall:
            self._fail(None)
        except Malformed as error:
            self._fail(str(error))
        except Cut:
            source.pos = source.end
            self._fail("the stream ended inside a call")
        else:
            if is_cut:
                reader.close()
                source.pos = source.end
                self._fail("reasoning ended inside a call")
                return True
            if not self._is_tentative and not source.saved:
                self._protocol(source.release(), calls.take())
            return False
        return True

    def _step_skipping(self) -> bool:
        source, opener = self._source, self._opener
        if opener is None:
            raise AssertionError("no opener in state SKIPPING")
        marks = self._plan.closers_of(opener)
        hit = marks.find(source.text, source.pos, source.end)
        stop = source.end if source.ended else marks.partial(source.text, source.pos, source.end)
        stop = hit.end if hit else stop
        self._protocol(source.text[source.pos : stop])
        source.pos = stop
        if hit is None:
            return False
        self._leave()
        return True

    # -- finding

    def _find(self, marks: MarkerSet) -> Hit | None:
        """The next marker from `pos`, remembered so that no text is searched twice."""
        source, found = self._source, self._found
        if found is not None and found[0] is marks and found[1] is source.text:
            _, _, start, hit = found
            if start <= source.pos and (hit is None or hit.start >= source.pos):
                return hit
        hit = marks.find(source.text, source.pos, source.end)
        self._found = (marks, source.text, source.pos, hit)
        return hit

    def _find_bare(self, limit: int) -> int | None:
        """Where, before `limit`, a line begins with what may be a call without a marker."""
        plan, source = self._plan, self._source
        if plan.bare_here is None or plan.bare_next is None:
            return None
        if plan.bare_only_first and self._has_content:
            return None
        start, is_blank = source.pos, self._line_is_blank
        while True:
            pattern = plan.bare_here if is_blank else plan.bare_next
            found = (pattern.match if is_blank else pattern.search)(source.text, start, limit)
            if found is not None and source.base + found.start(1) >= self._bare_floor:
                return found.start(1)
            if found is None and not is_blank:
                return None
            start = found.start(1) if found else start
            is_blank = False

    def _bound(self) -> bool:
        """Keep readers inside the reasoning block; whether its closer has come."""
        source = self._source
        source.end = len(source.text)
        if not self._in_block:
            return False
        closers = self._plan.think_closers
        if self._closer_at < source.base + source.pos:
            start = max(source.pos, self._clear - source.base)
            hit = closers.find(source.text, start, source.end)
            if hit is None:
                if not source.ended:
                    source.end = closers.partial(source.text, start, source.end)
                self._clear = source.base + source.end
                return False
            self._closer_at = source.base + hit.start
        source.end = self._closer_at - source.base
        return True

    def _in_fence(self, place: int) -> bool:
        if self._fences is None:
            return False
        return self._fences.would_be_open(self._source.text[self._source.pos : place])

    def _pairs_with_prose(self, closer: str) -> bool:
        for closers, count in self._prose.items():
            if count and closer in closers:
                if closer == closers[0]:
                    self._prose[closers] -= 1
                return True
        return False

    # -- envelopes

    @property
    def _is_tentative(self) -> bool:
        """Whether the envelope may yet turn out to be text."""
        return self._in_block or isinstance(self._opener, BareOpener)

    def _open(self, opener: Opener | BareOpener, marker: str, *, in_block: bool) -> None:
        self._source.begin()
        self._source.pos += len(marker)
        self._opener = opener
        self._envelope_length = 0
        self._in_block = in_block
        self._state = _State.OPENED

    def _commit(self, opener: Opener | BareOpener) -> None:
        tool_format = self._format
        if tool_format is None:
            raise AssertionError("an opener without a format")
        self._calls = Calls(
            self._tools,
            unknown=tool_format.unknown,
            must_be_offered=self._is_tentative,
            new_id=tool_format.new_id,
            own_id=tool_format.own_id,
        )
        self._reader = opener.read(self._source, self._calls)
        if not self._is_tentative:
            self._content.end(keep=False)
            self._after_call = True
        self._state = _State.READING

    def _complete(self, calls: Calls) -> None:
        """The reader is done: the envelope leaves the text, if it holds what it must."""
        if self._is_tentative:
            if not calls.num_added or not calls.is_closed or calls.bad:
                self._fail("not a whole envelope")
                return
            if not self._in_block:
                self._content.end(keep=False)
                self._after_call = True
                self._line_is_blank = False
            else:
                self._thought.settle(keep=False)
        self._protocol(self._source.close(), calls.take())
        if calls.bad or not calls.num_added:
            self._record(calls.bad or "an envelope without a call")
        self._leave()

    def _fail(self, reason: str | None) -> None:
        """The reader met what it cannot accept: text where it may be text, else broken."""
        source = self._source
        if self._in_block:
            text = source.close()
            self._leave()
            self._think_again(text)
        elif isinstance(self._opener, BareOpener):
            self._back_to_text()
        else:
            self._break(reason or "not a call")

    def _break(self, reason: str) -> None:
        calls, source = self._calls, self._source
        self._after_call = True
        self._protocol(source.close(), calls.take() if calls else ())
        self._record(reason)
        self._state = _State.SKIPPING

    def _record(self, reason: str) -> None:
        """Without offered tools nothing was asked for and nothing failed."""
        if self._tools and self._format is not None:
            self.failures.append(
                CallFailure(
                    format=self._format.name,
                    reason=reason,
                    name=self._calls.last_name if self._calls else None,
                    length=self._envelope_length,
                )
            )

    def _back_to_text(self) -> None:
        """The opener was prose: it is text, and scanning goes on right behind it."""
        source, opener = self._source, self._opener
        if opener is None:
            raise AssertionError("no opener to take back")
        if isinstance(opener, BareOpener):
            self._bare_floor = max(self._bare_floor, source.base + source.pos)
        source.rewind()
        in_block = self._in_block
        self._leave()
        place = source.pos + (len(opener.marker) or 1)
        if in_block:
            self._think(place)
            return
        if opener.closers:
            self._prose[opener.closers] += 1
        self._show(place)

    def _leave(self) -> None:
        source = self._source
        source.end = len(source.text)
        self._state = _State.THINKING if self._in_block else _State.CONTENT
        self._reader = self._calls = None
        self._in_block = False

    # -- output

    def _show(self, stop: int) -> None:
        """Visible text up to `stop`."""
        source = self._source
        text = source.text[source.pos : stop]
        if not text:
            return
        source.pos = stop
        last_line = text.rpartition("\n")
        is_blank = not last_line[2].strip(" \t")
        self._line_is_blank = is_blank and (bool(last_line[1]) or self._line_is_blank)
        self._has_content = self._has_content or not text.isspace()
        if self._fences is not None:
            self._fences.feed(text)
        self._content.add(text)

    def _think(self, stop: int) -> None:
        """Reasoning up to `stop`."""
        source = self._source
        self._thought.add(source.text[source.pos : stop])
        source.pos = stop

    def _think_again(self, text: str) -> None:
        """Reasoning that a reader had taken for a call; think openers in it are still none."""
        marks, start = self._plan.reopeners, 0
        while (hit := marks.find(text, start, len(text))) is not None:
            self._thought.add(text[start : hit.start])
            self._thought.beside(Piece(Rail.THINK_MARK, hit.marker))
            start = hit.end
        self._thought.add(text[start:])

    def _mark(self, stop: int) -> None:
        """A reasoning marker or header up to `stop`."""
        source = self._source
        if stop > source.pos:
            self._out.append(Piece(Rail.THINK_MARK, source.text[source.pos : stop]))
            source.pos = stop

    def _drop(self, stop: int) -> None:
        """Protocol residue up to `stop`."""
        source = self._source
        self._content.beside(Piece(Rail.NOISE, source.text[source.pos : stop]))
        source.pos = stop

    def _protocol(self, text: str, calls: tuple[ToolCall, ...] = ()) -> None:
        self._envelope_length += len(text)
        if text or calls:
            self._out.append(Piece(Rail.PROTOCOL, text, calls if self._tools else ()))

    def _begin_block(self, opener: str) -> None:
        reasoning = self._reasoning
        has_header = (
            reasoning is not None
            and reasoning.header is not None
            and opener == reasoning.openers[0]
        )
        self._state = _State.HEADER if has_header else _State.THINKING

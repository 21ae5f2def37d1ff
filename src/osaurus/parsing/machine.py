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
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import ClassVar, Self

from osaurus.parsing.arguments import Toolset
from osaurus.parsing.calls import Calls
from osaurus.parsing.finder import Finder
from osaurus.parsing.formats.base import BareOpener, Opener, ToolFormat
from osaurus.parsing.markers import MIN_HALF_MARKER, Hit
from osaurus.parsing.pieces import CallFailure, Piece, Rail
from osaurus.parsing.plan import Plan, plan_for
from osaurus.parsing.rails import Rails
from osaurus.parsing.reasoning import ReasoningFormat, Start
from osaurus.parsing.source import Cut, Malformed, NotACall, Reader, Source
from osaurus.types.chat import Tool


class _State(Enum):
    LEAD = "lead"
    CONTENT = "content"
    HEADER = "header"
    THINKING = "thinking"
    OPENED = "opened"
    READING = "reading"
    SKIPPING = "skipping"


class _Envelope:
    """The envelope that is being read, from its opener on."""

    __slots__ = ("calls", "in_block", "length", "opener", "reader")

    def __init__(self, opener: Opener | BareOpener, in_block: bool) -> None:
        self.opener = opener
        self.in_block = in_block
        self.calls: Calls | None = None
        self.reader: Reader[None] | None = None
        self.length = 0

    @property
    def is_tentative(self) -> bool:
        """Whether it may yet turn out to be text."""
        return self.in_block or isinstance(self.opener, BareOpener)


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
        self._finder = Finder(self._source, self._plan)
        # Where no tools were offered, markup in a code block is what the user asked to see.
        self._rails = Rails(watches_fences=tool_format is not None and not tools)
        self.failures: list[CallFailure] = []
        #: How many openers with these closers were prose: so many closers are text, too.
        self._prose: Counter[tuple[str, ...]] = Counter()
        self._envelope: _Envelope | None = None
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
        if self._envelope is not None:
            return self._envelope.in_block
        return self._state in (_State.THINKING, _State.HEADER)

    @property
    def has_failed(self) -> bool:
        return bool(self.failures)

    def push(self, text: str) -> list[Piece]:
        self._source.feed(text)
        self._run()
        return self._rails.take()

    def finish(self) -> list[Piece]:
        self._source.ended = True
        self._run()
        self._rails.end_content(at_call=False)
        self._rails.end_thought()
        return self._rails.take()

    def abandon(self) -> list[Piece]:
        source, rails = self._source, self._rails
        rails.end_content(at_call=False)
        rails.end_thought(keep=True)
        rails.put(Rail.CONTENT, source.close() + source.text[source.pos :])
        return rails.take()

    def _run(self) -> None:
        while self._STEPS[self._state](self):
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
        hit = self._finder.marker(marks)
        rails = self._rails
        may_begin = not rails.has_content if self._plan.bare_only_first else rails.line_is_blank
        bare = self._finder.bare(hit.start if hit else end, may_begin=may_begin)
        if bare is not None and bare < hold:
            self._show(bare)
            self._open(self._plan.bare_at[text[bare]], "", in_block=False)
            return True
        if hit is not None and hit.start < hold:
            self._show(hit.start)
            self._handle_in_content(hit)
            return True
        if source.ended:
            self._drop_half_marker()
        self._show(hold)
        return False

    def _drop_half_marker(self) -> None:
        """A tool marker that the stream's end cut, if enough of it is there to be known as one.

        Right behind a call, where another may follow, any part is enough.
        """
        source, rails = self._source, self._rails
        half = self._plan.tool_marks.partial(source.text, source.pos, source.end)
        before = source.text[source.pos : half]
        is_next = rails.is_behind_call and not before.strip()
        is_known = half < source.end and (is_next or source.end - half >= MIN_HALF_MARKER)
        if is_known and not rails.is_fenced(before):
            self._show(half)
            self._drop(source.end)

    def _handle_in_content(self, hit: Hit) -> None:
        plan, source = self._plan, self._source
        opener = plan.openers.get(hit.marker)
        if hit.marker in plan.think_openers:
            self._rails.end_content(at_call=False)
            self._mark(hit.end)
            self._begin_block(hit.marker)
        elif hit.marker in plan.think_closers.markers:
            # A closer without an open block: consumed, nothing nests.
            source.pos = hit.end
            self._rails.drop(hit.marker, Rail.THINK_MARK)
        elif self._rails.is_fenced():
            self._show(hit.end)
        elif opener is None:
            if hit.marker in plan.orphans and self._pairs_with_prose(hit.marker):
                self._show(hit.end)
            else:
                self._drop(hit.end)
        elif isinstance(opener, BareOpener) and (
            not self._tools or self._finder.was_tried(hit.start)
        ):
            self._show_prose(opener, hit.end)
        else:
            self._open(opener, hit.marker, in_block=False)

    def _step_thinking(self) -> bool:
        source, plan = self._source, self._plan
        hold = source.end
        if not source.ended:
            hold = plan.thinking.partial(source.text, source.pos, source.end)
        hit = self._finder.marker(plan.thinking)
        if hit is None or hit.start >= hold:
            self._think(hold)
            return False
        self._think(hit.start)
        if hit.marker in plan.think_closers.markers:
            self._rails.end_thought()
            self._mark(hit.end)
            self._state = _State.CONTENT
        elif hit.marker in plan.think_openers:
            source.pos = hit.end
            self._rails.drop_thought(hit.marker)
        else:
            self._open(plan.openers[hit.marker], hit.marker, in_block=True)
        return True

    def _step_opened(self) -> bool:
        source, envelope = self._source, self._current
        is_cut = self._finder.bound(in_block=envelope.in_block)
        found = envelope.opener.commit.match(source.text, source.pos, source.end, partial=True)
        if found is not None and found.partial and not (is_cut or source.ended):
            return False
        if found is not None and not found.partial:
            self._commit(envelope)
        elif found is None or envelope.is_tentative:
            self._back_to_text(envelope)
        else:
            # The stream ended where a body could still have begun.
            self._rails.end_content(at_call=True)
            source.pos = source.end
            self._break(envelope, "the stream ended at an opener")
        return True

    def _step_reading(self) -> bool:
        source, envelope = self._source, self._current
        reader, calls = envelope.reader, envelope.calls
        if reader is None or calls is None:
            raise AssertionError("an envelope is read before it committed")
        is_cut = self._finder.bound(in_block=envelope.in_block)
        try:
            next(reader)
        except StopIteration:
            self._complete(envelope, calls)
        except NotACall:
            self._fail(envelope, "not a call to an offered tool")
        except Malformed as error:
            self._fail(envelope, str(error))
        except Cut:
            source.pos = source.end
            self._fail(envelope, "the stream ended inside a call")
        else:
            if is_cut:
                source.pos = source.end
                self._fail(envelope, "reasoning ended inside a call")
                return True
            if not envelope.is_tentative and not source.saved:
                self._protocol(envelope, source.release())
            return False
        return True

    def _step_skipping(self) -> bool:
        source, envelope = self._source, self._current
        marks = self._plan.closers_of(envelope.opener)
        hit = marks.find(source.text, source.pos, source.end)
        stop = source.end if source.ended else marks.partial(source.text, source.pos, source.end)
        stop = hit.end if hit else stop
        self._protocol(envelope, source.text[source.pos : stop])
        source.pos = stop
        if hit is not None:
            self._leave(envelope)
        return hit is not None

    def _pairs_with_prose(self, closer: str) -> bool:
        for closers, count in self._prose.items():
            if count and closer in closers:
                if closer == closers[0]:
                    self._prose[closers] -= 1
                return True
        return False

    # -- envelopes

    @property
    def _current(self) -> _Envelope:
        if self._envelope is None:
            raise AssertionError(f"no envelope in state {self._state.name}")
        return self._envelope

    def _open(self, opener: Opener | BareOpener, marker: str, *, in_block: bool) -> None:
        self._source.begin()
        self._source.pos += len(marker)
        self._envelope = _Envelope(opener, in_block)
        self._state = _State.OPENED

    def _commit(self, envelope: _Envelope) -> None:
        rules = self._format
        if rules is None:
            raise AssertionError("an opener without a format")
        envelope.calls = Calls(
            self._tools,
            unknown=rules.unknown,
            must_be_offered=envelope.is_tentative,
            new_id=rules.new_id,
            own_id=rules.own_id,
        )
        envelope.reader = envelope.opener.read(self._source, envelope.calls)
        if not envelope.is_tentative:
            self._rails.end_content(at_call=True)
        self._state = _State.READING

    def _complete(self, envelope: _Envelope, calls: Calls) -> None:
        """The reader is done: the envelope leaves the text, if it holds what it must."""
        if envelope.is_tentative and not (calls.num_added and calls.is_closed and not calls.bad):
            self._fail(envelope, "not a whole envelope")
            return
        if envelope.in_block:
            self._rails.settle_thought()
        elif envelope.is_tentative:
            self._rails.end_content(at_call=True)
            self._rails.line_is_blank = False
        self._protocol(envelope, self._source.close())
        if calls.bad or not calls.num_added:
            self._record(envelope, calls.bad or "an envelope without a call")
        self._leave(envelope)

    def _fail(self, envelope: _Envelope, reason: str) -> None:
        """The reader met what it cannot accept: text where it may be text, else broken."""
        if envelope.in_block:
            text = self._source.close()
            self._leave(envelope)
            self._think_again(text)
        elif envelope.is_tentative:
            self._back_to_text(envelope)
        else:
            self._break(envelope, reason)

    def _break(self, envelope: _Envelope, reason: str) -> None:
        self._protocol(envelope, self._source.close())
        self._record(envelope, reason)
        self._state = _State.SKIPPING

    def _record(self, envelope: _Envelope, reason: str) -> None:
        """Without offered tools nothing was asked for and nothing failed."""
        if self._tools and self._format is not None:
            self.failures.append(
                CallFailure(
                    format=self._format.name,
                    reason=reason,
                    name=envelope.calls.last_name if envelope.calls else None,
                    length=envelope.length,
                )
            )

    def _back_to_text(self, envelope: _Envelope) -> None:
        """The opener was prose: it is text, and scanning goes on right behind it."""
        source, opener = self._source, envelope.opener
        if isinstance(opener, BareOpener):
            self._finder.note_tried()
        source.rewind()
        self._leave(envelope)
        place = source.pos + (len(opener.marker) or 1)
        if envelope.in_block:
            self._think(place)
        else:
            self._show_prose(opener, place)

    def _show_prose(self, opener: Opener | BareOpener, stop: int) -> None:
        """An opener that is text, whose closers will be, too."""
        if opener.closers:
            self._prose[opener.closers] += 1
        self._show(stop)

    def _leave(self, envelope: _Envelope) -> None:
        self._source.end = len(self._source.text)
        self._state = _State.THINKING if envelope.in_block else _State.CONTENT
        self._envelope = None

    # -- output: each moves `pos` to `stop`

    def _show(self, stop: int) -> None:
        """Visible text up to `stop`."""
        source = self._source
        self._rails.show(source.text[source.pos : stop])
        source.pos = stop

    def _think(self, stop: int) -> None:
        """Reasoning up to `stop`."""
        source = self._source
        self._rails.think(source.text[source.pos : stop])
        source.pos = stop

    def _mark(self, stop: int) -> None:
        """A reasoning marker or header up to `stop`."""
        source = self._source
        self._rails.mark(source.text[source.pos : stop])
        source.pos = stop

    def _drop(self, stop: int) -> None:
        """Protocol residue up to `stop`."""
        source = self._source
        self._rails.drop(source.text[source.pos : stop])
        source.pos = stop

    def _think_again(self, text: str) -> None:
        """Reasoning that a reader had taken for a call; think openers in it are still none."""
        marks, start = self._plan.reopeners, 0
        while (hit := marks.find(text, start, len(text))) is not None:
            self._rails.think(text[start : hit.start])
            self._rails.drop_thought(hit.marker)
            start = hit.end
        self._rails.think(text[start:])

    def _protocol(self, envelope: _Envelope, text: str) -> None:
        """A part of an envelope, and the calls that are complete with it."""
        envelope.length += len(text)
        calls = envelope.calls.take() if envelope.calls is not None else ()
        self._rails.put(Rail.PROTOCOL, text, calls if self._tools else ())

    def _begin_block(self, opener: str) -> None:
        reasoning = self._reasoning
        has_header = (
            reasoning is not None
            and reasoning.header is not None
            and opener == reasoning.openers[0]
        )
        self._state = _State.HEADER if has_header else _State.THINKING

    _STEPS: ClassVar[Mapping[_State, Callable[[Self], bool]]] = {
        _State.LEAD: _step_lead,
        _State.CONTENT: _step_content,
        _State.HEADER: _step_header,
        _State.THINKING: _step_thinking,
        _State.OPENED: _step_opened,
        _State.READING: _step_reading,
        _State.SKIPPING: _step_skipping,
    }

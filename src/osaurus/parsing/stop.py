"""Stop strings: which one the visible text meets first, whatever pieces it comes in.

In: pieces of visible text. Out: the text that can no longer begin a stop string. One pass
of an Aho-Corasick automaton, so neither many stops nor long ones slow the stream down.
Knows nothing of tokens, reasoning or calls.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

import regex

_NO_CHILD = 0xFFFFFFFF


class StopMatcher:
    """Finds the stop string whose occurrence ends first; of those, the one that starts first.

    That is what feeding one character at a time would find, so results do not depend on
    chunking. Held back is the longest suffix of the text that is a proper prefix of a stop.
    With no stop left after dropping empty strings the matcher passes text through.

    States of the automaton are trie nodes, 0 the root. A stop inserts its new nodes in a
    row, so a node's child is nearly always the next number and three flat arrays hold the
    trie; `_branches` has the exceptions, keyed `node << 21 | code point`. The text that led
    to a state is the prefix of a stop, hence what is held needs no buffer of its own.
    """

    __slots__ = (
        "_branches",
        "_chain",
        "_depth",
        "_ends",
        "_fail",
        "_first",
        "_owner",
        "_state",
        "_stops",
        "matched",
    )

    def __init__(self, stops: Iterable[str]) -> None:
        self.matched: str | None = None
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._state = 0
        self._chain = array("I", [_NO_CHILD])
        self._depth = array("I", [0])
        self._owner = array("I", [0])
        self._branches: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for index, stop in enumerate(self._stops):
            self._insert(index, stop)
        self._fail = array("I", [0]) * len(self._depth)
        self._link()
        # At the root nothing is held: jump to the next character that begins a stop.
        heads = "".join(sorted({stop[0] for stop in self._stops}))
        self._first = (
            regex.compile(f"[{regex.escape(heads, special_only=False)}]") if heads else None
        )

    @property
    def is_enabled(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> str:
        """The text that became visible: all of it up to a match, none after one."""
        if self._first is None or self.matched is not None:
            return "" if self.matched is not None else text
        state, start_state = self._state, self._state
        index, length = 0, len(text)
        while index < length:
            if state == 0:
                found = self._first.search(text, index)
                if found is None:
                    break
                index = found.start()
            state = self._step(state, text[index])
            index += 1
            end = self._ends.get(state)
            if end is not None:
                self.matched = self._stops[end]
                self._state = 0
                return self._released(start_state, text, index, len(self.matched))
        self._state = state
        return self._released(start_state, text, length, self._depth[state])

    def flush(self) -> str:
        """What was held, at a call or the end of the stream; matching starts afresh."""
        if self.matched is not None:
            return ""
        held = self._held(self._state)
        self._state = 0
        return held

    def _held(self, state: int) -> str:
        return self._stops[self._owner[state]][: self._depth[state]] if state else ""

    def _released(self, start_state: int, text: str, end: int, withheld: int) -> str:
        """`(held + text[:end])` without its last `withheld` characters."""
        from_text = end - withheld
        if from_text >= 0:
            return self._held(start_state) + text[:from_text]
        return self._stops[self._owner[start_state]][: self._depth[start_state] + from_text]

    def _child(self, node: int, char: str) -> int:
        """The node below `node` along `char`, or 0."""
        code = ord(char)
        if self._chain[node] == code:
            return node + 1
        return self._branches.get(node << 21 | code, 0)

    def _step(self, state: int, char: str) -> int:
        while True:
            child = self._child(state, char)
            if child or state == 0:
                return child
            state = self._fail[state]

    def _insert(self, index: int, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._child(node, char)
            if not child:
                child = len(self._depth)
                if child == node + 1 and self._chain[node] == _NO_CHILD:
                    self._chain[node] = ord(char)
                else:
                    self._branches[node << 21 | ord(char)] = child
                self._chain.append(_NO_CHILD)
                self._depth.append(self._depth[node] + 1)
                self._owner.append(index)
            node = child
        self._ends[node] = index

    def _link(self) -> None:
        """Failure links, and at each state the longest stop that ends there."""
        children: dict[int, list[tuple[str, int]]] = {}
        for key, child in self._branches.items():
            children.setdefault(key >> 21, []).append((chr(key & 0x1FFFFF), child))
        queue = deque([0])
        while queue:
            node = queue.popleft()
            below = children.get(node, [])
            if self._chain[node] != _NO_CHILD:
                below = [(chr(self._chain[node]), node + 1), *below]
            for char, child in below:
                queue.append(child)
                fail = self._step(self._fail[node], char) if node else 0
                self._fail[child] = fail
                # Links shorten, so the node's own stop is the longest that ends here.
                if child not in self._ends and fail in self._ends:
                    self._ends[child] = self._ends[fail]

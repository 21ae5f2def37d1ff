"""The conversation of `osaurus run` without a prompt: lines in, answers out, history kept.

Ctrl-C ends a running answer; once more, at the prompt, leaves. Ctrl-D leaves. Three quotes
open and close a message of several lines. What was answered before an interruption stays in
the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from osaurus.cli.answer import Answer
from osaurus.cli.terminal import say
from osaurus.errors import OsaurusError

_FENCE = '"""'
_HELP = (
    "/clear forgets the conversation, /stats shows or hides figures, /bye leaves; "
    f"{_FENCE} starts and ends a message of several lines"
)

Messages = Sequence[Mapping[str, Any]]


class LineReader(Protocol):
    """What reads lines: `input`-like; raises EOFError and KeyboardInterrupt."""

    def read(self, prompt: str) -> str: ...


class TerminalReader:
    """Line editing and history by prompt-toolkit."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession()

    def read(self, prompt: str) -> str:
        return self._session.prompt(prompt)


class Repl:
    """One conversation. `ask` sends all messages and shows the answer."""

    def __init__(
        self,
        ask: Callable[[Messages], Answer],
        reader: LineReader,
        *,
        system: str | None = None,
        shows_stats: bool = False,
    ) -> None:
        self._ask = ask
        self._reader = reader
        self._system = system
        self._shows_stats = shows_stats
        self.messages: list[dict[str, Any]] = []
        self._clear()

    def run(self) -> None:
        """Talk until the person leaves."""
        leaves_on_interrupt = False
        while True:
            try:
                line = self._read_message()
            except EOFError:
                return
            except KeyboardInterrupt:
                if leaves_on_interrupt:
                    return
                say("(Ctrl-C again, Ctrl-D or /bye leaves)")
                leaves_on_interrupt = True
                continue
            leaves_on_interrupt = False
            if line.startswith("/"):
                if not self._obey(line):
                    return
            elif line:
                leaves_on_interrupt = self._exchange(line)

    def _read_message(self) -> str:
        line = self._reader.read(">>> ").strip()
        if not line.startswith(_FENCE):
            return line
        text = line.removeprefix(_FENCE)
        while not text.endswith(_FENCE):
            text += "\n" + self._reader.read("... ").rstrip()
        return text.removesuffix(_FENCE).strip()

    def _exchange(self, text: str) -> bool:
        """One question and its answer; true when the person interrupted it."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._ask(self.messages)
        except OsaurusError as error:
            self.messages.pop()
            say(f"osaurus: {error.message}")
            return False
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()  # nothing was said: asking again must not double the question
        if self._shows_stats:
            say(answer.stats_line())
        return answer.is_interrupted

    def _obey(self, line: str) -> bool:
        """One slash command; false when it leaves."""
        command = line.split()[0]
        if command in ("/bye", "/exit", "/quit"):
            return False
        if command == "/clear":
            self._clear()
            say("the conversation starts anew")
        elif command == "/stats":
            self._shows_stats = not self._shows_stats
            say(f"figures are {'shown' if self._shows_stats else 'hidden'}")
        else:
            say(_HELP)
        return True

    def _clear(self) -> None:
        self.messages.clear()
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

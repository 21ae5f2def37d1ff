"""Proves `osaurus run` against a scripted server: streams, pipes, Ctrl-C, figures, history."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator

import pytest

from osaurus.cli.answer import Answer, show_answer
from osaurus.cli.app import run_command_line
from osaurus.cli.client import Delta
from osaurus.cli.repl import Messages, Repl
from osaurus.errors import UserError
from unit.cli.scripted_server import ScriptedServer, end_frames, scripted_server, text_frame


@pytest.fixture
def server() -> Generator[ScriptedServer]:
    frames = [text_frame("", reasoning_content="let me see"), text_frame("Paris")]
    with scripted_server(lambda _: [*frames, *end_frames()]) as script:
        yield script


def _run(server: ScriptedServer, *arguments: str) -> int:
    return run_command_line(["run", "--server", server.address, *arguments])


@pytest.fixture(autouse=True)
def _no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def test_the_answer_alone_is_on_stdout(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(server, "m", "What", "is", "it?") == 0
    shown = capsys.readouterr()
    assert shown.out == "Paris\n"
    assert shown.err == "let me see\n"
    assert server.requests[0]["model"] == "m"
    assert server.requests[0]["messages"] == [{"role": "user", "content": "What is it?"}]


def test_options_travel_under_their_openai_names_and_only_when_given(
    server: ScriptedServer,
) -> None:
    options = ["--temperature", "0", "--max-tokens", "7", "--seed", "-1", "--system", "Be brief."]
    assert _run(server, "m", "hi", *options) == 0
    body = server.requests[0]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 7, -1)
    assert "top_p" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_piped_text_becomes_context_before_the_prompt(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a file\n"))
    assert _run(server, "m", "Sum it up.") == 0
    assert server.requests[0]["messages"][0]["content"] == "a file\n\nSum it up."


def test_no_prompt_and_no_terminal_is_wrong_usage(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(server, "m") == 2
    assert "PROMPT" in capsys.readouterr().err


def test_stats_are_one_line_on_stderr(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(server, "m", "hi", "--stats") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("prompt 5 tokens, answer 3 tokens, first token ")
    assert last.endswith(" tok/s")


def test_json_holds_text_figures_and_ending(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(server, "m", "hi", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "Paris"
    assert answer["reasoning"] == "let me see"
    assert answer["finish_reason"] == "stop"
    assert answer["completion_tokens"] == 3


def test_a_refusal_is_one_line_and_exit_code_one(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse_with = (400, {"error": {"message": "seed: too big", "code": "invalid_value"}})
    assert _run(server, "m", "hi") == 1
    assert capsys.readouterr().err == "osaurus: seed: too big\n"


def test_talking_to_a_server_never_imports_torch(server: ScriptedServer) -> None:
    script = (
        "import sys; from osaurus.cli.app import run_command_line; "
        f"code = run_command_line(['run', 'm', 'hi', '--server', {server.address!r}]); "
        "assert code == 0; "
        "assert not {'torch', 'transformers', 'starlette', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, stdin=subprocess.DEVNULL)


def test_ctrl_c_stops_the_answer_cancels_the_request_and_exits_130() -> None:
    def endless(_):
        while True:
            yield text_frame("more ")

    with scripted_server(endless) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "osaurus", "run", "m", "hi", "--server", server.address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert b"Traceback" not in err
        assert server.disconnects.acquire(timeout=20)


def _interrupted() -> Generator[Delta]:
    yield Delta(text="half")
    raise KeyboardInterrupt


def test_an_interrupted_answer_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    answer = show_answer(_interrupted())
    assert (answer.text, answer.is_interrupted) == ("half", True)
    assert capsys.readouterr().out == "half\n"
    assert answer.stats_line().endswith("interrupted")


def _read_then_answered() -> Generator[Delta]:
    yield Delta(prefill_percent=40.0)
    yield Delta(prefill_percent=100.0)
    yield Delta(text="done")


def test_a_prompt_being_read_shows_its_percentage_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_answer(_read_then_answered())
    assert capsys.readouterr() == ("done\n", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_answer(_read_then_answered())
    assert capsys.readouterr() == ("done\n", "\r\x1b[Kreading 40 %\r\x1b[K")


def test_an_unknown_figure_is_left_out_never_zero() -> None:
    answer = Answer(text="x", first_piece_s=0.1, last_piece_s=0.1, usage={"completion_tokens": 1})
    assert answer.tokens_per_second is None
    assert "tok/s" not in answer.stats_line()
    assert Answer().stats_line() == ""


class _Script:
    """Lines to type; an exception in the list is raised instead."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)

    def read(self, prompt: str) -> str:
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def _converse(*lines: str | type[BaseException], ask=None, **options) -> tuple[Repl, list]:
    asked: list[list] = []

    def answer(messages: Messages) -> Answer:
        asked.append(list(messages))
        return ask(messages) if ask else Answer(text=f"answer {len(asked)}")

    repl = Repl(answer, _Script(*lines), **options)
    repl.run()
    return repl, asked


def test_a_conversation_carries_its_history_and_clear_forgets_it() -> None:
    repl, asked = _converse("one", "", "two", "/clear", "three", system="S")
    assert [message["content"] for message in asked[1]] == ["S", "one", "answer 1", "two"]
    assert [message["content"] for message in asked[2]] == ["S", "three"]
    assert len(repl.messages) == 3


def test_three_quotes_hold_a_message_of_several_lines() -> None:
    _, asked = _converse('"""first', "second", 'third"""', '"""one line"""')
    assert asked[0][0]["content"] == "first\nsecond\nthird"
    assert asked[1][-1]["content"] == "one line"


@pytest.mark.parametrize("leave", ["/bye", "/exit", EOFError])
def test_leaving_asks_nothing_more(leave: str | type[BaseException]) -> None:
    assert _converse(leave, "never sent")[1] == []


def test_ctrl_c_at_the_prompt_leaves_only_the_second_time() -> None:
    _, asked = _converse(KeyboardInterrupt, "still here", KeyboardInterrupt, KeyboardInterrupt, "x")
    assert len(asked) == 1


def test_ctrl_c_after_an_interrupted_answer_leaves() -> None:
    def ask(_: Messages) -> Answer:
        return Answer(text="half", is_interrupted=True)

    repl, asked = _converse("one", KeyboardInterrupt, "never sent", ask=ask)
    assert len(asked) == 1
    assert repl.messages[-1] == {"role": "assistant", "content": "half"}


def test_a_refused_question_is_reported_and_forgotten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(_: Messages) -> Answer:
        raise UserError("prompt is too long")

    repl, _ = _converse("one", ask=ask)
    assert repl.messages == []
    assert capsys.readouterr().err == "osaurus: prompt is too long\n"


def test_slash_commands_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    _converse("/what", "/stats", "hi", ask=lambda _: Answer(text="x", usage=usage))
    lines = capsys.readouterr().err.splitlines()
    assert "/clear" in lines[0]
    assert lines[1:] == ["figures are shown", "prompt 1 tokens, answer 2 tokens"]

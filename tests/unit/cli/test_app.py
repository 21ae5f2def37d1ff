"""Proves what a shell sees: exit codes, which stream gets what, and what is not imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import osaurus
from osaurus.cli import app
from osaurus.errors import InvalidField, ModelNotFound

#: Slow to import, and needed by no verb that only reads files or speaks to a server.
_HEAVY = ("torch", "transformers", "starlette", "uvicorn", "tokenizers", "numpy")

_PROBE = """
import json, sys
from osaurus.cli.app import run_command_line
code = run_command_line({arguments!r})
print(json.dumps([code, [name for name in {heavy!r} if name in sys.modules]]), file=sys.stderr)
"""


def _run_probed(arguments: list[str], heavy: tuple[str, ...] = _HEAVY) -> tuple[int, list[str]]:
    """Exit code of one command in a new process, and which heavy modules it imported."""
    script = _PROBE.format(arguments=arguments, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    code, imported = json.loads(done.stderr.splitlines()[-1])
    return code, imported


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["version"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    assert _run_probed(arguments) == (0, [])


def test_help_imports_no_verb() -> None:
    verbs = tuple(verb.target.partition(":")[0] for verb in app.VERBS)
    assert _run_probed(["--help"], verbs) == (0, [])


@pytest.mark.parametrize("verb", [verb.name for verb in app.VERBS], ids=str)
def test_every_verb_is_a_file_of_its_own_and_explains_itself(
    verb: str | tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = verb if isinstance(verb, str) else verb[0]
    assert Path(app.__file__).with_name(f"{name}.py").is_file()
    assert app.run_command_line([name, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"Usage: osaurus {name}")
    assert shown.err == ""


def test_help_lists_the_verbs_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run_command_line(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("│ ") and "--" not in line]
    names = [verb.name if isinstance(verb.name, str) else verb.name[0] for verb in app.VERBS]
    assert shown == names


@pytest.mark.parametrize("arguments", [["nonsense"], ["version", "--nonsense"], ["show"]])
def test_wrong_usage_is_two_and_one_line_on_stderr(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run_command_line(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("osaurus: ")
    assert "--help" in shown.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelNotFound("x", "try y"), 1, "osaurus: model 'x' not found; try y\n"),
        (InvalidField("--port", "must be 1 to 65535,\n got 0"), 2, "must be 1 to 65535, got 0\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_ending_becomes_one_line_and_its_exit_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "build_app", lambda: lambda *_, **__: fail())
    assert app.run_command_line([]) == code
    assert capsys.readouterr().err.endswith(message)


def test_a_reader_that_leaves_a_pipe_early_sees_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m osaurus --help | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_numpys_library_keeps_no_threads_of_its_own() -> None:
    script = (
        "import os, sys\n"
        "from osaurus.__main__ import main\n"
        "sys.argv = ['osaurus', 'keys', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "assert 'numpy' not in sys.modules\n"
        "import numpy\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_pinned_and_load_lazily() -> None:
    script = (
        "import sys, osaurus; "
        "assert not any(m.startswith('osaurus.') for m in sys.modules), 'eager'; "
        "[getattr(osaurus, name) for name in osaurus.__all__]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert sorted(osaurus.__all__) == [
        "ChatRequest", "Chunk", "Event", "Info", "Message", "OsaurusError", "PrefillProgress",
        "Reasoning", "SamplingParams", "Tool", "ToolCall", "ToolCallProgress", "Usage",
        "__version__",
    ]  # fmt: skip
    with pytest.raises(AttributeError):
        _ = osaurus.nonsense  # type: ignore[attr-defined]

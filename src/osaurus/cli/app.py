"""The table of verbs and what their endings mean to a shell.

In: the arguments. Out: an exit code (0 ok, 1 failed, 2 usage, 130 interrupted). A verb is
named here by import string and one sentence, so that `--help` imports none of them; it
returns None or an exit code, raises `OsaurusError` for what a user should read in one line,
writes data to stdout and talk to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from osaurus import __version__
from osaurus.errors import InvalidField, OsaurusError

if TYPE_CHECKING:
    from cyclopts import App

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Verb(NamedTuple):
    name: str | tuple[str, ...]  #: further names are aliases
    target: str
    summary: str


VERBS = (
    Verb("run", "osaurus.cli.run:run", "Ask a model one question, or talk to it."),
    Verb("serve", "osaurus.cli.serve:serve", "Serve models to other programs over HTTP."),
    Verb(("list", "ls"), "osaurus.cli.list:list_all", "List the models on this machine."),
    Verb("show", "osaurus.cli.show:show", "Show what is known of one model."),
    Verb("pull", "osaurus.cli.pull:pull", "Download a model."),
    Verb("config", "osaurus.cli.config:config", "Show and change the settings."),
    Verb("keys", "osaurus.cli.keys:keys", "Make and revoke the keys that open the server."),
    Verb("cache", "osaurus.cli.cache:cache", "Look after the prompts that are kept on disk."),
    Verb("bench", "osaurus.cli.bench:bench", "Measure prefill, decode and time to first token."),
    Verb("doctor", "osaurus.cli.doctor:doctor", "Say what this machine has and what is missing."),
    Verb("version", "osaurus.cli.version:version", "Print the versions that matter in a report."),
)


def build_app() -> App:
    """The parser over `VERBS`. Imports no verb."""
    from cyclopts import App, Parameter
    from rich.console import Console

    app = App(
        name="osaurus",
        help="Run language models on this machine and serve them to the programs you use.",
        version=f"osaurus {__version__}",
        help_format="plaintext",
        result_action="return_value",
        default_parameter=Parameter(negative=()),
        error_console=Console(stderr=True),
    )
    for position, verb in enumerate(VERBS):
        app.command(verb.target, name=verb.name, help=verb.summary, sort_key=position)
    return app


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command; never raises for what a user can cause."""
    from cyclopts.exceptions import CycloptsError

    try:
        result = build_app()(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        _complain(str(error))
        print("osaurus: see `osaurus --help`", file=sys.stderr)
        return EXIT_USAGE
    except InvalidField as error:
        _complain(error.message)
        return EXIT_USAGE
    except OsaurusError as error:
        _complain(error.message)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our pipe left; keep the interpreter's own flush at exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return result if isinstance(result, int) else EXIT_OK


def _complain(message: str) -> None:
    print(f"osaurus: {' '.join(message.split())}", file=sys.stderr)

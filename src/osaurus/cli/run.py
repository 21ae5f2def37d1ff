"""`osaurus run [MODEL] [PROMPT]`: one answer, or a conversation, always through HTTP.

Uses the server that is running, else starts one inside this process on a loopback port. The
answer is the only thing on stdout. Piped input becomes context before the prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from osaurus.cli.answer import Answer, show_answer
from osaurus.cli.app import EXIT_INTERRUPTED, EXIT_OK
from osaurus.cli.client import ServerClient
from osaurus.cli.connection import connect
from osaurus.cli.options import (
    Json,
    KvCacheDir,
    KvMode,
    NoDiskCache,
    Quantize,
    Server,
    Threads,
    Yes,
    cache_flags,
    flag,
)
from osaurus.cli.repl import Repl, TerminalReader
from osaurus.cli.terminal import say
from osaurus.errors import InvalidField

Stats = Annotated[
    bool,
    Parameter(
        name=["--stats", "--verbose"],
        show_default=False,
        help="End with a line of figures: tokens, time to first token, tokens per second.",
    ),
]


def run(
    model: str = "default",
    /,
    *prompt: str,
    system: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    kv_cache_dir: KvCacheDir = None,
    no_disk_cache: NoDiskCache = False,
    kv_mode: KvMode = None,
    quantize: Quantize = None,
    threads: Threads = None,
    stats: Stats = False,
    as_json: Json = False,
    yes: Yes = False,
    server: Server = None,
) -> int:
    """Ask a model one question, or talk to it when no prompt is given.

    Parameters
    ----------
    model
        Name, alias or path of a model.
    prompt
        The question; several words are joined.
    system
        A system message to begin with.
    temperature
        0 always takes the likeliest token.
    top_p
        Keep the likeliest tokens whose probabilities sum to this.
    max_tokens
        Longest answer.
    seed
        Makes sampling repeatable.
    """
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    piped = "" if at_terminal or sys.stdin is None else sys.stdin.read().strip()
    text = "\n\n".join(part for part in (piped, " ".join(prompt)) if part)
    is_conversation = not text and at_terminal and not as_json
    if not text and not is_conversation:
        raise InvalidField("PROMPT", "is empty: give a question or pipe some text in")
    options = {
        name: value
        for name, value in {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "seed": seed,
        }.items()
        if value is not None
    }
    flags = cache_flags(kv_cache_dir, no_disk_cache, kv_mode)
    flags |= flag("performance.quantizeOnLoad", quantize)
    flags |= flag("performance.threads", threads)
    with connect(model, address=server, assume_yes=yes, flags=flags) as client:
        if is_conversation:
            _converse(client, model, options, system=system, shows_stats=stats)
            return EXIT_OK
        messages = [{"role": "user", "content": text}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        answer = _ask(client, model, messages, options, quiet=as_json)
    if as_json:
        print(json.dumps(_as_json(model, answer), ensure_ascii=False, indent=2))
    elif stats:
        say(answer.stats_line())
    return EXIT_INTERRUPTED if answer.is_interrupted else EXIT_OK


def _ask(
    client: ServerClient,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    quiet: bool = False,
) -> Answer:
    deltas = client.stream_chat(model=model, messages=messages, options=options)
    return show_answer(deltas, quiet=quiet)


def _converse(
    client: ServerClient,
    model: str,
    options: Mapping[str, Any],
    *,
    system: str | None,
    shows_stats: bool,
) -> None:
    say(f"{model}: type a message, /help for help, Ctrl-D to leave")
    Repl(
        lambda messages: _ask(client, model, messages, options),
        TerminalReader(),
        system=system,
        shows_stats=shows_stats,
    ).run()


def _as_json(model: str, answer: Answer) -> dict[str, Any]:
    return {
        "model": model,
        "text": answer.text,
        "reasoning": answer.reasoning or None,
        "finish_reason": "interrupted" if answer.is_interrupted else answer.finish_reason,
        **answer.stats(),
    }

"""`osaurus bench`: measure this machine with one model, in process or over HTTP.

Figures go to stdout as text or JSON, the course of the run to stderr. Exit code 1 when
something of ours did not run as described.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from osaurus import __version__
from osaurus.bench.report import Report, Subject, as_json, as_text
from osaurus.bench.workloads import Measurement, NotRun, Outcome
from osaurus.cli.app import EXIT_FAILED, EXIT_OK
from osaurus.cli.options import Json, Threads, flag
from osaurus.cli.terminal import say
from osaurus.errors import InvalidField

#: Words of the long prompt over HTTP, about one token each.
_PREFIX_WORDS = 2000


def bench(
    model: str = "default",
    /,
    *,
    prefill: int = 512,
    decode: int = 128,
    streams: str = "1,8",
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    threads: Threads = None,
    peer: str | None = None,
    url: str | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    as_json_text: Json = False,
) -> int:
    """Measure prefill, decode and time to first token.

    Parameters
    ----------
    model
        Name, alias or path of a model.
    prefill
        Tokens of the prefill workload.
    decode
        Tokens each stream decodes.
    streams
        Numbers of concurrent streams, with commas.
    repeats
        Rounds that count; the figure is their median.
    warmup
        Rounds before them that do not.
    seed
        Chooses the prompts.
    peer
        Measure `transformers` beside us in the same rounds.
    url
        Measure a running server of any make over HTTP instead.
    output
        Also write the JSON to this file.
    """
    widths = _read_streams(streams)
    for name, value, least in (
        ("--prefill", prefill, 2),
        ("--decode", decode, 2),
        ("--repeats", repeats, 1),
        ("--warmup", warmup, 0),
    ):
        if value < least:
            raise InvalidField(name, f"must be at least {least}, got {value}")
    if url and peer:
        raise InvalidField("--peer", "runs in process and cannot be combined with --url")
    flag("performance.threads", threads)
    if url and threads:
        raise InvalidField("--threads", "is for a model in process: start that server with it")
    # Imports psutil and, below, torch: only a bench that runs pays for them.
    from osaurus.bench.machine import read_machine

    machine = read_machine()
    if machine.load_average > machine.cores / 2:
        say(f"this machine is busy (load {machine.load_average}): the figures will be too low")
    if url:
        subjects = [_over_http(url, model, repeats, decode, widths, seed)]
    else:
        subjects = _in_process(
            model,
            peer,
            prefill,
            decode,
            widths,
            repeats=repeats,
            warmup=warmup,
            seed=seed,
            threads=threads,
        )
    report = Report(
        model=model,
        machine=machine,
        subjects=tuple(subjects),
        command=shlex.join(["osaurus", *sys.argv[1:]]),
        repeats=repeats,
    )
    data = json.dumps(as_json(report), indent=2)
    if output:
        output.write_text(data + "\n")
    print(data if as_json_text else as_text(report))
    failed = any(isinstance(outcome, NotRun) for outcome in subjects[0].outcomes)
    return EXIT_FAILED if failed else EXIT_OK


def _read_streams(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InvalidField("--streams", f"must be numbers with commas, got {text!r}")
    widths = [int(part) for part in parts]
    if min(widths) < 1:
        raise InvalidField("--streams", f"must be at least 1, got {min(widths)}")
    return widths


def _in_process(
    model: str,
    peer: str | None,
    prefill: int,
    decode: int,
    widths: Sequence[int],
    *,
    repeats: int,
    warmup: int,
    seed: int,
    threads: int | None,
) -> list[Subject]:
    from osaurus.bench.inprocess import EngineRunner
    from osaurus.bench.machine import rss_bytes, torch_facts
    from osaurus.bench.peers import Peer
    from osaurus.bench.rounds import Runner, measure
    from osaurus.bench.workloads import standard_workloads
    from osaurus.runtime.load import BundleSource, LoadOptions
    from osaurus.types.engine import EngineConfig

    config = EngineConfig(max_batch_size=max(8, *widths), threads=threads)
    # What an earlier run left on disk would make a prefill look fast.
    source = BundleSource(LoadOptions(engine=config, disk_cache=False))
    listing = source.find(model)
    with ExitStack() as stack:
        runners: list[Runner] = []
        other: Peer | None = None
        if peer:
            say(f"loading {listing.model_id} into {peer}")
            other = stack.enter_context(Peer(peer, listing.path, threads=threads))
        say(f"loading {listing.model_id}")
        started = time.monotonic()
        container = source.load(listing)
        loaded = container.face(container.make_engine(config.max_batch_size))
        stack.callback(loaded.engine.shutdown)
        facts = {
            "version": __version__,
            "load_s": round(time.monotonic() - started, 1),
            **{key: value for key, value in torch_facts().items() if value},
        }
        runners.append(EngineRunner("osaurus", loaded.engine))
        if other:
            runners.append(other)
        found = measure(
            runners,
            standard_workloads(prefill_tokens=prefill, new_tokens=decode, streams=widths),
            lambda text: loaded.tokenizer.encode(text, parse_special=False, add_bos=False),
            repeats=repeats,
            warmup=warmup,
            seed=seed,
            on_round=say,
        )
        subjects = [_subject("osaurus", found["osaurus"], rss_bytes(), facts)]
        if other:
            subjects.append(_subject(other.name, found[other.name], other.rss_bytes, other.facts))
    return subjects


def _subject(name: str, found: Sequence[Outcome], rss_bytes: int, facts: Any) -> Subject:
    memory = Measurement(workload="resident memory", unit="MB", values=(rss_bytes / 1e6,))
    return Subject(name=name, outcomes=(*found, memory), facts=facts)


def _over_http(
    url: str, model: str, repeats: int, decode: int, widths: Sequence[int], seed: int
) -> Subject:
    from osaurus.bench.load import HttpLoad, measure_http

    load = HttpLoad(url, model, api_key=os.environ.get("OSAURUS_API_KEY"))
    try:
        found = measure_http(
            load,
            rounds=repeats,
            new_tokens=decode,
            streams=widths,
            prefix_words=_PREFIX_WORDS,
            seed=seed,
        )
    finally:
        load.close()
    return Subject(name=url, outcomes=tuple(found))

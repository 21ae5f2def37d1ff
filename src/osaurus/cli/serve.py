"""`osaurus serve [MODEL]`: the server in the foreground until SIGINT or SIGTERM.

One line on stdout when requests are accepted; the log, one line a request, on stderr.
"""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from cyclopts import Parameter

from osaurus.cli.options import (
    KvCacheDir,
    KvMode,
    NoDiskCache,
    Quantize,
    Threads,
    cache_flags,
    flag,
)
from osaurus.cli.terminal import say
from osaurus.server.logs import set_up_logging
from osaurus.settings.paths import api_keys
from osaurus.settings.store import SettingsStore
from osaurus.types.cache import MemoryProfile as MemoryMode


def serve(
    model: str | None = None,
    /,
    *,
    host: str | None = None,
    port: int | None = None,
    also: Annotated[tuple[int, ...], Parameter(show_default=False)] = (),
    expose: Annotated[bool | None, Parameter(show_default=False)] = None,
    cors_origin: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    allow_host: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    max_concurrent: str | None = None,
    max_context: int | None = None,
    compute_mode: Literal["bfloat16", "float32"] | None = None,
    quantize: Quantize = None,
    device: str | None = None,
    threads: Threads = None,
    memory_safety: MemoryMode | None = None,
    kv_cache_dir: KvCacheDir = None,
    no_disk_cache: NoDiskCache = False,
    kv_mode: KvMode = None,
    keep_attribution_line: Annotated[bool | None, Parameter(show_default=False)] = None,
    log_level: Literal["trace", "debug", "info", "warning", "error"] | None = None,
    log_format: Literal["text", "json"] | None = None,
) -> None:
    """Serve models to other programs over HTTP.

    What no flag says comes from the environment and the settings file; `osaurus config show`
    tells which value is from where.

    Parameters
    ----------
    model
        Load this model at the start; others load when they are asked for.
    host
        Address to listen on.
    port
        Port, 0 for any free one.
    also
        A further port on the same address, such as Ollama's 11434 for programs that look for a
        server only there; may be repeated.
    expose
        Allow an address that other machines can reach while no key guards this server.
    cors_origin
        A web origin that may call this server; may be repeated.
    allow_host
        A further host name that this server is called by; may be repeated.
    max_concurrent
        Requests of one model that decode at the same time, or auto.
    max_context
        Longest context in tokens; a model's own limit when it is shorter.
    compute_mode
        float32 dequantizes everything: slow, for comparisons.
    device
        cpu, cuda or auto.
    memory_safety
        How much memory a model may take; only strict refuses one that may not fit.
    keep_attribution_line
        Leave the billing line that coding agents put before their system message in the prompt.
    log_level
        Least severe messages shown.
    log_format
        json writes one object a line.
    """
    flags = cache_flags(kv_cache_dir, no_disk_cache, kv_mode)
    for key, value in (
        ("network.host", host),
        ("network.port", port or None),
        ("network.expose", expose),
        ("network.corsOrigins", cors_origin or None),
        ("network.allowedHosts", allow_host or None),
        ("network.logLevel", log_level),
        ("network.logFormat", log_format),
        ("concurrency.maxConcurrentSequences", max_concurrent),
        ("performance.maxContextTokens", max_context),
        ("performance.computeMode", compute_mode),
        ("performance.quantizeOnLoad", quantize),
        ("performance.device", device),
        ("performance.threads", threads),
        ("memorySafety.mode", memory_safety),
        ("prompt.keepAttributionLine", keep_attribution_line),
    ):
        flags |= flag(key, value)
    store = SettingsStore(flags=flags)
    settings = store.load()
    set_up_logging(settings["network.logLevel"], settings["network.logFormat"])
    for notice in settings.notices:
        logging.getLogger(__name__).warning("%s", notice)
    # Imports starlette; a mistake in a flag has been reported by now.
    from osaurus.runtime.configure import check_settings
    from osaurus.runtime.live import LiveSettings
    from osaurus.runtime.load import BundleSource
    from osaurus.server.serve import ServerConfig, run_server

    check_settings(settings)
    store.create()
    source = BundleSource()
    config = ServerConfig(
        host=settings["network.host"],
        port=0 if port == 0 else settings["network.port"],
        also=also,
        expose=settings["network.expose"],
        allowed_hosts=settings["network.allowedHosts"],
        cors_origins=settings["network.corsOrigins"],
        preload=model,
        keys_file=api_keys().path,
        live=LiveSettings(store, source, default_model=model),
    )
    run_server(source, config, on_ready=lambda url: _announce(url, also))
    say("osaurus: stopped")


def _announce(url: str, also: tuple[int, ...]) -> None:
    """The first line is what programs wait for."""
    print(f"osaurus is ready on {url}", flush=True)
    for port in also:
        say(f"osaurus: also on {url.rpartition(':')[0]}:{port}")

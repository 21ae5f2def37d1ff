"""`osaurus serve [MODEL]`: the server in the foreground until SIGINT or SIGTERM.

One line on stdout when requests are accepted; the log, one line a request, on stderr.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from osaurus.cli.client import configured_host_and_port
from osaurus.cli.options import KvCacheDir, KvMode, NoDiskCache, Quantize, cache_choice
from osaurus.cli.terminal import say
from osaurus.errors import InvalidField


def serve(
    model: str | None = None,
    /,
    *,
    host: str | None = None,
    port: int | None = None,
    expose: Annotated[bool, Parameter(show_default=False)] = False,
    cors_origin: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    allow_host: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    max_concurrent: int = 8,
    max_context: int | None = None,
    compute_mode: Literal["bfloat16", "float32"] = "bfloat16",
    quantize: Quantize = None,
    device: str = "auto",
    kv_cache_dir: KvCacheDir = None,
    no_disk_cache: NoDiskCache = False,
    kv_mode: KvMode = None,
    keep_attribution_line: Annotated[bool, Parameter(show_default=False)] = False,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
) -> None:
    """Serve models to other programs over HTTP.

    Parameters
    ----------
    model
        Load this model at the start; others load when they are asked for.
    host
        Address to listen on; OSAURUS_SERVER__HOST, else 127.0.0.1.
    port
        Port, 0 for any free one; OSAURUS_SERVER__PORT, else 1337.
    expose
        Allow an address that other machines can reach.
    cors_origin
        A web origin that may call this server; may be repeated.
    allow_host
        A further host name that this server is called by; may be repeated.
    max_concurrent
        Requests of one model that decode at the same time.
    max_context
        Longest context in tokens; a model's own limit when it is shorter.
    compute_mode
        float32 dequantizes everything: slow, for comparisons.
    device
        cpu, cuda or auto.
    keep_attribution_line
        Leave the billing line that coding agents put before their system message in the prompt.
    log_level
        Least severe messages shown.
    """
    default_host, default_port = configured_host_and_port()
    if max_concurrent < 1:
        raise InvalidField("--max-concurrent", f"must be at least 1, got {max_concurrent}")
    cache = cache_choice(kv_cache_dir, no_disk_cache, kv_mode)
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    # Imports starlette; a mistake in a flag has been reported by now.
    from osaurus.runtime.load import BundleSource, LoadOptions
    from osaurus.server.serve import ServerConfig, run_server
    from osaurus.types.engine import EngineConfig

    options = LoadOptions(
        compute_mode=compute_mode,
        quantize=quantize,
        device=device,
        engine=EngineConfig(
            max_batch_size=max_concurrent, max_context_tokens=max_context, cache=cache.config
        ),
        disk_cache=cache.on_disk,
    )
    config = ServerConfig(
        host=host or default_host,
        port=default_port if port is None else port,
        expose=expose,
        allowed_hosts=allow_host,
        cors_origins=cors_origin,
        preload=model,
        keeps_attribution=keep_attribution_line,
    )
    run_server(BundleSource(options), config, on_ready=_announce)
    say("osaurus: stopped")


def _announce(url: str) -> None:
    print(f"osaurus is ready on {url}", flush=True)

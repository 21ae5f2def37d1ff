"""A running server: its socket, its loop, its end.

`run_server` blocks until the process is told to stop; `running_server` runs beside the caller on
a thread. Ending is the reverse of starting: no new connections, a pause for the streams that
run, then the engines stop, which ends the rest with an error frame, and the loop closes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField, OsaurusError
from osaurus.runtime.live import LiveSettings
from osaurus.runtime.model import ModelSource
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.app import AppConfig, build_app
from osaurus.server.auth import KeyGuard
from osaurus.server.health import Readiness
from osaurus.server.limits import MAX_HEADER_BYTES
from osaurus.server.origins import OriginPolicy, is_loopback
from osaurus.server.slow_clients import DeadlineProtocol
from osaurus.server.sse import PING_INTERVAL_S
from osaurus.server.supervisor import notify
from osaurus.settings.keys import KeyRing
from osaurus.types.runtime import ModelUse, RuntimeSettings

logger = logging.getLogger(__name__)

#: Python's default lets a CPU-bound thread keep the interpreter for 5 ms; an engine makes
#: hundreds of short calls a step, each of which would wait for it.
_SWITCH_INTERVAL_S = 1e-4

_MAX_CONNECTIONS = 512

#: What uvicorn waits, beyond the drain, for connections to close after the engines stopped.
_CLOSE_MARGIN_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`drain_s` is how long running streams may go on after the server was told to stop.
    `also` are further ports on the same address, for programs that look for a server there only.
    `preload` names a model to load at the start; a failure is reported, not fatal.
    `inference_limit` counts requests that run or wait; None is eight batches and a few.
    `runtime` says how models are kept.
    `keys_file` holds the hashes of API keys; without `trusts_loopback` programs of this machine
    need one too.
    `keeps_attribution` leaves coding agents' billing line in the prompt. With `live` settings
    those decide in place of `runtime`, `keeps_attribution` and the source's options, and their
    changes are heeded."""

    host: str = "127.0.0.1"
    port: int = 1337
    also: tuple[int, ...] = ()
    expose: bool = False
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    inference_limit: int | None = None
    ping_interval_s: float = PING_INTERVAL_S
    drain_s: float = 5.0
    preload: str | None = None
    keys_file: Path | None = None
    trusts_loopback: bool = True
    keeps_attribution: bool = False
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    live: LiveSettings | None = None


class HttpServer:
    """One server over `source`. `serve` on any thread; `stop` from any other."""

    def __init__(self, source: ModelSource, config: ServerConfig) -> None:
        """Binds the ports. Raises `InvalidField` when one is taken or not allowed."""
        self._guard = _guard(config)
        _check_exposure(config, self._guard)
        self._source = source
        self._config = config
        self._sockets = _bind_all(config)
        self._uvicorn: _GracefulUvicorn | None = None

    @property
    def url(self) -> str:
        """The address with the port that was really bound."""
        host = self._config.host
        port: int = self._sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self, on_ready: Callable[[str], object]) -> None:
        """Serve until told to stop; `on_ready` gets the address once requests are accepted."""
        url = self.url
        live = self._config.live
        runtime = ModelRuntime(self._source, live.runtime if live else self._config.runtime)
        readiness = Readiness()
        chat = ChatEngine(runtime, keeps_attribution=self._config.keeps_attribution, live=live)
        app = build_app(
            chat,
            AppConfig(
                origins=OriginPolicy(
                    bound_host=self._config.host,
                    allowed_hosts=self._config.allowed_hosts,
                    cors_origins=self._config.cors_origins,
                ),
                guard=self._guard,
                max_body_bytes=self._config.max_body_bytes,
                inference_limit=self._config.inference_limit,
                ping_interval_s=self._config.ping_interval_s,
            ),
            readiness,
        )
        self._uvicorn = _GracefulUvicorn(
            uvicorn.Config(
                app,
                http=DeadlineProtocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=_MAX_CONNECTIONS,
                # Header limits are answered by the application, so its limit must be met first.
                h11_max_incomplete_event_size=4 * MAX_HEADER_BYTES,
                timeout_graceful_shutdown=int(self._config.drain_s) + _CLOSE_MARGIN_S,
            ),
            runtime,
            readiness,
            on_ready=lambda: on_ready(url),
            drain_s=self._config.drain_s,
        )
        preload = asyncio.create_task(_preload(runtime, readiness, self._config.preload))
        try:
            await self._uvicorn.serve(sockets=self._sockets)
        finally:
            preload.cancel()
            await runtime.shut_down()
            chat.close()

    def close(self) -> None:
        """Give up the ports of a server that never ran."""
        _close_all(self._sockets)

    def stop(self) -> None:
        """Begin the graceful end."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


def run_server(
    source: ModelSource,
    config: ServerConfig | None = None,
    *,
    on_ready: Callable[[str], object] | None = None,
) -> None:
    """Serve in this process until SIGINT or SIGTERM. Prints one line when ready.

    Raises `InvalidField` for an address that cannot be used.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = HttpServer(source, config or ServerConfig())
    asyncio.run(server.serve(on_ready or _print_ready))


@contextmanager
def running_server(source: ModelSource, config: ServerConfig) -> Generator[str]:
    """A server on a thread of this process, as long as the block runs; gives its address."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = HttpServer(source, config)
    ready = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.serve(lambda _: ready.set()))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="osaurus-server")
    thread.start()
    ready.wait()
    try:
        if failure:
            raise failure[0]
        yield server.url
    finally:
        server.stop()
        thread.join()


class _GracefulUvicorn(uvicorn.Server):
    """Uvicorn waits for connections to close by themselves. A stream that would run for
    minutes must be ended by stopping its engine instead, so that its client gets a frame."""

    def __init__(
        self,
        config: uvicorn.Config,
        runtime: ModelRuntime,
        readiness: Readiness,
        *,
        on_ready: Callable[[], object],
        drain_s: float,
    ) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._readiness = readiness
        self._on_ready = on_ready
        self._drain_s = drain_s

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """As the base class does, but being told to stop is no reason to die of it: the
        signal is not raised again once everything has ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        notify("READY=1")
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._readiness.is_draining = True
        notify("STOPPING=1")
        ending = asyncio.create_task(self._end_streams())
        await super().shutdown(sockets)
        await ending

    async def _end_streams(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_s
        for name in self._runtime.lease.active_names():
            await self._runtime.lease.wait_for_zero(name, max(0.0, deadline - loop.time()))
        await self._runtime.shut_down()


async def _preload(runtime: ModelRuntime, readiness: Readiness, name: str | None) -> None:
    if name is None:
        return
    readiness.is_preloading = True
    readiness.default_model = name
    try:
        use = ModelUse(by_hand=True)
        (await runtime.acquire(name, allow_paths=True, use=use)).release()
    except OsaurusError as error:
        readiness.default_error = error.message
        with suppress(OsaurusError):  # by its id it is known again should it load later
            readiness.default_model = (await runtime.find(name, allow_paths=True)).model_id
        logger.warning("the model %r could not be loaded at the start: %s", name, error.message)
    finally:
        readiness.is_preloading = False


def _bind_all(config: ServerConfig) -> list[socket.socket]:
    bound = [_bind(config.host, config.port)]
    try:
        for port in config.also:
            bound.append(_bind(config.host, port, field="also", lowest=1))
    except InvalidField:
        _close_all(bound)
        raise
    return bound


def _close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _bind(host: str, port: int, *, field: str = "port", lowest: int = 0) -> socket.socket:
    if not lowest <= port <= 65535:
        raise InvalidField(field, f"must be at least {lowest} and at most 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # What it accepts inherits this. asyncio sets it only where the socket names its protocol,
        # which this one does not; without it a frame waits 40 ms for the one before to be read.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidField(
                field, f"{host}:{port} is in use; stop that program or choose another port"
            ) from error
        raise InvalidField("host", f"cannot listen on {host}:{port}: {error}") from error


def _guard(config: ServerConfig) -> KeyGuard:
    keys = KeyRing(config.keys_file) if config.keys_file else None
    live = config.live
    if live is None:
        return KeyGuard(
            keys=keys, trusts_loopback=lambda: config.trusts_loopback, is_open=config.expose
        )
    return KeyGuard(
        keys=keys,
        configured=lambda: live.store.snapshot()["network.apiKey"],
        trusts_loopback=lambda: live.store.snapshot()["network.trustLoopback"],
        is_open=config.expose,
    )


def _check_exposure(config: ServerConfig, guard: KeyGuard) -> None:
    if is_loopback(config.host) or guard.has_keys:
        return
    if not config.expose:
        raise InvalidField(
            "host",
            f"{config.host} can be reached from other machines and no key guards this server; "
            "make a key with `osaurus keys create`, listen on 127.0.0.1, or say expose if anybody "
            "may use it",
        )
    logger.warning("no key guards this server: whoever reaches %s may use it", config.host)


def _print_ready(url: str) -> None:
    sys.stdout.write(f"osaurus is ready on {url}\n")
    sys.stdout.flush()

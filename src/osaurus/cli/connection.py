"""Which server a verb speaks to: the one asked for, the one running, or one of its own.

Yields a client; what was started here is stopped on the way out, in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from osaurus.bundle.hub import is_path
from osaurus.cli.client import ServerClient, configured_address
from osaurus.cli.terminal import say
from osaurus.settings.load import Flag
from osaurus.settings.store import SettingsStore


@contextmanager
def connect(
    model: str,
    *,
    address: str | None,
    assume_yes: bool,
    flags: Mapping[str, Flag] | None = None,
) -> Generator[ServerClient]:
    """A client of a server that should know `model`.

    An `address` given by the user is used as it is. Otherwise a missing model may be
    downloaded first, after a question; one named by its path is loaded here, since a running
    server takes no paths. `flags` are for a server of its own, which has the
    settings of the file besides; another one has its own settings, which is said.
    """
    flags = flags or {}
    if address:
        _mention_settings(flags)
        with ServerClient(address) as client:
            yield client
        return
    with ServerClient(configured_address()) as client:
        if not is_path(model) and client.health() is not None:
            if not client.has_model(model):
                _offer(model, assume_yes)
            _mention_settings(flags)
            yield client
            return
    _offer(model, assume_yes)
    # Imports torch, therefore only when there is no server to ask.
    from osaurus.runtime.live import LiveSettings
    from osaurus.runtime.load import BundleSource
    from osaurus.server.serve import ServerConfig, running_server

    source = BundleSource(allow_paths=True)  # its one caller is this process
    live = LiveSettings(SettingsStore(flags=flags), source)
    # Port 0: any free one. Nobody else's streams run there, so the end waits for none.
    config = ServerConfig(port=0, drain_s=0.0, live=live)
    with running_server(source, config) as own, ServerClient(own) as client:
        yield client


def _mention_settings(flags: Mapping[str, Flag]) -> None:
    names = list(dict.fromkeys(one.name for one in flags.values()))
    if names:
        has = "has" if len(names) == 1 else "have"
        say(f"{', '.join(names)} {has} no effect: the server that answers has its own settings")


def _offer(model: str, assume_yes: bool) -> None:
    from osaurus.cli.pull import offer_pull

    offer_pull(model, assume_yes=assume_yes)

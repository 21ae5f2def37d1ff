"""Which server a verb speaks to: the one asked for, the one running, or one of its own.

Yields a client; what was started here is stopped on the way out, in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from osaurus.cli.client import ServerClient, configured_address


@contextmanager
def connect(model: str, *, address: str | None, assume_yes: bool) -> Generator[ServerClient]:
    """A client of a server that should know `model`.

    An `address` given by the user is used as it is. Otherwise a missing model may be
    downloaded first, after a question.
    """
    if address:
        with ServerClient(address) as client:
            yield client
        return
    with ServerClient(configured_address()) as client:
        if client.health() is not None:
            if not client.has_model(model):
                _offer(model, assume_yes)
            yield client
            return
    _offer(model, assume_yes)
    # Imports torch, therefore only when there is no server to ask.
    from osaurus.runtime.load import BundleSource
    from osaurus.server.serve import ServerConfig, running_server

    # Port 0: any free one. Nobody else's streams run there, so the end waits for none.
    config = ServerConfig(port=0, drain_s=0.0)
    with running_server(BundleSource(), config) as own, ServerClient(own) as client:
        yield client


def _offer(model: str, assume_yes: bool) -> None:
    from osaurus.cli.pull import offer_pull

    offer_pull(model, assume_yes=assume_yes)

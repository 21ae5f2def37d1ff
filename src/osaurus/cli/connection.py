"""Which server a verb speaks to: the one asked for, the one running, or one of its own.

Yields a client; what was started here is stopped on the way out, in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from osaurus.cli.client import ServerClient, configured_address
from osaurus.cli.options import CacheChoice
from osaurus.cli.terminal import say
from osaurus.types.weights import QuantizeOnLoad


@contextmanager
def connect(
    model: str,
    *,
    address: str | None,
    assume_yes: bool,
    cache: CacheChoice | None = None,
    quantize: QuantizeOnLoad | None = None,
) -> Generator[ServerClient]:
    """A client of a server that should know `model`.

    An `address` given by the user is used as it is. Otherwise a missing model may be
    downloaded first, after a question. `cache` and `quantize` are for a server of its own;
    another one has its own settings, which is said.
    """
    cache = cache or CacheChoice()
    if address:
        _mention_settings(cache, quantize)
        with ServerClient(address) as client:
            yield client
        return
    with ServerClient(configured_address()) as client:
        if client.health() is not None:
            if not client.has_model(model):
                _offer(model, assume_yes)
            _mention_settings(cache, quantize)
            yield client
            return
    _offer(model, assume_yes)
    # Imports torch, therefore only when there is no server to ask.
    from osaurus.runtime.load import BundleSource, LoadOptions
    from osaurus.server.serve import ServerConfig, running_server
    from osaurus.types.engine import EngineConfig

    engine = EngineConfig(cache=cache.config)
    source = BundleSource(LoadOptions(engine=engine, disk_cache=cache.on_disk, quantize=quantize))
    # Port 0: any free one. Nobody else's streams run there, so the end waits for none.
    config = ServerConfig(port=0, drain_s=0.0)
    with running_server(source, config) as own, ServerClient(own) as client:
        yield client


def _mention_settings(cache: CacheChoice, quantize: QuantizeOnLoad | None) -> None:
    for name, is_given in (
        ("the cache flags have", cache != CacheChoice()),
        ("--quantize has", quantize),
    ):
        if is_given:
            say(f"{name} no effect: the server that answers has its own settings")


def _offer(model: str, assume_yes: bool) -> None:
    from osaurus.cli.pull import offer_pull

    offer_pull(model, assume_yes=assume_yes)

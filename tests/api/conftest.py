"""A real server over a scripted engine, and the vendor's client for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import openai
import pytest

from api.scripted_engine import (
    ByteTokenizer,
    Script,
    ScriptedEngine,
    ScriptedSource,
    say_hello,
)
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.runtime import RuntimeSettings


@dataclass(frozen=True)
class Running:
    """A server with what is behind it. `url` has no `/v1`."""

    url: str
    engine: ScriptedEngine
    source: ScriptedSource
    stack: ExitStack

    @property
    def tokenizer(self) -> ByteTokenizer:
        return self.source.tokenizer

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self) -> openai.OpenAI:
        """Closed when the server stops: a failed stream leaves its connection open."""
        return self.stack.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
        )


Start = Callable[..., Running]

#: Tests that are not about eviction keep what they load.
SEVERAL = RuntimeSettings(eviction="manual_multi_model")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server with model "m" over the given script; stopped after the test."""
    with ExitStack() as stack:

        def start_server(
            script: Script = say_hello,
            *,
            config: ServerConfig | None = None,
            max_context_tokens: int = 4096,
            source: ScriptedSource | None = None,
        ) -> Running:
            if source is None:
                engine = ScriptedEngine(script, max_context_tokens=max_context_tokens)
                source = ScriptedSource({"m": engine})
            config = config or ServerConfig(port=0, drain_s=0.2, runtime=SEVERAL)
            url = stack.enter_context(running_server(source, config))
            return Running(
                url=url, engine=next(iter(source.engines.values())), source=source, stack=stack
            )

        yield start_server


@pytest.fixture
def running(start: Start) -> Running:
    return start()

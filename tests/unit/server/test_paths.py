"""One route, many spellings."""

import pytest

from osaurus.server.paths import normalize


@pytest.mark.parametrize(
    ("path", "normal", "style"),
    [
        ("/v1/chat/completions", "/chat/completions", "openai"),
        ("/api/chat", "/chat", "ollama"),
        ("/v1/api/chat/completions", "/chat/completions", "openai"),
        ("/chat/completions", "/chat/completions", "bare"),
        ("/anthropic/v1/messages", "/messages", "anthropic"),
        ("/anthropic/messages/", "/messages", "anthropic"),
        ("/v1/models/org/name", "/models/org/name", "openai"),
        ("/v1/v1/models", "/v1/models", "openai"),
        ("/v1beta/models", "/v1beta/models", "bare"),
        ("/v1", "/", "openai"),
        ("/", "/", "bare"),
        ("", "/", "bare"),
    ],
)
def test_prefixes_are_taken_off_once_and_remembered(path: str, normal: str, style: str) -> None:
    assert normalize(path) == (normal, style)

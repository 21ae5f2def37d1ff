"""The shape of an answer in OpenAI's bodies: `response_format`, and vLLM's fields for the same."""

from __future__ import annotations

from typing import Any, Protocol

from osaurus.types.response_format import (
    ResponseFormat,
    response_format_of,
    structured_outputs_of,
    the_one_format,
)

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class FormatFields(Protocol):
    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


def answer_format(body: FormatFields) -> ResponseFormat | None:
    """Raises `InvalidField`; two of these fields are a contradiction."""
    return the_one_format(
        response_format_of(body.response_format, "response_format"),
        structured_outputs_of(
            body.structured_outputs, guided={name: getattr(body, name) for name in _GUIDED}
        ),
    )

"""A bundle's chat template: messages and tools in, prompt text out.

Renders in Jinja's immutable sandbox with the dialect that the `transformers` library set:
trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not
escape, `fromjson`, and the `generation` tag. A template is data from a download: it may not reach
Python's insides, load other files, change what it is given, or run for long (`RenderLimits`);
`renderer.py` bounds what the sandbox cannot see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from osaurus.bundle.renderer import Job, run
from osaurus.bundle.sandbox import (
    RenderLimits,
    Sandbox,
    compile_limited,
    guarded_filter,
    render_limited,
)
from osaurus.errors import TemplateError


class ChatTemplate:
    """A template and what it is always given. Immutable; any number of threads may render.

    It runs in a process of its own (`renderer.py`), which compiles it once.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """`tool_use` is rendered instead of `source` when tools are given: some bundles have a
        template of its own for that. `special_tokens`: `bos_token`, ... as variables."""
        self.source = source
        self._tool_use = tool_use
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or RenderLimits()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` are the caller's template switches (`enable_thinking`, ...).

        Nothing passed in is changed. Raises `TemplateError` with the template's own words when
        it refuses, is not valid, or meets a limit.
        """
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": _copy(messages),
            "tools": _copy(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._tool_use if tools and self._tool_use is not None else self.source
        return run(Job(source, variables, self._limits))

    def within(self, timeout_s: float) -> ChatTemplate:
        """The same template with less time for a render."""
        return ChatTemplate(
            self.source,
            tool_use=self._tool_use,
            special_tokens=self._special_tokens,
            limits=replace(self._limits, timeout_s=timeout_s),
        )

    def check(self) -> None:
        """Compile now; raises `TemplateError` for a template that cannot be rendered at all."""
        for source in filter(None, (self.source, self._tool_use)):
            run(Job(source, None, self._limits))


@lru_cache(maxsize=8)
def compile_here(source: str) -> jinja2.Template:
    """In this process: for the rendering one alone. Raises `TemplateError`."""
    return _reporting_failures(lambda: compile_limited(_environment(), source))


def render_here(
    template: jinja2.Template, variables: Mapping[str, Any], limits: RenderLimits
) -> str:
    """In this process: for the rendering one alone. Raises `TemplateError`."""
    return _reporting_failures(lambda: render_limited(template, variables, limits))


_T = TypeVar("_T")


def _reporting_failures(action: Callable[[], _T]) -> _T:
    try:
        return action()
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template is not valid: {error.message} (line {error.lineno})"
        ) from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template refused: {error.message or error}") from error
    except MemoryError as error:
        raise TemplateError("the chat template needs too much memory") from error
    except RecursionError as error:
        raise TemplateError("the chat template nests too deeply") from error
    except Exception as error:  # whatever a template does wrong is its error
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


def _copy(value: Any) -> Any:
    """Plain lists and dicts all the way down, so that the caller's own stay untouched."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value


@cache
def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = guarded_filter("tojson", _tojson)
    environment.filters["fromjson"] = guarded_filter("fromjson", _fromjson)
    environment.globals["fromjson"] = environment.filters["fromjson"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, characters as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _fromjson(text: str) -> Any:
    if not isinstance(text, str):
        raise jinja2.TemplateError(f"fromjson needs a text, got {type(text).__name__}")
    try:
        return json.loads(text)
    except ValueError:
        raise jinja2.TemplateError("fromjson was given a text that is not JSON") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)

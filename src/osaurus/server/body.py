"""A request body to a wire struct, or a 400 that names the field.

Strict JSON: no NaN, no Infinity, bounded depth, and in a body with a schema no key twice, since
the last one would silently undo the rule before it. Unknown fields are ignored, as every client
sends some. What a known field may hold is checked by the API that reads it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from osaurus.errors import Cancelled, InvalidField
from osaurus.server.limits import check_json_depth

_T = TypeVar("_T")

#: Above this a body is decoded on a thread, so that other streams go on meanwhile.
_INLINE_BYTES = 256 * 1024

#: Fields that hold the schema of an answer, in each protocol.
_SCHEMA_FIELD = re.compile(
    rb'"(?:json_schema|format|output_format|guided_json|structured_outputs)"\s*:\s*[{"]'
)

_FAULT = re.compile(r"(?P<fault>.*?)(?: - at `\$?\.?(?P<path>.*)`)?", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<expected>.*)`, got `(?P<got>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")

_TYPE_NAMES = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


async def read_json(request: Request, shape: type[_T]) -> _T:
    """Raises `InvalidField`, `PayloadTooLarge`, or `Cancelled` when the client went away."""
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise Cancelled("the client closed the connection") from error
    if len(body) > _INLINE_BYTES:
        return await asyncio.to_thread(decode_json, body, shape)
    return decode_json(body, shape)


def decode_json(body: bytes, shape: type[_T]) -> _T:
    """Raises `InvalidField`."""
    if not body.strip():
        raise InvalidField("body", "is empty; a JSON object is needed")
    check_json_depth(body)
    try:
        value = msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_non_finite(body)
        raise InvalidField("body", f"is not valid JSON: {error}") from None
    if _SCHEMA_FIELD.search(body):
        _refuse_repeated_keys(body)
    return value


def _named(text: str) -> InvalidField:
    """A validation fault in this project's words, with the field it lies in."""
    match = _FAULT.fullmatch(text)
    fault, path = (match["fault"], match["path"] or "") if match else (text, "")
    if missing := _MISSING.fullmatch(fault):
        return InvalidField(".".join(filter(None, (path, missing["name"]))), "is required")
    if expected := _EXPECTED.fullmatch(fault):
        wanted = [name for name in expected["expected"].split(" | ") if name != "null"]
        words = " or ".join(_TYPE_NAMES.get(name, name) for name in wanted)
        got = _TYPE_NAMES.get(expected["got"], expected["got"])
        fault = f"must be {words}, got {got}"
    return InvalidField(path or "body", fault)


@dataclass(frozen=True, slots=True)
class _Fault:
    """Stands in a decoded body for what must not be there."""

    words: str


def _refuse_non_finite(body: bytes) -> None:
    """Name the field if what made `body` no JSON was a NaN or Infinity in it."""
    _refuse_faults(
        body, parse_constant=lambda literal: _Fault(f"must be a finite number, got {literal}")
    )


def _refuse_repeated_keys(body: bytes) -> None:
    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            found |= {key: _Fault("stands there twice") for key, n in counts.items() if n > 1}
        return found

    _refuse_faults(body, object_pairs_hook=members)


def _refuse_faults(body: bytes, **hooks: Any) -> None:
    try:
        value = json.loads(body, **hooks)
    except (ValueError, RecursionError):
        return  # it is malformed in some other way, which the caller reports
    for path, fault in _faults(value, ""):
        raise InvalidField(path or "body", fault.words)


def _faults(value: Any, path: str) -> Iterator[tuple[str, _Fault]]:
    if isinstance(value, _Fault):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _faults(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}[{index}]")

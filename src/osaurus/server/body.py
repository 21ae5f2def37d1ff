"""A request body to a wire struct, or a 400 that names the field.

Strict JSON: no NaN, no Infinity, bounded depth. Unknown fields are ignored, as every client
sends some. What a known field may hold is checked by the API that reads it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from osaurus.errors import Cancelled, InvalidField
from osaurus.server.limits import check_json_depth

_T = TypeVar("_T")

#: Above this a body is decoded on a thread, so that other streams go on meanwhile.
_INLINE_BYTES = 256 * 1024

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
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_non_finite(body)
        raise InvalidField("body", f"is not valid JSON: {error}") from None


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


class _NonFinite:
    def __init__(self, literal: str) -> None:
        self.literal = literal


def _refuse_non_finite(body: bytes) -> None:
    """Name the field if what made `body` no JSON was a NaN or Infinity in it."""
    try:
        value = json.loads(body, parse_constant=_NonFinite)
    except (ValueError, RecursionError):
        return  # it is malformed in some other way, which the caller reports
    for path, found in _non_finite(value, ""):
        raise InvalidField(path or "body", f"must be a finite number, got {found.literal}")


def _non_finite(value: Any, path: str) -> Iterator[tuple[str, _NonFinite]]:
    if isinstance(value, _NonFinite):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _non_finite(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{path}[{index}]")

"""Mistral, Magistral, Ministral, Pixtral: `[TOOL_CALLS]` and one of three layouts.

    [TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]     tokenizer v3 to v7
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}                        v11
    [TOOL_CALLS]NAME[ARGS]{...}                                   v13

There is no end marker: an envelope ends with its JSON, and the marker repeats for each call.
After images some checkpoints leave the marker out and write the bare array.
"""

from __future__ import annotations

import secrets
import string

import regex

from osaurus.parsing.bodies.json_calls import JSON_START, read_bare, read_enveloped
from osaurus.parsing.call_syntax import CallSyntax, json_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.bare_json import COMMIT as BARE_COMMIT
from osaurus.parsing.formats.base import GAP, BareOpener, Opener, ToolFormat
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import JSON, read_run, read_value

_NAME = r"[A-Za-z0-9_.\-]"
_NAME_RUN = regex.compile(rf"{_NAME}*+")
_ID_RUN = regex.compile(r"[^\[{ \t\r\n]*+")
_OWN_ID = regex.compile(r"[A-Za-z0-9]{9}")
# A name right behind the marker is a call. Behind a blank it may be prose about the marker,
# so there it takes more to commit.
_COMMIT = regex.compile(
    rf"{_NAME}|{GAP}(?:{JSON_START}|{_NAME}{{1,64}}[ ]{{0,8}}(?:\[ARGS\]|\[CALL_ID\]|\{{))"
)


def new_short_id() -> str:
    """Nine letters or digits: what the family's templates insist on."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(9))


def _read(source: Source, calls: Calls) -> Reader[None]:
    calls.is_closed = True
    if (yield from source.token()) in "[{":
        yield from read_enveloped(source, calls, skip_nameless=True)
        return
    name = calls.name((yield from read_run(source, _NAME_RUN, 64)))
    call_id: str | None = None
    yield from source.blanks()
    if (yield from source.take("[CALL_ID]")):
        call_id = (yield from read_run(source, _ID_RUN, 64)).strip()
    yield from source.blanks()
    yield from source.take("[ARGS]")
    if (yield from source.token()) != "{":
        raise Malformed("expected an object of arguments")
    calls.add(name, (yield from read_value(source, JSON)), call_id)


MISTRAL = ToolFormat(
    name="mistral",
    openers=(Opener(marker="[TOOL_CALLS]", commit=_COMMIT, read=_read),),
    bare=(BareOpener(starts="[", commit=BARE_COMMIT, read=read_bare, only_first=True),),
    new_id=new_short_id,
    own_id=_OWN_ID,
    writes=(
        CallSyntax(
            open="[TOOL_CALLS]",
            middle="[ARGS]",
            close="",
            names=rf"{_NAME}{{1,64}}",
            needs=("[ARGS]",),
        ),
        json_calls("[TOOL_CALLS][", "]", between=", "),
    ),
)

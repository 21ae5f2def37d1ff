"""Limits that are seen before anything reads the request."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from osaurus.errors import InvalidField, PayloadTooLarge, ServerOverloaded, UserError
from osaurus.server.errors import RequestRefused
from osaurus.server.limits import (
    MAX_HEADERS,
    MAX_JSON_DEPTH,
    Admission,
    bounded_body,
    check_headers,
    check_json_depth,
)


def _scope(*headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "headers": list(headers)}


def _receiver(*chunks: bytes):
    messages = iter(chunks)

    async def receive() -> Message:
        return {"type": "http.request", "body": next(messages), "more_body": True}

    return receive


def test_headers_up_to_the_limit_pass() -> None:
    check_headers(_scope(*[(b"a", b"b")] * MAX_HEADERS))
    with pytest.raises(RequestRefused) as caught:
        check_headers(_scope(*[(b"a", b"b")] * (MAX_HEADERS + 1)))
    assert caught.value.code == "headers_too_large"
    with pytest.raises(RequestRefused, match="1048576"):
        check_headers(_scope((b"a", b"b" * 1024 * 1024)))


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"", b"+5", "５".encode()])
def test_a_declared_length_that_is_no_number_is_refused(length: bytes) -> None:
    with pytest.raises(UserError):
        bounded_body(_scope((b"content-length", length)), _receiver(), 10)


def test_a_body_may_fill_its_limit_and_not_more() -> None:
    async def scenario() -> None:
        receive = bounded_body(_scope(), _receiver(b"12345", b"67890", b"x"), 10)
        await receive()
        await receive()
        with pytest.raises(PayloadTooLarge, match="the limit is 10"):
            await receive()

    asyncio.run(scenario())


def test_json_may_be_nested_up_to_the_limit() -> None:
    for opener, closer in ((b"[", b"]"), (b'{"a":', b"}")):
        check_json_depth(opener * MAX_JSON_DEPTH + b"1" + closer * MAX_JSON_DEPTH)
        with pytest.raises(InvalidField, match="256"):
            check_json_depth(opener * 257 + b"1" + closer * 257)


@given(st.lists(st.sampled_from(["[", "{", "]", '"', "\\", "\\u0022", "é"]), max_size=2000))
def test_what_stands_in_strings_is_not_counted(pieces: list[str]) -> None:
    text = "".join(pieces).replace("\\", "\\\\").replace('"', '\\"')
    check_json_depth(f'{{"a":"{text}"}}'.encode())


def test_wide_json_is_not_deep() -> None:
    check_json_depth(b"[" + b"[],{}," * 10_000 + b"1]")


def test_admission_counts_and_gives_back_on_every_exit() -> None:
    admission = Admission(lambda: 1)
    with admission.slot():
        assert admission.active == 1
        with pytest.raises(ServerOverloaded, match="the limit is 1"), admission.slot():
            pass
    with pytest.raises(ZeroDivisionError), admission.slot():
        _ = 1 / 0
    assert admission.active == 0


def test_a_string_that_never_ends_costs_no_more_than_one_that_does() -> None:
    opened = b"[" + b"[]," * 300
    began_s = time.process_time()
    check_json_depth(opened + b'"' + b'\\"' * 1_000_000)
    assert time.process_time() - began_s < 2
    with pytest.raises(InvalidField, match="256"):
        check_json_depth(b'"\\"[" ' + b"[" * 257 + b'"[')

"""Host and Origin: this machine may, foreign pages may not, names must be ours."""

import pytest
from starlette.types import Scope

from osaurus.server.errors import RequestRefused
from osaurus.server.origins import OriginPolicy, is_loopback, preflight_headers

LOCAL = OriginPolicy(bound_host="127.0.0.1", allowed_hosts=("box.home",))
EXPOSED = OriginPolicy(bound_host="0.0.0.0", allowed_hosts=("box.home",))


def _scope(method: str = "GET", path: str = "/v1/models", **headers: str) -> Scope:
    pairs = {"host": "localhost:1337", **headers}
    return {
        "method": method,
        "path": path,
        "headers": [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in pairs.items()],
    }


@pytest.mark.parametrize(
    "name",
    ["localhost", "LOCALHOST.", "app.localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"],
)
def test_names_of_this_machine_are_known(name: str) -> None:
    assert is_loopback(name)


@pytest.mark.parametrize(
    "name", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0"]
)
def test_other_names_are_not(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:1337", "[::1]:1337", "x.localhost:80", "box.home:1337"]
)
def test_our_own_names_are_let_in(host: str) -> None:
    assert LOCAL.check(_scope(host=host)) == []


@pytest.mark.parametrize("host", ["evil.example", "192.168.0.7:1337", "", "127.0.0.1.evil.example"])
def test_a_foreign_host_is_refused(host: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        LOCAL.check(_scope(host=host))
    assert caught.value.code == "forbidden_host"


def test_an_exposed_server_goes_by_any_address_but_not_by_any_name() -> None:
    assert EXPOSED.check(_scope(host="192.168.0.7:1337")) == []
    assert EXPOSED.check(_scope(host="[2001:db8::1]:1337")) == []
    with pytest.raises(RequestRefused):
        EXPOSED.check(_scope(host="evil.example"))


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://127.0.0.1", "tauri://localhost", "http://[::1]:9"]
)
def test_origins_of_this_machine_are_echoed(origin: str) -> None:
    headers = dict(LOCAL.check(_scope("POST", origin=origin)))
    assert headers == {b"access-control-allow-origin": origin.encode(), b"vary": b"Origin"}


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://[::1",  # no address at all
        "http://[",
    ],
)
def test_a_foreign_origin_may_at_most_send_a_blind_get(origin: str) -> None:
    assert LOCAL.check(_scope("GET", origin=origin)) == []
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        with pytest.raises(RequestRefused) as caught:
            LOCAL.check(_scope(method, origin=origin))
        assert caught.value.code == "forbidden_origin"


def test_a_star_lets_everyone_in_but_not_to_what_changes_the_server() -> None:
    policy = OriginPolicy(bound_host="127.0.0.1", cors_origins=("*",))
    origin = "https://any.example"
    assert dict(policy.check(_scope("POST", origin=origin)))[b"access-control-allow-origin"] == b"*"
    for method, path in (
        ("PUT", "/v1/x"),
        ("POST", "/admin/unload"),
        ("GET", "/admin/stats"),
        ("GET", "/v1/admin/stats"),
        ("POST", "/anthropic/v1/api/admin/unload"),
    ):
        with pytest.raises(RequestRefused):
            policy.check(_scope(method, path, origin=origin))


def test_a_preflight_reflects_tokens_only() -> None:
    asked = {"origin": "http://localhost", "access_control_request_method": "POST"}
    good = preflight_headers(_scope("OPTIONS", **asked, access_control_request_headers="a-b, c"))
    assert good is not None
    assert dict(good) == {
        b"access-control-max-age": b"600",
        b"access-control-allow-methods": b"POST",
        b"access-control-allow-headers": b"a-b, c",
    }
    bad = preflight_headers(
        _scope(
            "OPTIONS",
            **asked,
            access_control_request_headers="a\r\nx: y",
            access_control_request_private_network="true",
        )
    )
    assert bad is not None
    assert b"access-control-allow-headers" not in dict(bad)
    assert dict(bad)[b"access-control-allow-private-network"] == b"true"
    assert preflight_headers(_scope("OPTIONS")) is None

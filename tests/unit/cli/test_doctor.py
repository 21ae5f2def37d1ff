"""Proves that the doctor finds faults, says what to do, and hides secrets."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from osaurus.cli import doctor
from osaurus.cli.app import run_command_line
from osaurus.cli.doctor import Check
from osaurus.kernels.native.library import Native
from unit.cli.scripted_server import scripted_server


def _check(name: str, status, fix: str = "") -> Check:
    return Check(name=name, status=status, detail=f"found {name}", fix=fix)


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_makes_the_exit_code_one(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = (lambda: _check("a", "pass"), lambda: _check("b", status, "do this"))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert run_command_line(["doctor"]) == code
    shown = capsys.readouterr()
    assert f"b      {status}  found b" in shown.out
    assert "b: do this" in shown.out
    assert shown.err.endswith("fail\n")
    assert run_command_line(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)[1] == {
        "name": "b", "status": status, "detail": "found b", "fix": "do this",
    }  # fmt: skip


def test_every_check_runs_here_and_a_fault_comes_with_its_remedy() -> None:
    found = [check() for check in doctor.CHECKS]
    assert len({check.name for check in found}) == len(found)
    assert all(check.fix for check in found if check.status != "pass")
    assert next(check for check in found if check.name == "torch").status == "pass"


def test_the_doctor_says_how_many_threads_compute_and_who_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OSAURUS_PERFORMANCE__THREADS", raising=False)
    detail = doctor.check_threads().detail
    assert "physical core" in detail or "quota" in detail
    monkeypatch.setenv("OSAURUS_PERFORMANCE__THREADS", "1")
    check = doctor.check_threads()
    assert check.detail == "1 compute: as set by OSAURUS_PERFORMANCE__THREADS"
    monkeypatch.setenv("OSAURUS_PERFORMANCE__THREADS", "0")
    assert doctor.check_threads().status == "warn"


def test_a_place_that_cannot_be_written_fails_and_a_missing_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "new" / "home"))
    assert doctor.check_home().status in ("pass", "warn")
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv("OSAURUS_MODELS_DIR", "/proc/none")
    check = doctor.check_models_dir()
    assert check.status == "fail"
    assert "OSAURUS_MODELS_DIR" in check.fix


def test_a_port_is_free_ours_or_someone_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("OSAURUS_SERVER__PORT", str(port))
    assert doctor.check_port().detail.endswith("is free")
    with scripted_server(lambda _: []) as server:
        monkeypatch.setenv("OSAURUS_SERVER__PORT", server.address.rpartition(":")[2])
        assert "osaurus is running" in doctor.check_port().detail
        server.health = {"name": "another program"}
        check = doctor.check_port()
    assert check.status == "warn"
    assert "OSAURUS_SERVER__PORT" in check.fix


def test_secrets_in_the_environment_are_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame")
    monkeypatch.setenv("OSAURUS_API_KEY", "sesame")
    monkeypatch.setenv("OSAURUS_VENV", "/somewhere")
    detail = doctor.check_environment().detail
    assert "sesame" not in detail
    assert "HF_TOKEN=***" in detail
    assert "OSAURUS_VENV=/somewhere" in detail


def test_a_missing_torch_is_a_failure_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    check = doctor.check_torch()
    assert check.status == "fail"
    assert "scripts/install" in check.fix
    assert doctor.check_kernels().status == "warn"


def test_native_kernels_that_are_off_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "switched off by OSAURUS_NATIVE"
    monkeypatch.setattr("osaurus.kernels.native.library.native", lambda: Native(None, reason))
    check = doctor.check_kernels()
    assert check.status == "warn"
    assert reason in check.fix


def test_a_settings_file_that_is_wrong_fails_and_an_unknown_key_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path))
    assert doctor.check_settings_file().status == "pass"
    path = tmp_path / "config/server-runtime.json"
    path.parent.mkdir()
    path.write_text('{"network": {"prt": 9}}')
    check = doctor.check_settings_file()
    assert (check.status, "network.prt" in check.fix) == ("warn", True)
    path.write_text('{"network": {"port": 0}}')
    check = doctor.check_settings_file()
    assert (check.status, "network.port" in check.detail) == ("fail", True)

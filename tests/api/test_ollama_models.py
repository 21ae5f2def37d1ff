"""Ollama's list, show, ps, pull, delete and what it refuses, through the real `ollama` clients over
made models in a directory of the test's own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from osaurus.bundle import download
from osaurus.bundle.download import RemoteFile
from osaurus.errors import Cancelled, InvalidField
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import HttpServer, ServerConfig, running_server
from osaurus.types.runtime import ResidencyPolicy, RuntimeSettings
from unit.bundle.made import llama_tensors, write_folder, write_gguf

THINKS = "{{ '<think>\\n</think>' }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, with two models in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("osaurus.bundle.hub.installed_path", lambda _: None)
    monkeypatch.setattr("osaurus.bundle.pull.installed_path", lambda _: None)
    folder = tmp_path / "models"
    write_folder(
        folder / "Org" / "Tiny-1b-Instruct",
        tensors=llama_tensors(),
        config={"architectures": ["LlamaForCausalLM"]},
    )
    write_gguf(folder / "Org" / "Gg" / "gg-Q8_0.gguf", encoding="Q8_0")
    return folder


@pytest.fixture
def url(models: Path) -> Iterator[str]:
    source = BundleSource(LoadOptions(device="cpu", disk_cache=False, compute_mode="float32"))
    runtime = RuntimeSettings(residency=ResidencyPolicy(seconds=300))
    config = ServerConfig(port=0, drain_s=0.2, runtime=runtime, cors_origins=["*"])
    with running_server(source, config) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def test_models_are_listed_with_their_files_facts(client: ollama.Client, models: Path) -> None:
    found = {one.model: one for one in client.list().models}
    assert sorted(filter(None, found)) == ["Org/Gg:Q8_0", "Org/Tiny-1b-Instruct"]
    one = found["Org/Gg:Q8_0"]
    file = models / "Org" / "Gg" / "gg-Q8_0.gguf"
    assert one.size == file.stat().st_size
    assert one.modified_at is not None
    assert abs(one.modified_at.timestamp() - file.stat().st_mtime) < 1
    assert len(one.digest or "") == 64
    assert one.details is not None
    assert (one.details.format, one.details.family) == ("gguf", "llama")
    assert one.details.families == ["llama"]
    assert one.details.quantization_level == "Q8_0"
    assert (one.details.parameter_size or "").endswith("K")


def test_the_async_client_sees_the_same(url: str, client: ollama.Client) -> None:
    async def look() -> tuple[Any, ...]:
        async with ollama.AsyncClient(url) as other:
            shown = await other.show("Org/Gg:Q8_0")
            return await other.list(), await other.ps(), shown.modelinfo

    expected = (client.list(), client.ps(), client.show("Org/Gg:Q8_0").modelinfo)
    assert asyncio.run(look()) == expected


def test_show_tells_shape_context_template_and_what_the_model_can_do(
    client: ollama.Client, models: Path
) -> None:
    shown = client.show("Org/Tiny-1b-Instruct")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 256
    assert shown.modelinfo["llama.embedding_length"] == 64
    assert shown.template
    assert shown.template in (shown.modelfile or "")
    assert str(models) not in (shown.modelfile or "")
    write_folder(models / "Org" / "Thinks", tokenizer_config={"chat_template": THINKS})
    assert client.show("Org/Thinks").capabilities == ["completion", "tools", "thinking"]


def test_parameters_are_the_bundles_own(client: ollama.Client, models: Path) -> None:
    values = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    path = models / "Org" / "Tiny-1b-Instruct" / "generation_config.json"
    path.write_text(json.dumps(values))
    lines = (client.show("tiny-1b-instruct").parameters or "").splitlines()
    assert [line.split() for line in lines] == [
        ["temperature", "0.7"],
        ["top_k", "20"],
        ["repeat_penalty", "1.1"],
    ]


@pytest.mark.parametrize(
    "name",
    [
        "org/tiny-1b-instruct",
        "tiny-1b-instruct:latest",
        "tiny:1b",
        "tiny:1b-instruct",
        "hf.co/Org/Tiny-1b-Instruct",
        "https://huggingface.co/Org/Tiny-1b-Instruct:latest",
    ],
)
def test_a_model_answers_to_ollamas_names(client: ollama.Client, name: str) -> None:
    assert client.show(name).modelinfo == client.show("Org/Tiny-1b-Instruct").modelinfo


def test_a_quantization_may_be_part_of_the_tag(client: ollama.Client, models: Path) -> None:
    write_gguf(models / "Org" / "Gg-2b-it" / "x-Q4_0.gguf", encoding="Q4_0")
    for name in ("gg:2b", "gg:2b-q4_0", "gg:2b-it-q4_0", "hf.co/Org/Gg-2b-it:Q4_0"):
        assert client.show(name).details is not None
    with pytest.raises(ollama.ResponseError) as caught:
        client.show("gg:3b")
    assert caught.value.status_code == 404


def test_ps_has_what_is_loaded_and_when_it_goes(client: ollama.Client) -> None:
    client.generate("Org/Tiny-1b-Instruct")
    (row,) = client.ps().models
    assert (row.name, row.model) == ("Org/Tiny-1b-Instruct", "Org/Tiny-1b-Instruct")
    assert row.size is not None
    assert row.size > 0
    assert row.size_vram == 0
    assert row.context_length == 256
    assert row.expires_at is not None
    left = row.expires_at - datetime.now(UTC)
    assert timedelta(seconds=290) < left <= timedelta(seconds=300)
    listed = {one.model: one.digest for one in client.list().models}
    assert row.digest == listed["Org/Tiny-1b-Instruct"]
    client.generate("Org/Tiny-1b-Instruct", keep_alive=-1)
    (row,) = client.ps().models
    assert row.expires_at is not None
    assert row.expires_at.year > 2100


def test_a_model_is_deleted_while_it_is_loaded(client: ollama.Client, models: Path) -> None:
    client.generate("tiny:1b")
    assert client.delete("tiny:1b").status == "success"
    assert client.ps().models == []
    assert [one.model for one in client.list().models] == ["Org/Gg:Q8_0"]
    assert not (models / "Org" / "Tiny-1b-Instruct").exists()
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("tiny:1b")
    assert caught.value.status_code == 404


def test_a_model_of_a_hugging_face_cache_is_not_deleted(
    client: ollama.Client, tmp_path: Path
) -> None:
    snapshot = write_folder(tmp_path / "hub" / "models--Org--Cached" / "snapshots" / "abc")
    with pytest.raises(ollama.ResponseError, match="hf cache rm") as caught:
        client.delete("Org/Cached")
    assert caught.value.status_code == 400
    assert (snapshot / "config.json").exists()


def test_what_is_not_served_says_so(client: ollama.Client, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    refused: list[Callable[[], Any]] = [
        lambda: client.create("x", from_="tiny:1b"),
        lambda: client.copy("tiny:1b", "x"),
        lambda: client.push("tiny:1b"),
        lambda: list(client.push("tiny:1b", stream=True)),
        lambda: client.create_blob(tmp_path / "blob"),
    ]
    for call in refused:
        with pytest.raises(ollama.ResponseError, match="is not supported; ") as caught:
            call()
        assert caught.value.status_code == 501


def test_clients_find_the_server_by_its_banner_and_version(url: str) -> None:
    root = httpx2.get(f"{url}/")
    assert (root.status_code, root.text) == (200, "Ollama is running")
    assert httpx2.head(f"{url}/").is_success
    version = httpx2.get(f"{url}/api/version").json()["version"]
    numbers = tuple(map(int, version.split(".")))
    assert numbers >= (0, 13, 4)  # what Codex asks for to use Responses


@pytest.mark.parametrize(("path", "body"), [("show", {}), ("delete", {}), ("pull", {"name": 5})])
def test_a_name_is_needed(url: str, path: str, body: dict[str, Any]) -> None:
    method = "DELETE" if path == "delete" else "POST"
    response = httpx2.request(method, f"{url}/api/{path}", json=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(("model: is required", "name: must be"))


def test_strangers_and_foreign_pages_neither_pull_nor_delete(url: str, models: Path) -> None:
    for method, path in (("POST", "pull"), ("DELETE", "delete")):
        for headers in ({"X-Forwarded-For": "10.0.0.9"}, {"Origin": "https://evil.example"}):
            response = httpx2.request(
                method, f"{url}/api/{path}", json={"model": "tiny:1b"}, headers=headers
            )
            assert response.status_code in (401, 403), (path, headers)
            assert isinstance(response.json()["error"], str)
    assert (models / "Org" / "Tiny-1b-Instruct").exists()


class FakeHub:
    """One repository with one GGUF. `fetch` takes `steps` steps, and keeps those it has done when
    it is stopped."""

    made: Path
    steps = 5

    def __init__(self) -> None:
        self.fetches: list[int] = []  # steps done by each call
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self.has_stopped = threading.Event()

    def files(self, repo_id: str, revision: str | None) -> list[RemoteFile]:
        return [RemoteFile(name="new-Q8_0.gguf", size_bytes=self.made.stat().st_size)]

    def fetch(
        self,
        repo_id: str,
        revision: str | None,
        names: Sequence[str],
        cache_dir: Path | None,
        is_stopped: Callable[[], bool],
    ) -> Path:
        cache = Path(download._default_cache()) if cache_dir is None else cache_dir
        repository = cache / f"models--{repo_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / "abc"
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        part = repository / "blobs" / "x.incomplete"
        data = self.made.read_bytes()
        size = len(data) // self.steps + 1
        self.fetches.append(0)
        with part.open("ab") as file:
            while file.tell() < len(data):
                if is_stopped():
                    self.has_stopped.set()
                    raise Cancelled("stopped")
                file.write(data[file.tell() : file.tell() + size])
                file.flush()
                self.fetches[-1] += 1
                self.has_begun.set()
                if self.fetches[-1] == 2:
                    while not (is_stopped() or self.may_go_on.wait(0.01)):
                        pass
        snapshot.mkdir(parents=True)
        part.replace(snapshot / "new-Q8_0.gguf")
        return snapshot


@pytest.fixture
def hub(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub()
    FakeHub.made = write_gguf(tmp_path / "made" / "new-Q8_0.gguf", encoding="Q8_0")
    monkeypatch.setattr(download, "HuggingFaceHub", lambda: hub)
    monkeypatch.setattr(download, "_default_cache", lambda: tmp_path / "hub")
    monkeypatch.setattr(download, "_POLL_S", 0.01)
    return hub


def test_a_pull_tells_its_progress_and_the_model_is_there(
    client: ollama.Client, hub: FakeHub
) -> None:
    lines: list[Any] = []
    for line in client.pull("hf.co/Org/New:Q8_0", stream=True):
        lines.append(line)
        if line.completed:
            hub.may_go_on.set()
    assert lines[0].status == "pulling manifest"
    assert [line.status for line in lines[-2:]] == ["writing manifest", "success"]
    parts = [line for line in lines if line.total]
    assert len({line.digest for line in parts}) == 1
    assert parts[0].digest.startswith("sha256:")
    assert parts[0].status == f"pulling {parts[0].digest[7:19]}"
    assert {line.total for line in parts} == {FakeHub.made.stat().st_size}
    done = [line.completed for line in parts]
    assert done == sorted(done)
    assert "Org/New:Q8_0" in [one.model for one in client.list().models]
    assert client.show("Org/New:Q8_0").details is not None


def test_a_pull_in_one_piece_ends_with_success(client: ollama.Client, hub: FakeHub) -> None:
    hub.may_go_on.set()
    assert client.pull("Org/New").status == "success"
    assert hub.fetches == [5]


def test_the_same_model_pulled_twice_at_once_is_fetched_once(url: str, hub: FakeHub) -> None:
    async def pull(name: str) -> str:
        async with ollama.AsyncClient(url) as client:
            async for line in await client.pull(name, stream=True):
                last = line.status
            return last or ""

    async def both() -> list[str]:
        first = asyncio.create_task(pull("Org/New:Q8_0"))
        while not hub.has_begun.is_set():
            await asyncio.sleep(0.01)
        second = asyncio.create_task(pull("org/new:q8_0"))
        await asyncio.sleep(0.1)
        hub.may_go_on.set()
        return await asyncio.gather(first, second)

    assert asyncio.run(both()) == ["success", "success"]
    assert hub.fetches == [5]


def test_a_client_that_leaves_stops_the_pull_and_the_next_takes_it_up(
    url: str, client: ollama.Client, hub: FakeHub
) -> None:
    body = {"model": "Org/New:Q8_0"}
    with httpx2.stream("POST", f"{url}/api/pull", json=body) as response:
        lines = response.iter_raw()
        assert b"pulling manifest" in next(lines)
        assert hub.has_begun.wait(10)
    assert hub.has_stopped.wait(10)
    assert "Org/New:Q8_0" not in [one.model for one in client.list().models]
    hub.may_go_on.set()
    assert client.pull("Org/New:Q8_0").status == "success"
    assert 0 < hub.fetches[0] < 5
    assert sum(hub.fetches) == 5


def test_a_pull_that_fails_says_so_in_a_line(client: ollama.Client, hub: FakeHub) -> None:
    with pytest.raises(ollama.ResponseError, match="has no quantization 'Q2_K'"):
        list(client.pull("Org/New:Q2_K", stream=True))
    with pytest.raises(ollama.ResponseError, match="has no quantization 'Q2_K'") as caught:
        client.pull("Org/New:Q2_K")
    assert caught.value.status_code == 503


def test_a_server_listens_on_a_further_port_too_and_says_which_one_is_taken(models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidField, match=f"also: 127.0.0.1:{port} is in use"):
            HttpServer(BundleSource(), ServerConfig(port=0, also=(port,)))
    with running_server(BundleSource(), ServerConfig(port=0, also=(port,))) as url:
        for address in (url, f"http://127.0.0.1:{port}"):
            with ollama.Client(address) as client:
                assert len(client.list().models) == 2
    with pytest.raises(InvalidField, match="also: must be at least 1"):
        HttpServer(BundleSource(), ServerConfig(port=0, also=(0,)))

"""Pulling from the hub through a fake of its library: what is chosen, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from osaurus.bundle import download
from osaurus.bundle.download import HuggingFaceHub, PullPlan, RemoteFile, plan_pull, pull_hub_model
from osaurus.bundle.progress import PullProgress, never_stopped
from osaurus.errors import DownloadError

SAFETENSORS = (
    "README.md", "LICENSE", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "tokenizer.model", "merges.txt",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin", "consolidated.safetensors",
    "original/consolidated.00.pth", "original/params.json", "onnx/model.onnx",
    "adapter_model.safetensors", "model-q4_0.gguf", "figures/a.png",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
WANTED = (
    "LICENSE", "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json",
    "generation_config.json", "merges.txt", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json",
)  # fmt: skip
GGUFS = (
    "README.md", "config.json", "M-Q8_0.gguf", "M-Q4_K_M.gguf", "M-F16/M-F16-00001-of-00002.gguf",
    "M-F16/M-F16-00002-of-00002.gguf", "mmproj-M-F16.gguf", "imatrix.gguf",
)  # fmt: skip


class FakeHub:
    """Knows one repository; writes what is fetched as the hub's library lays it out."""

    def __init__(self, names: Sequence[str], size: int = 10) -> None:
        self.known = [RemoteFile(name=name, size_bytes=size) for name in names]
        self.fetched: list[str] = []
        self.revision: str | None = None

    def files(self, repo_id: str, revision: str | None) -> list[RemoteFile]:
        self.revision = revision
        return self.known

    def fetch(
        self,
        repo_id: str,
        revision: str | None,
        names: Sequence[str],
        cache_dir: Path | None,
        is_stopped: Callable[[], bool],
    ) -> Path:
        assert cache_dir is not None
        repository = cache_dir / f"models--{repo_id.replace('/', '--')}"
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        for name in names:
            (repository / "blobs" / name.replace("/", "_")).write_bytes(bytes(10))
        self.fetched = list(names)
        return repository / "snapshots" / "abc"


class FailingHub(FakeHub):
    def __init__(self, error: Exception) -> None:
        super().__init__(["model.safetensors"])
        self.error = error

    def files(self, repo_id: str, revision: str | None) -> list[RemoteFile]:
        raise self.error


def chosen(names: Sequence[str], name: str) -> tuple[str, list[str]]:
    plan = plan_pull(name, hub=FakeHub(names))
    return plan.quantization, sorted(file.name for file in plan.files)


def test_safetensors_come_with_their_small_files_and_without_doubles() -> None:
    assert chosen(SAFETENSORS, "Org/M") == ("", sorted(WANTED))


def test_one_gguf_is_chosen_by_its_quantization_or_by_preference() -> None:
    assert chosen(GGUFS, "Org/M") == ("Q4_K_M", ["M-Q4_K_M.gguf"])
    assert chosen(GGUFS, "Org/M:q8_0") == ("Q8_0", ["M-Q8_0.gguf"])
    assert chosen(SAFETENSORS, "Org/M:Q4_0") == ("Q4_0", ["model-q4_0.gguf"])


def test_a_split_gguf_is_fetched_with_all_its_parts() -> None:
    parts = ["M-F16/M-F16-00001-of-00002.gguf", "M-F16/M-F16-00002-of-00002.gguf"]
    assert chosen(GGUFS, "Org/M:F16") == ("F16", parts)


def test_the_plan_knows_its_total() -> None:
    files = (RemoteFile(name="a", size_bytes=3), RemoteFile(name="b", size_bytes=4))
    assert PullPlan(repo_id="Org/M", quantization="", files=files).total_bytes == 7


@pytest.mark.parametrize(
    ("names", "name", "words"),
    [
        (GGUFS, "Org/M:Q2_K", "no quantization 'Q2_K'; it has F16, Q4_K_M, Q8_0"),
        (["config.json", "model.safetensors"], "Org/M:Q4_0", "no GGUF files"),
        (["config.json", "pytorch_model.bin"], "Org/M", "loading a pickle"),
        (["README.md"], "Org/M", "neither safetensors nor GGUF"),
        ([], "not a name", "not a repository name"),
        ([], "a/b/c", "not a repository name"),
        ([], "../x", "not a repository name"),
        ([], "", "not a repository name"),
    ],
)
def test_what_cannot_be_pulled_says_why(names: Sequence[str], name: str, words: str) -> None:
    with pytest.raises(DownloadError, match=words):
        plan_pull(name, hub=FakeHub(names))


def test_a_pull_returns_what_opens_and_reports_its_end(tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    hub = FakeHub(SAFETENSORS)
    path = pull_hub_model("Org/M", revision="v1", hub=hub, cache_dir=tmp_path, progress=seen.append)
    assert path == tmp_path / "models--Org--M" / "snapshots" / "abc"
    assert sorted(hub.fetched) == sorted(WANTED)
    assert hub.revision == "v1"
    total = 10 * len(WANTED)
    assert seen[-1] == PullProgress(stage="done", file="Org/M", completed=total, total=total)
    gguf = pull_hub_model("Org/M:F16", hub=FakeHub(GGUFS), cache_dir=tmp_path)
    assert gguf == path / "M-F16" / "M-F16-00001-of-00002.gguf"


def test_growth_on_disk_is_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_POLL_S", 0.001)
    seen: list[PullProgress] = []

    class SlowHub(FakeHub):
        def fetch(self, *arguments: Any) -> Path:
            folder = super().fetch(*arguments)
            while not any(p.completed == 10 for p in seen):
                pass
            return folder

    pull_hub_model("Org/M:Q8_0", hub=SlowHub(GGUFS), cache_dir=tmp_path, progress=seen.append)
    assert {p.stage for p in seen} == {"download", "done"}
    assert all(p.total == 10 and p.completed <= 10 for p in seen)


def response(status: int) -> Any:
    import httpx2

    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.example/x"))


def hub_errors() -> list[tuple[Exception, str]]:
    return [
        (errors.RepositoryNotFoundError("x", response=response(404)), "does not exist"),
        (errors.GatedRepoError("x", response=response(403)), "is gated"),
        (errors.RevisionNotFoundError("x", response=response(404)), "no such revision"),
        (errors.HfHubHTTPError("x", response=response(500)), "could not be reached"),
        (errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (errors.LocalEntryNotFoundError("x"), "could not be reached"),
        (ConnectionResetError("x"), "could not be reached"),
        (OSError(28, "No space left on device"), "No space left"),
    ]


@pytest.mark.parametrize(("error", "words"), hub_errors())
def test_what_goes_wrong_at_the_hub_becomes_a_remedy(error: Exception, words: str) -> None:
    with pytest.raises(DownloadError, match=words) as caught:
        plan_pull("Org/M", hub=FailingHub(error))
    assert "Org/M" in caught.value.message


def test_a_bug_is_not_dressed_up_as_a_network_problem() -> None:
    with pytest.raises(ZeroDivisionError):
        plan_pull("Org/M", hub=FailingHub(ZeroDivisionError()))


def test_the_real_hub_is_asked_for_exactly_the_chosen_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    folder = HuggingFaceHub().fetch("Org/M", "main", ["a[1].json", "b"], tmp_path, never_stopped)
    assert folder == tmp_path / "snapshot"
    assert issubclass(asked.pop("tqdm_class"), huggingface_hub.utils.tqdm)
    assert asked == {
        "repo_id": "Org/M",
        "revision": "main",
        "cache_dir": tmp_path,
        "allow_patterns": ["a[[]1].json", "b"],
    }


def test_the_real_hubs_file_list_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sibling:
        def __init__(self, name: str, size: int | None) -> None:
            self.rfilename, self.size = name, size

    class Info:
        siblings = (Sibling("a", 5), Sibling("b", None))

    def model_info(self: object, repo_id: str, **kwargs: Any) -> Info:
        assert (repo_id, kwargs["files_metadata"]) == ("Org/M", True)
        return Info()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert HuggingFaceHub().files("Org/M", None) == [
        RemoteFile(name="a", size_bytes=5),
        RemoteFile(name="b", size_bytes=0),
    ]


def test_offline_mode_is_explained_through_the_real_library(
    monkeypatch: pytest.MonkeyPatch, disable_hub: Callable[[], None]
) -> None:
    disable_hub()
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        plan_pull("Org/M")


@pytest.fixture
def disable_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def disable() -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    return disable

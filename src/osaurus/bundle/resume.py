"""Large files of the hub, fetched so that a pull which was stopped goes on where it was.

The hub's library starts a file anew each time. Here its transfer runs first, into a part that
stays beside the cache's blobs; a whole part becomes the blob, which the library then finds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from osaurus.bundle.progress import IsStopped
from osaurus.errors import Cancelled, DownloadError

#: Smaller ones are not worth a question of their own.
_SUFFIXES = (".safetensors", ".gguf")
#: The hub sends larger files by the library's own protocol only.
_MAX_BYTES = 50 * 10**9
_PART = ".osaurus.incomplete"
_SHA256_DIGITS = 64


def fetch_large_files(
    repo_id: str,
    revision: str | None,
    names: Sequence[str],
    cache_dir: Path,
    is_stopped: IsStopped,
) -> None:
    """Put the blobs of the large files among `names` into the cache. Raises `Cancelled` once
    `is_stopped` says so, and what the library raises."""
    for name in names:
        if name.endswith(_SUFFIXES):
            _fetch(repo_id, revision, name, cache_dir, is_stopped)


def stoppable_bar(is_stopped: IsStopped) -> type[Any]:
    """A progress bar for the library, which reports each piece to it before it goes on."""
    from huggingface_hub.utils import tqdm

    class StoppableBar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if is_stopped():
                raise Cancelled("the download was stopped; what was fetched is kept")
            return super().update(n)

    return StoppableBar


def _fetch(
    repo_id: str, revision: str | None, name: str, cache_dir: Path, is_stopped: IsStopped
) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    url = hf_hub_url(repo_id, name, revision=revision)
    facts = get_hf_file_metadata(url)
    if facts.etag is None or facts.size is None or facts.size > _MAX_BYTES:
        return
    folder = repo_folder_name(repo_id=repo_id, repo_type="model")
    blob = cache_dir / folder / "blobs" / facts.etag
    part = blob.with_name(blob.name + _PART)
    headers = build_hf_headers()
    if urlsplit(facts.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # it is for the hub, not for where its files lie
    lock = cache_dir / ".locks" / folder / f"{facts.etag}.lock"
    for place in (blob.parent, lock.parent):
        place.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        with part.open("ab") as file:
            if file.tell() > facts.size:
                file.truncate(0)
            resumed = file.tell()
            http_get(
                facts.location,
                file,
                resume_size=resumed,
                headers=headers,
                expected_size=facts.size,
                tqdm_class=stoppable_bar(is_stopped),
            )
        if resumed:
            _verify(part, facts.etag)
        part.replace(blob)


def _verify(part: Path, etag: str) -> None:
    """The two halves may be of different files. Large files are known by their SHA-256."""
    if len(etag) != _SHA256_DIGITS:
        return
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != etag:
        part.unlink()
        raise DownloadError(f"{part.name}: SHA-256 {found} instead of {etag}; pull again")

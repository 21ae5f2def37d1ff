"""Texts to vectors, for every protocol: resolve and lease the model, tokenize off the event
loop, compute under the device gate.

Content is text: what looks like a control token in it becomes ordinary tokens, as in chats.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence

from osaurus.chat.threads import ModelThreads
from osaurus.errors import InvalidField
from osaurus.runtime.model import LoadedModel
from osaurus.runtime.pool import HeldModel, ModelRuntime
from osaurus.types.embeddings import Embedder, EmbeddingJob, EmbeddingRequest, Embeddings

MAX_INPUTS = 2048

#: A token stands for so many characters at most (WordPiece gives one unknown token for a word
#: of up to 100; longer words and everything else split finer): what is longer is over the limit.
_MAX_CHARACTERS_PER_TOKEN = 512


async def embed(
    runtime: ModelRuntime, threads: ModelThreads, request: EmbeddingRequest
) -> Embeddings:
    """Raises `ModelNotFound`, what is wrong with the bundle, or `InvalidField` for a model that
    embeds nothing and for an input over its limit. Cancelling it stops the work before the next
    text; the lease lasts until then."""
    if not request.inputs:
        raise InvalidField("input", "must hold at least one text")
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidField(
            "input", f"may hold at most {MAX_INPUTS} texts, got {len(request.inputs)}"
        )
    held = await runtime.acquire(request.model)
    job: EmbeddingJob | None = None
    try:
        model = held.model
        model.admit()
        embedder = _embedder(model)
        dimensions = _dimensions(request.dimensions, embedder)
        ids = await threads.run(model.model_id, _encode_all, model, embedder, request)
        job = embedder.start(ids)
        _release_after(job, held)
        vectors = await asyncio.wrap_future(job.done)
    except BaseException:
        if job is None:
            held.release()
        else:
            job.cancel()
        raise
    if dimensions is not None:
        vectors = [_cut(vector, dimensions) for vector in vectors]
    return Embeddings(
        model_id=model.model_id,
        vectors=tuple(vectors),
        token_counts=tuple(map(len, ids)),
    )


def refuse_embedder(model: LoadedModel) -> None:
    """Raises `InvalidField` for a model that writes no text."""
    if model.embedder is not None:
        raise InvalidField(
            "model",
            f"{model.model_id} makes embeddings and writes no text; name a model for chats, or "
            "use /v1/embeddings",
        )


def _release_after(job: EmbeddingJob, held: HeldModel) -> None:
    """The lease lasts until nothing touches the weights, whoever still waits for the answer."""
    loop = asyncio.get_running_loop()
    job.done.add_done_callback(lambda _: loop.call_soon_threadsafe(held.release))


def _embedder(model: LoadedModel) -> Embedder:
    if model.embedder is None:
        raise InvalidField(
            "model",
            f"{model.model_id} writes text and makes no embeddings; name an embedding model, "
            "`osaurus pull minilm` gets a small one",
        )
    return model.embedder


def _dimensions(wanted: int | None, embedder: Embedder) -> int | None:
    if wanted is None or wanted == embedder.dimensions:
        return None
    if not 1 <= wanted <= embedder.dimensions:
        raise InvalidField(
            "dimensions",
            f"must be at least 1 and at most {embedder.dimensions}, the size of this model's "
            f"vectors, got {wanted}",
        )
    return wanted


def _cut(vector: array[float], dimensions: int) -> array[float]:
    """The first numbers, scaled to length one: what models trained for it (Matryoshka
    representations, arXiv:2205.13147) are compared by."""
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept))
    return array("f", (x / length for x in kept)) if length > 0 else kept


def _encode_all(
    model: LoadedModel, embedder: Embedder, request: EmbeddingRequest
) -> list[list[int]]:
    return [
        _encode(model, embedder, text, f"input[{i}]", truncate=request.truncate)
        for i, text in enumerate(request.inputs)
    ]


def _encode(
    model: LoadedModel,
    embedder: Embedder,
    text: str | Sequence[int],
    where: str,
    *,
    truncate: bool,
) -> list[int]:
    before, behind = embedder.frame if isinstance(text, str) else ((), ())
    room = embedder.max_tokens - len(before) - len(behind)
    if isinstance(text, str):
        text = _shortened(text, room, where, truncate=truncate)
        ids = model.tokenizer.encode(text, parse_special=False, add_bos=False)
    else:
        ids = list(text)
        bad = next((i for i in ids if not 0 <= i < embedder.vocab_size), None)
        if bad is not None:
            raise InvalidField(
                where, f"token ids are at least 0 and below {embedder.vocab_size}, got {bad}"
            )
    if len(ids) > room:
        if not truncate:
            raise _too_long(where, len(ids) + len(before) + len(behind), embedder.max_tokens)
        ids = ids[:room]
    ids = [*before, *ids, *behind]
    if not ids:
        raise InvalidField(where, "must not be empty")
    return ids


def _shortened(text: str, room: int, where: str, *, truncate: bool) -> str:
    """At most what could be of use: tokenizing megabytes only to cut or refuse them is work
    that anybody could ask for."""
    limit = room * _MAX_CHARACTERS_PER_TOKEN
    if len(text) <= limit:
        return text
    if not truncate:
        raise InvalidField(
            where,
            f"{len(text)} characters are more than {room} tokens; split the text, or set "
            "truncate to have it cut",
        )
    return text[:limit]


def _too_long(where: str, num_tokens: int, limit: int) -> InvalidField:
    return InvalidField(
        where,
        f"{num_tokens} tokens > {limit} maximum; split the text, or set truncate to have it cut",
    )

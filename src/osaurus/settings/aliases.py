"""Names of the user's own for models: `NAME=MODEL`, where a `*` may end NAME.

Programs ask for models by their vendor's names, a large and a small one often; this says which
models of this machine those are.
"""

from __future__ import annotations

from collections.abc import Sequence


def check_aliases(texts: Sequence[str]) -> None:
    """Raises ValueError for one that cannot be meant."""
    for text in texts:
        name, _, model = map(str.strip, text.partition("="))
        if not name or not model or "*" in name[:-1] or "*" in model:
            raise ValueError(
                f"must hold NAME=MODEL, where * may be the end of NAME; got {text[:80]!r}"
            )


def aliased(name: str, texts: Sequence[str]) -> str | None:
    """The model that `name` stands for, in any case; a whole name goes before the longest
    beginning that fits."""
    wanted = name.strip().lower()
    best: tuple[int, str] | None = None
    for text in texts:
        pattern, _, model = map(str.strip, text.partition("="))
        pattern = pattern.lower()
        if pattern == wanted:
            return model
        stem = pattern.removesuffix("*")
        if stem != pattern and wanted.startswith(stem) and (best is None or len(stem) > best[0]):
            best = len(stem), model
    return None if best is None else best[1]

"""Ollama's ways to name a model, as ids of this program.

smollm2-135m-instruct:latest            the name itself
hf.co/ORG/REPO:Q4_K_M                   ORG/REPO:Q4_K_M
smollm2:135m                            smollm2-135m, else smollm2-135m-instruct
smollm2:135m-instruct-q4_1              smollm2-135m-instruct:q4_1
"""

from __future__ import annotations

import re

from osaurus.bundle.gguf_files import quantization_label
from osaurus.errors import AmbiguousModel, ModelNotFound
from osaurus.runtime.model import Listing
from osaurus.runtime.pool import ModelRuntime

_HUB = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
#: What Ollama leaves out of a name, since it is what everybody means.
_ENDINGS = ("", "-instruct", "-it")


def spellings(name: str) -> tuple[str, ...]:
    """What `name` may mean here, the likeliest first."""
    name = _HUB.sub("", name.strip(), count=1)
    base, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        return (name,)
    if tag.lower() == "latest":
        return (base,)
    found = [name]
    stem, _, last = tag.rpartition("-")
    if stem and quantization_label(last):
        found += [f"{base}-{stem}{ending}:{last}" for ending in _ENDINGS]
    found += [f"{base}-{tag}{ending}" for ending in _ENDINGS]
    return tuple(found)


async def find_by_name(runtime: ModelRuntime, name: str) -> tuple[str, Listing]:
    """The spelling that means a model, and the model. Raises `ModelNotFound`."""
    missing: ModelNotFound | None = None
    for spelling in spellings(name):
        try:
            return spelling, await runtime.find(spelling)
        except AmbiguousModel:
            raise
        except ModelNotFound as error:
            missing = missing or error
    assert missing is not None
    raise missing

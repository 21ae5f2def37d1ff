"""A legacy completions body to one `ChatRequest` a prompt, or the 400 that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from osaurus.errors import InvalidField
from osaurus.server.apis.openai_completions_wire import CompletionBody
from osaurus.server.apis.openai_format import answer_format
from osaurus.server.apis.openai_sampling import MAX_CHOICES, num_choices, sampling_fields
from osaurus.server.apis.shared_fields import sampling_number
from osaurus.types.chat import ChatRequest, RawPrompt

MAX_PROMPTS = 128

Content = str | tuple[int, ...]


def to_raw_requests(body: CompletionBody, request_id: str) -> list[ChatRequest]:
    """Raises `InvalidField`, its `field` spelled as in the request."""
    prompts = prompt_contents(body.prompt)
    n = num_choices(body.n)
    if body.best_of is not None and body.best_of != n:
        raise InvalidField(
            "best_of", f"must equal n ({n}): every answer is returned, got {body.best_of}"
        )
    if len(prompts) * n > MAX_PROMPTS * MAX_CHOICES // 8:
        raise InvalidField(
            "n",
            f"{len(prompts)} prompts with {n} answers each are more than "
            f"{MAX_PROMPTS * MAX_CHOICES // 8} answers; send several requests",
        )
    sampling = sampling_fields(body)
    if (num_top := wanted_logprobs(body)) is not None:
        if body.echo:
            raise InvalidField(
                "logprobs", "with echo is not supported: a prompt's own tokens have none here"
            )
        sampling |= {"logprobs": True, "top_logprobs": num_top}
    if body.echo and body.suffix is not None:
        raise InvalidField("echo", "excludes suffix: the answer lies between the two texts")
    return [
        ChatRequest(
            model=body.model,
            prompt=RawPrompt(content=content, suffix=body.suffix),
            sampling=sampling,
            n=n,
            response_format=answer_format(body),
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
        )
        for i, content in enumerate(prompts)
    ]


def wanted_logprobs(body: CompletionBody) -> int | None:
    """How many alternatives a token shall have; None for no probabilities at all."""
    if body.logprobs is None or body.logprobs is False:
        return None
    if body.logprobs is True:
        return 0
    return int(sampling_number("top_logprobs", body.logprobs, "logprobs"))


def prompt_contents(prompt: Any, field: str = "prompt") -> list[Content]:
    """Text, token ids, or a list of texts or of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidField(field, "must be a text, a list of token ids, or a list of those")
    if len(prompt) > MAX_PROMPTS and not _are_ids(prompt):
        raise InvalidField(field, f"may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    return contents_of(prompt, field)


def contents_of(items: Sequence[Any], field: str) -> list[Content]:
    """Of a list that is not empty: its ids as one content, else one content an item."""
    if _are_ids(items):
        return [tuple(items)]
    found: list[Content] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and item and _are_ids(item):
            found.append(tuple(item))
        else:
            raise InvalidField(f"{field}[{i}]", "must be a text or a list of token ids")
    return found


def _are_ids(items: Sequence[Any]) -> bool:
    return all(type(item) is int for item in items)

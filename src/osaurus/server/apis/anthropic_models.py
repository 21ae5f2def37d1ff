"""The list of models as Anthropic's clients read it: pages of rows, found by id.

In: listings in a fixed order, and the query's paging parameters. Out: one page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC

from msgspec import Struct

from osaurus.errors import InvalidField
from osaurus.runtime.model import Listing

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


class ModelInfo(Struct, kw_only=True, tag_field="type", tag="model"):
    """`max_input_tokens` is the context, None where the files do not say."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    lifecycle: str = "active"


class ModelPage(Struct, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(listing: Listing) -> ModelInfo:
    modified = listing.modified.astimezone(UTC).replace(microsecond=0)
    return ModelInfo(
        id=listing.model_id,
        display_name=listing.model_id.rpartition("/")[2],
        created_at=modified.isoformat().replace("+00:00", "Z"),
        max_input_tokens=listing.context or None,
        max_tokens=listing.context or None,
    )


def model_page(listings: Sequence[Listing], query: Mapping[str, str]) -> ModelPage:
    """`after_id` and `before_id` are ids that a page before ended or began with. Raises
    `InvalidField` for them and for `limit`."""
    limit = _limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    if after and before:
        raise InvalidField("before_id", "cannot be combined with after_id")
    ids = [listing.model_id for listing in listings]
    if before:
        end = _place(ids, "before_id", before)
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = _place(ids, "after_id", after) + 1 if after else 0
        end = start + limit
        has_more = end < len(ids)
    rows = [model_info(listing) for listing in listings[start:end]]
    return ModelPage(
        data=rows,
        has_more=has_more,
        first_id=rows[0].id if rows else None,
        last_id=rows[-1].id if rows else None,
    )


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    is_number = text.isascii() and text.isdigit() and len(text) < 9
    if not is_number or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidField(
            "limit",
            f"must be a whole number, at least 1 and at most {MAX_LIMIT}, got {text[:20]!r}",
        )
    return int(text)


def _place(ids: Sequence[str], name: str, wanted: str) -> int:
    try:
        return ids.index(wanted)
    except ValueError:
        raise InvalidField(name, f"must be the id of a model, got {wanted[:80]!r}") from None

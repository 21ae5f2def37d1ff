"""Responses that may be read, gone on from and cancelled by their id.

In memory, and bounded: the newest 128 and at most 256 MiB of items; the oldest that has ended
makes room. Gone when the server stops. An id is all that is needed to go on from a response,
whatever model it came from. One event loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from osaurus.errors import InvalidField, UserError
from osaurus.server.apis.responses_items import Find
from osaurus.server.apis.responses_wire import Item, ResponseObject, encode
from osaurus.server.errors import RequestRefused

MAX_RESPONSES = 128
MAX_BYTES = 256 * 1024 * 1024

RUNNING = frozenset({"queued", "in_progress"})


class PreviousResponseNotFound(InvalidField):
    code = "previous_response_not_found"


@dataclass(slots=True)
class StoredResponse:
    """`before` are the items of the responses that this one went on from, `own` those of its
    input. `cancel` ends it while it runs. `size_bytes` counts all of its conversation."""

    response: ResponseObject
    before: tuple[Item, ...]
    own: tuple[Item, ...]
    cancel: Callable[[], None] | None = None
    size_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.response.status in RUNNING

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self.before, *self.own, *self.response.output)


@dataclass(slots=True)
class ResponseStore:
    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    _kept: dict[str, StoredResponse] = field(default_factory=dict)  # oldest first

    def put(self, stored: StoredResponse) -> None:
        self._kept[stored.response.id] = stored
        self.recount(stored)

    def recount(self, stored: StoredResponse) -> None:
        """Its output has grown; it may have been removed meanwhile."""
        stored.size_bytes = len(encode(stored.items))
        self._make_room()

    def get(self, response_id: str) -> StoredResponse:
        """Raises `RequestRefused`, a 404."""
        stored = self._kept.get(response_id)
        if stored is None:
            raise RequestRefused(
                "response_not_found", f"no response {response_id[:80]!r} is stored"
            )
        return stored

    def remove(self, response_id: str) -> StoredResponse:
        stored = self.get(response_id)
        del self._kept[response_id]
        return stored

    def items_up_to(self, response_id: str) -> tuple[Item, ...]:
        """The conversation whose last answer that response is."""
        stored = self._kept.get(response_id)
        if stored is None:
            raise PreviousResponseNotFound(
                "previous_response_id",
                f"no response {response_id[:80]!r} is stored: the newest {self.max_responses} "
                "are kept, in memory; send the whole conversation as input",
            )
        if stored.is_running:
            raise InvalidField("previous_response_id", "that response has not ended yet")
        return stored.items

    def finder(self) -> Find:
        """Looks an item up by its id, the newest of that id."""
        known: dict[str, Item] = {}
        is_filled = False

        def find(item_id: str) -> Item | None:
            nonlocal is_filled
            if not is_filled:
                is_filled = True
                for stored in self._kept.values():
                    known.update((item["id"], item) for item in stored.items)
            return known.get(item_id)

        return find

    def _make_room(self) -> None:
        total = sum(stored.size_bytes for stored in self._kept.values())
        for response_id, stored in list(self._kept.items()):
            if len(self._kept) <= self.max_responses and total <= self.max_bytes:
                return
            if not stored.is_running:
                del self._kept[response_id]
                total -= stored.size_bytes


def not_cancellable(stored: StoredResponse) -> UserError:
    return UserError(
        f"a response that is {stored.response.status} cannot be cancelled; it has ended"
    )

"""A conversation made shorter: what was said to the model stays, what it did is summed up.

In: a conversation as `/responses` takes it. Out: the items to send instead: the messages of the
user and those that guide the model, word for word, then one compaction item, the model's own
summary. Reading that item back is `responses_history.py`'s.
"""

from __future__ import annotations

import time

from osaurus.chat.profiles import SWITCH
from osaurus.chat.service import ChatEngine
from osaurus.errors import RequestFailed
from osaurus.server.apis.responses_items import compaction, whole_items
from osaurus.server.apis.responses_request import conversation_of
from osaurus.server.apis.responses_store import ResponseStore
from osaurus.server.apis.responses_wire import CompactBody, CompactedConversation, new_id
from osaurus.server.apis.responses_writer import wire_usage
from osaurus.server.exchange import Exchange
from osaurus.types.chat import ChatRequest, Message

#: A summary is worth its reading: no longer than this.
MAX_SUMMARY_TOKENS = 2048

_WISH = (
    "Write a summary of our conversation so far, from which it can go on without its text. "
    "Keep goals, decisions, names, numbers, what tools returned and what is still to be done. "
    "Write the summary only."
)


async def compact(
    chat: ChatEngine, body: CompactBody, store: ResponseStore, exchange: Exchange
) -> CompactedConversation:
    """Raises as `ChatEngine.complete` does, `InvalidField` by the fields of `body`."""
    before = store.items_up_to(body.previous_response_id) if body.previous_response_id else ()
    own = whole_items(body.input if body.input is not None else (), store.finder())
    conversation = conversation_of(body.instructions, before, own, body.input)
    request = ChatRequest(
        model=body.model,
        messages=(*conversation.messages, Message(role="user", content=_WISH)),
        sampling={"max_tokens": MAX_SUMMARY_TOKENS},
        template_kwargs={SWITCH: False},
        request_id=exchange.request_id,
    )
    with conversation.naming_items():
        completion = await chat.complete(request)
    (choice,) = completion.choices
    exchange.note_answer(completion.usage)
    exchange.note_end([choice.info])
    summary = choice.text.strip()
    if not summary:
        raise RequestFailed("the model wrote no summary; send the conversation as it is")
    kept = [
        item
        for item in (*before, *own)
        if item["type"] == "message" and item["role"] != "assistant"
    ]
    return CompactedConversation(
        id=new_id("resp"),
        created_at=int(time.time()),
        output=[*kept, compaction(summary)],
        usage=wire_usage(choice.info),
    )

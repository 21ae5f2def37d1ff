"""`POST /admin/render-prompt`: what a model would read, for a chat request that is not run.

From a model's files; no weights are loaded. For programs of this machine: the answer is the
whole prompt.
"""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.inspection import InspectedPrompt, Section
from osaurus.chat.service import ChatEngine
from osaurus.server.apis.openai_request import to_chat_request
from osaurus.server.apis.openai_wire import ChatCompletionBody, encode
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.server.exchange import Exchange
from osaurus.server.sse import run_while_connected
from osaurus.types.chat import ChatRequest


class RenderedPrompt(Struct, kw_only=True):
    sections: list[Section]
    static_prefix: str
    rendered_prompt: str
    prompt_tokens: int
    prefix_hash: str


class PromptAdmin:
    def __init__(self, chat: ChatEngine) -> None:
        self._chat = chat

    async def render_prompt(self, request: Request) -> Response:
        require_owner(request)
        body = await read_json(request, ChatCompletionBody)
        wanted = to_chat_request(body, Exchange.of(request).request_id)
        return await run_while_connected(request.receive, self._rendered(wanted))

    async def _rendered(self, wanted: ChatRequest) -> Response:
        found = await self._chat.inspect(wanted)
        return Response(encode(_shown(found)), media_type="application/json")


def _shown(found: InspectedPrompt) -> RenderedPrompt:
    prompt = found.prompt
    return RenderedPrompt(
        sections=list(found.sections),
        static_prefix=found.static_prefix,
        rendered_prompt=prompt.text,
        prompt_tokens=len(prompt.token_ids),
        prefix_hash=prompt.prefix_hash,
    )

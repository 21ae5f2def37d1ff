"""`POST /tokenize` and `/detokenize`: text and chats to token ids and back, from a model's files;
no weights are loaded. The shapes of vLLM, with llama.cpp's names accepted beside them."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.raw_prompt import with_bos
from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField
from osaurus.runtime.model import PromptModel
from osaurus.server.apis.openai_request import to_chat_request
from osaurus.server.apis.openai_wire import ChatCompletionBody, WireMessage, encode
from osaurus.server.body import read_json
from osaurus.server.exchange import Exchange
from osaurus.server.sse import run_while_connected

#: Tokenizing takes about a second a megabyte.
MAX_CHARACTERS = 4 * 1024 * 1024
MAX_TOKENS = 1 << 20


class TokenizeBody(ChatCompletionBody, kw_only=True):
    """One of `prompt`, `messages` (with all that a chat may have beside them) and `content`."""

    model: str = ""
    messages: list[WireMessage] | UnsetType = UNSET  # pyright: ignore[reportIncompatibleVariableOverride]
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class Piece(Struct, kw_only=True):
    """`piece` is a text, or bytes that are only a part of a character."""

    id: int
    piece: str | list[int]


class Tokens(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None = None


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[int]
    model: str = ""


class Tokenization:
    def __init__(self, chat: ChatEngine) -> None:
        self._chat = chat

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request, TokenizeBody)
        given = [body.prompt, body.content, None if body.messages is UNSET else body.messages]
        if sum(one is not None for one in given) != 1:
            raise InvalidField("prompt", "is required, or messages or content in its place")
        return await run_while_connected(request.receive, self._tokenized(body, request))

    async def _tokenized(self, body: TokenizeBody, request: Request) -> Response:
        if body.messages is not UNSET:
            wanted = to_chat_request(body, Exchange.of(request).request_id)
            prompt = await self._chat.prepare(wanted)
            ids = prompt.token_ids
            found = await self._chat.consult(body.model, lambda model: _shown(model, ids, body))
        else:
            found = await self._chat.consult(
                body.model, lambda model: _shown(model, _ids(model, body), body)
            )
        return Response(encode(found), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request, DetokenizeBody)
        if len(body.tokens) > MAX_TOKENS:
            raise InvalidField("tokens", f"may hold at most {MAX_TOKENS}, got {len(body.tokens)}")
        text = await self._chat.consult(body.model, lambda model: _text(model, body.tokens))
        return Response(encode({"prompt": text, "content": text}), media_type="application/json")


def _ids(model: PromptModel, body: TokenizeBody) -> list[int]:
    """vLLM adds what belongs around a text unless told otherwise, llama.cpp when told to."""
    text = body.content if body.prompt is None else body.prompt
    assert text is not None  # one of them was given
    if len(text) > MAX_CHARACTERS:
        name = "content" if body.prompt is None else "prompt"
        raise InvalidField(name, f"may hold at most {MAX_CHARACTERS} characters, got {len(text)}")
    ids = model.tokenizer.encode(text, parse_special=body.parse_special is not False, add_bos=False)
    wanted = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if not (body.prompt is not None if wanted is None else wanted):
        return ids
    before, behind = model.tokenizer.frame
    if before and tuple(ids[: len(before)]) != before:
        ids = [*before, *ids]
    return with_bos(model.tokenizer, [*ids, *behind])


def _shown(model: PromptModel, ids: list[int], body: TokenizeBody) -> Tokens:
    pieces = [model.tokenizer.token_bytes(token_id) for token_id in ids]
    texts = [piece.decode(errors="replace") for piece in pieces]
    tokens: Any = ids
    if body.with_pieces:
        tokens = [
            Piece(id=token_id, piece=text if text.encode() == piece else list(piece))
            for token_id, text, piece in zip(ids, texts, pieces, strict=True)
        ]
    return Tokens(
        count=len(ids),
        max_model_len=model.context_tokens,
        tokens=tokens,
        token_strs=texts if body.return_token_strs else None,
    )


def _text(model: PromptModel, tokens: list[int]) -> str:
    limit = model.tokenizer.vocab_size
    for i, token_id in enumerate(tokens):
        if not 0 <= token_id < limit:
            raise InvalidField(
                f"tokens[{i}]", f"token ids are at least 0 and below {limit}, got {token_id}"
            )
    return model.tokenizer.decode(tokens)

"""Legacy completions on the wire, and the answer in their shapes. Pure: no sockets."""

from __future__ import annotations

import codecs
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from osaurus.chat.completion import finish_reason
from osaurus.server.apis.openai_chunks import LOWEST_LOGPROB, wire_usage
from osaurus.server.apis.openai_wire import SamplingBody, WireUsage
from osaurus.types.events import Info, TokenLogprob


class CompletionBody(SamplingBody, kw_only=True):
    """`prompt`: text, token ids, or a list of either."""

    prompt: Any
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | bool | None = None


class CompletionLogprobs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    osaurus: Mapping[str, Any] | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """Whole, or one chunk of a stream: the shape is the same."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: WireUsage | UnsetType | None = UNSET
    object: str = "text_completion"


class ChoiceText:
    """One choice's text as it grows: where each token begins in it, with what was echoed."""

    def __init__(self, index: int, *, echo: str = "", num_top: int = 0) -> None:
        self.index = index
        self._echo = echo
        self._num_top = num_top
        self._offset = len(echo)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, text: str, logprobs: Sequence[TokenLogprob]) -> CompletionChoice:
        echo, self._echo = self._echo, ""
        return CompletionChoice(
            index=self.index, text=echo + text, logprobs=self._logprobs(logprobs)
        )

    def end(self, info: Info, remarks: Mapping[str, Any]) -> CompletionChoice:
        echo, self._echo = self._echo, ""
        return CompletionChoice(
            index=self.index,
            text=echo,
            finish_reason=finish_reason(info, has_calls=False),
            osaurus=remarks or UNSET,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return CompletionLogprobs(
            tokens=[_name(token) for token in tokens],
            token_logprobs=[_finite(token.logprob) for token in tokens],
            top_logprobs=[_best(token) for token in tokens] if self._num_top else None,
            text_offset=offsets,
        )


class CompletionWriter:
    """One id and time for a whole answer or all chunks of a stream."""

    def __init__(self, model: str, *, includes_usage: bool = False) -> None:
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._includes_usage = includes_usage

    def chunk(self, choice: CompletionChoice) -> CompletionAnswer:
        return self._answer([choice], None if self._includes_usage else UNSET)

    def last(self, prompts: Sequence[Sequence[Info]]) -> CompletionAnswer:
        """The usage of all prompts, for who asked for it."""
        return self._answer([], usage_of_prompts(prompts))

    def whole(
        self, choices: list[CompletionChoice], prompts: Sequence[Sequence[Info]]
    ) -> CompletionAnswer:
        return self._answer(choices, usage_of_prompts(prompts))

    def _answer(
        self, choices: list[CompletionChoice], usage: WireUsage | UnsetType | None
    ) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


def usage_of_prompts(prompts: Sequence[Sequence[Info]]) -> WireUsage:
    """The sum over prompts, each read once for all of its choices."""
    total = wire_usage(prompts[0])
    for infos in prompts[1:]:
        usage = wire_usage(infos)
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.total_tokens += usage.total_tokens
        total.prompt_tokens_details.cached_tokens += usage.prompt_tokens_details.cached_tokens
    slowest_s = max(info.generate_time_s for infos in prompts for info in infos)
    if slowest_s > 0:
        total.tokens_per_second = round(total.completion_tokens / slowest_s, 2)
    return total


def _best(token: TokenLogprob) -> dict[str, float]:
    """The alternatives and the token itself, which need not be among them."""
    found = {_name(other): _finite(other.logprob) for other in token.top}
    found.setdefault(_name(token), _finite(token.logprob))
    return found


def _name(token: TokenLogprob) -> str:
    """The text, or the bytes of a token that is only a part of a character."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB

"""A chat request to token ids: template, content guard, one BOS.

In: a resident model and a `ChatRequest`. Out: a `PreparedPrompt`. Blocking and free of shared
state: `service.py` runs it on a thread. Knows nothing of sampling or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osaurus.chat.guard import ContentGuard, Run, prepared
from osaurus.chat.history import THINKING_MARKERS, tool_views, views
from osaurus.errors import ContextLengthExceeded, InvalidField, TemplateError
from osaurus.runtime.model import LoadedModel, Tokenizer
from osaurus.types.chat import ChatRequest

#: Ordinary text has 3 to 5 characters a token. One with more for every token of the context is
#: counted in slices before it is encoded, and refused once it has filled that many contexts.
_SUSPICIOUS_CHARACTERS_PER_TOKEN = 16
_HOPELESS_CONTEXTS = 4
_SLICE_CHARACTERS = 65536

#: What the template's caller supplies itself.
RESERVED_KWARGS = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """`text` is the prompt as rendered; its tail says whether thinking is already open."""

    token_ids: list[int]
    text: str


def prepare_prompt(model: LoadedModel, request: ChatRequest) -> PreparedPrompt:
    """Raises `TemplateError` with the template's own words, or `InvalidField`."""
    reserved = RESERVED_KWARGS.intersection(request.template_kwargs)
    if reserved:
        raise InvalidField(
            f"chat_template_kwargs.{min(reserved)}", "is set by the server and cannot be given"
        )
    template = model.template
    if template is None:
        raise TemplateError(f"{model.model_id} has no chat template; it completes raw text only")
    control = prepared(model.control_texts)
    added = model.tokenizer.added_tokens
    markers = [pair for pair in THINKING_MARKERS if all(text in added for text in pair)]
    refusal: TemplateError | None = None
    for view in views(request.messages, markers=markers):
        tools = tool_views(request.tools)
        kwargs = dict(request.template_kwargs)
        guard = ContentGuard(control, [view, tools, kwargs])
        try:
            rendered = template.render(
                guard.protect(view),
                tools=guard.protect(tools) or None,
                add_generation_prompt=True,
                **guard.protect(kwargs),
            )
        except TemplateError as error:
            refusal = refusal or error
            continue
        runs = list(guard.runs(rendered))
        text = "".join(run.text for run in runs)
        _refuse_hopeless(model, text)
        return PreparedPrompt(token_ids=_encode(model.tokenizer, runs), text=text)
    if refusal is None:
        raise InvalidField("messages", "must hold at least one message")
    raise refusal


def _refuse_hopeless(model: LoadedModel, text: str) -> None:
    """Raises `ContextLengthExceeded` for a text several times too long, without encoding all
    of it: that takes a second a megabyte. The number of tokens is then an estimate."""
    context = model.context_tokens
    if len(text) <= _SUSPICIOUS_CHARACTERS_PER_TOKEN * context:
        return
    num_tokens = 0
    for end in range(_SLICE_CHARACTERS, len(text) + _SLICE_CHARACTERS, _SLICE_CHARACTERS):
        piece = text[end - _SLICE_CHARACTERS : end]
        num_tokens += len(model.tokenizer.encode(piece, parse_special=True, add_bos=False))
        if num_tokens > _HOPELESS_CONTEXTS * context:
            raise ContextLengthExceeded(round(num_tokens * len(text) / end), context)


def _encode(tokenizer: Tokenizer, runs: Sequence[Run]) -> list[int]:
    """Ids with exactly one BOS where the bundle wants one or its template wrote any."""
    ids: list[int] = []
    for run in runs:
        ids += tokenizer.encode(run.text, parse_special=not run.is_plain, add_bos=False)
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    first = next((i for i, token_id in enumerate(ids) if token_id != bos), len(ids))
    return [bos, *ids[first:]] if first or tokenizer.add_bos_to_chat else ids

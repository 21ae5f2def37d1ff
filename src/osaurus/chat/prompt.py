"""A chat request to token ids: template, content guard, one BOS, and where the answer starts.

In: a resident model and a `ChatRequest`. Out: a `PreparedPrompt`. Blocking and free of shared
state: `service.py` runs it on a thread. Knows nothing of sampling or engines.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from osaurus.chat.attribution import without_attribution
from osaurus.chat.guard import ContentGuard, Run, prepared
from osaurus.chat.history import THINKING_MARKERS, History
from osaurus.chat.prefix import HEAD_TIME_S, Rendered, head_of, scope_salt, stable_tokens
from osaurus.chat.schemas import tool_views, tools_in_words
from osaurus.chat.switches import template_switches
from osaurus.chat.traits import traits_of
from osaurus.errors import ContextLengthExceeded, InvalidField, NoChatTemplate, ToolsUnsupported
from osaurus.parsing.reasoning import REASONING_FORMATS, TAIL_TOKENS, Start, start_of
from osaurus.runtime.model import LoadedModel, Template, Tokenizer
from osaurus.types.cache import CacheHints
from osaurus.types.chat import ChatRequest, Message

#: Ordinary text has 3 to 5 characters a token. One with more for every token of the context is
#: counted in slices before it is encoded, and refused once it has filled that many contexts.
_SUSPICIOUS_CHARACTERS_PER_TOKEN = 16
_HOPELESS_CONTEXTS = 4
_SLICE_CHARACTERS = 65536

#: What the template's caller supplies itself.
RESERVED_KWARGS = frozenset({"self", "messages", "tools", "add_generation_prompt"})

#: The notation that is asked for in words where a template has no place for tools.
WORDED_FORMAT = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """`text` is the prompt as rendered. `start` is where the answer's first token belongs and
    `tool_format` how calls are written, both for the output machine. `cache` is what the prompt's
    keys and values are stored under beside its tokens. `notes` name every fallback that changed
    what the template sees."""

    token_ids: list[int]
    text: str
    start: Start = Start.CONTENT
    tool_format: str | None = None
    cache: CacheHints = field(default_factory=CacheHints)
    notes: tuple[str, ...] = ()


def prepare_prompt(
    model: LoadedModel, request: ChatRequest, *, keeps_attribution: bool = False
) -> PreparedPrompt:
    """`keeps_attribution` switches off the rule of `attribution.py`.

    Raises `TemplateError` with the template's own words, or `InvalidField`.
    """
    reserved = RESERVED_KWARGS.intersection(request.template_kwargs)
    if reserved:
        raise InvalidField(
            f"chat_template_kwargs.{min(reserved)}", "is set by the server and cannot be given"
        )
    template = model.template
    if template is None:
        raise NoChatTemplate(f"{model.model_id} has no chat template; it completes raw text only")
    if not request.messages:
        raise InvalidField("messages", "must hold at least one message")
    notes: list[str] = []
    if not keeps_attribution:
        messages = without_attribution(request.messages)
        if messages != request.messages:
            notes.append("the attribution line before the system message is not in the prompt")
            request = replace(request, messages=messages)
    return _Preparation(model, template, request, notes).prompt()


class _Preparation:
    """One request on its way to a prompt."""

    def __init__(
        self, model: LoadedModel, template: Template, request: ChatRequest, notes: list[str]
    ) -> None:
        self._model = model
        self._template = template
        self._request = request
        self._traits = traits_of(template)
        self._notes = notes
        formats = model.conventions.formats
        self._tool_format = formats.tool_format
        self._reasoning = formats.reasoning

    def prompt(self) -> PreparedPrompt:
        model, request = self._model, self._request
        words = self._tools_in_words()
        history = self._history(request.messages, words)
        self._notes += history.notes
        tools = [] if words else tool_views(request.tools)
        kwargs = self._kwargs()
        guard = self._guard([history.views, tools, kwargs])
        rendered = self._render(
            guard.protect(history.views), guard.protect(tools), guard.protect(kwargs)
        )
        runs = list(guard.runs(rendered))
        text = "".join(run.text for run in runs)
        _refuse_hopeless(model, text)
        token_ids, tail = _encode(model.tokenizer, runs)
        return PreparedPrompt(
            token_ids=token_ids,
            text=text,
            start=self._start(tail),
            tool_format=self._tool_format,
            cache=CacheHints(
                scope_salt=scope_salt(kwargs),
                stable_tokens=self._stable_tokens(words, tools, kwargs, token_ids),
            ),
            notes=tuple(self._notes),
        )

    def _history(self, messages: Sequence[Message], words: str) -> History:
        return History(messages, self._traits, markers=self._history_markers(), extra_system=words)

    def _guard(self, contents: Any) -> ContentGuard:
        control = prepared((*self._model.control_texts, *self._thinking_marks()))
        return ContentGuard(control, contents)

    def _stable_tokens(
        self, words: str, tools: Sequence[Any], kwargs: Mapping[str, Any], token_ids: list[int]
    ) -> int:
        if not self._model.needs_stable_boundary:
            return 0
        template = self._template.within(HEAD_TIME_S)

        def render(messages: Sequence[Message]) -> Rendered:
            views = self._history(messages, words).views
            guard = self._guard([views, tools, kwargs])
            rendered = template.render(
                guard.protect(views),
                tools=guard.protect(tools) or None,
                add_generation_prompt=False,
                **guard.protect(kwargs),
            )
            runs = list(guard.runs(rendered))
            ids, _ = _encode(self._model.tokenizer, runs)
            return Rendered(ids, "".join(run.text for run in runs))

        request = self._request
        head = head_of(request.messages, self._traits)
        return stable_tokens(self._template, head, request.tools, kwargs, token_ids, render)

    def _tools_in_words(self) -> str:
        """Tools as a text for the system message, where the template would drop them.

        Raises `ToolsUnsupported` for a family with a notation of its own, which a text of
        ours would contradict.
        """
        request = self._request
        if not request.tools or self._traits.has_tools:
            return ""
        if self._tool_format not in (None, WORDED_FORMAT):
            raise ToolsUnsupported(
                f"{self._model.model_id}: its chat template has no place for tools, although the "
                f"model writes {self._tool_format} calls; use a bundle with a tool template"
            )
        self._tool_format = WORDED_FORMAT
        self._notes.append("the template drops tools: they are described in the system message")
        return tools_in_words(request.tools, must_call=request.needs_call)

    def _kwargs(self) -> dict[str, Any]:
        request, model = self._request, self._model
        switches = template_switches(
            model.conventions,
            model.model_id,
            request.template_kwargs,
            needs_call=request.needs_call,
        )
        self._notes += switches.notes
        kwargs = dict(switches.kwargs)
        if request.needs_call and self._traits.reads_tool_choice:
            kwargs.setdefault("tool_choice", "required")
            if request.forced_tool is not None:
                kwargs.setdefault("tool_choice_name", request.forced_tool)
        return kwargs

    def _render(
        self, views: Sequence[dict[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        ends_with_answer = views[-1]["role"] == "assistant"
        is_history = ends_with_answer and not self._request.continue_final_message
        if is_history and not self._traits.takes_last_answer and "tool_calls" not in views[-1]:
            self._notes.append(
                "the template refuses an assistant's message at the end: the answer goes on with it"
            )
        elif not self._request.continue_final_message:
            return self._template.render(
                views,
                tools=tools or None,
                add_generation_prompt=self._request.add_generation_prompt,
                **kwargs,
            )
        if not ends_with_answer or "tool_calls" in views[-1]:
            raise InvalidField(
                "continue_final_message", "needs an assistant's message without calls at the end"
            )
        return self._continued(views, tools, kwargs)

    def _continued(
        self, views: Sequence[dict[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """A prompt that ends inside the last message, its white space kept.

        Where the template takes it, a mark behind the text shows where to cut; else the text
        follows the prompt of the messages before, as if the model had begun to write it.
        """
        final = views[-1]
        content = final["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if self._traits.takes_last_answer:
            mark = f"cut{secrets.token_hex(8)}"
            marked = text + mark
            whole = marked if isinstance(content, str) else [{"type": "text", "text": marked}]
            rendered = self._template.render(
                [*views[:-1], {**final, "content": whole}],
                tools=tools or None,
                add_generation_prompt=False,
                **kwargs,
            )
            before, found, _ = rendered.rpartition(mark)
            if found and before.endswith(text):
                return before
        before = self._template.render(
            views[:-1], tools=tools or None, add_generation_prompt=True, **kwargs
        )
        return before + text

    def _history_markers(self) -> list[tuple[str, str]]:
        """Pairs that a client may have left in past answers: the family's, and other tokens."""
        added = self._model.tokenizer.added_tokens
        pairs = [pair for pair in THINKING_MARKERS if all(text in added for text in pair)]
        envelope = REASONING_FORMATS.get(self._reasoning or "")
        if envelope is not None and not envelope.only_first:
            pairs.append((envelope.openers[0], envelope.closers[0]))
        return list(dict.fromkeys(pairs))

    def _thinking_marks(self) -> tuple[str, ...]:
        """Guarded too where they are no control tokens: a client's text must not decide
        whether the answer starts inside a block."""
        envelope = REASONING_FORMATS.get(self._reasoning or "")
        if envelope is None:
            return ()
        return (*envelope.openers, *envelope.closers)

    def _start(self, tail: str) -> Start:
        last = self._request.messages[-1]
        is_continued = last.role == "assistant" and (
            self._request.continue_final_message or not self._traits.takes_last_answer
        )
        if is_continued and any(mark in last.text for mark in self._thinking_marks()):
            tail = last.text  # what the client began to write counts as written
        return start_of(tail, self._reasoning)


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


def _encode(tokenizer: Tokenizer, runs: Sequence[Run]) -> tuple[list[int], str]:
    """Ids with exactly one BOS where the bundle wants one or its template wrote any, and the
    text of the last ids without what clients wrote."""
    ids: list[int] = []
    own: list[bool] = []
    for run in runs:
        ids += tokenizer.encode(run.text, parse_special=not run.is_plain, add_bos=False)
        own += [not run.is_plain] * (len(ids) - len(own))
    first_of_tail = max(0, len(ids) - TAIL_TOKENS)
    tail = b"".join(
        tokenizer.token_bytes(token_id) if is_own else b"\0"
        for token_id, is_own in zip(ids[first_of_tail:], own[first_of_tail:], strict=True)
    ).decode("utf-8", "replace")
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids, tail
    first = next((i for i, token_id in enumerate(ids) if token_id != bos), len(ids))
    return ([bos, *ids[first:]] if first or tokenizer.add_bos_to_chat else ids), tail

"""A chat request to token ids: template, content guard, one BOS, and where the answer starts.

In: a model and a `ChatRequest`. Out: a `PreparedPrompt`. Blocking and free of shared
state: `service.py` runs it on a thread. Knows nothing of sampling or engines.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from osaurus.chat.attribution import without_attribution
from osaurus.chat.encoding import encode_runs, refuse_hopeless
from osaurus.chat.guard import ContentGuard, prepared
from osaurus.chat.history import THINKING_MARKERS, History
from osaurus.chat.prefix import (
    HEAD_TIME_S,
    Rendered,
    head_of,
    prefix_hash,
    scope_salt,
    shared_text,
    stable_tokens,
)
from osaurus.chat.probes import traits_of
from osaurus.chat.schemas import tool_views, tools_in_words
from osaurus.chat.switches import (
    RESERVED_KWARGS,
    Switches,
    reads_switch,
    template_switches,
    usable,
)
from osaurus.chat.turns import answered
from osaurus.errors import InvalidField, NoChatTemplate, ToolsUnsupported
from osaurus.parsing.reasoning import REASONING_FORMATS, Start, start_of
from osaurus.runtime.model import PromptModel, Template
from osaurus.types.cache import CacheHints
from osaurus.types.chat import ChatRequest, Message

#: The notation that is asked for in words where a template has no place for tools.
WORDED_FORMAT = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """`text` is the prompt as rendered. `start` is where the answer's first token belongs and
    `tool_format` how calls are written, both for the output machine; `second_format` is another
    notation that the prompt shows calls in. `cache` is what the prompt's
    keys and values are stored under beside its tokens. `notes` name every fallback that changed
    what the template sees. `prefix_hash` names its system text and tools; `template_s` is the
    time that rendering took."""

    token_ids: list[int]
    text: str
    start: Start = Start.CONTENT
    tool_format: str | None = None
    second_format: str | None = None
    cache: CacheHints = field(default_factory=CacheHints)
    notes: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()  #: end this prompt's answer beside the model's own
    prefix_hash: str = ""
    template_s: float = 0.0


def prepare_prompt(
    model: PromptModel, request: ChatRequest, *, keeps_attribution: bool = False
) -> PreparedPrompt:
    """`keeps_attribution` switches off the rule of `attribution.py`.

    Raises `TemplateError` with the template's own words, or `InvalidField`.
    """
    return preparation(model, request, keeps_attribution=keeps_attribution).prompt()


def preparation(
    model: PromptModel, request: ChatRequest, *, keeps_attribution: bool = False
) -> Preparation:
    """What `prepare_prompt` begins with; raises what is wrong with the request itself."""
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
    answered(request.messages)  # here, where messages have the places that the client knows
    notes: list[str] = []
    if not keeps_attribution:
        messages = without_attribution(request.messages)
        if messages != request.messages:
            notes.append("the attribution line before the system message is not in the prompt")
            request = replace(request, messages=messages)
    return Preparation(model, template, request, notes)


class Preparation:
    """One request on its way to a prompt. `request` is what the prompt is made of, `head` its
    system messages."""

    def __init__(
        self, model: PromptModel, template: Template, request: ChatRequest, notes: list[str]
    ) -> None:
        self._model = model
        self._template = template
        self.request = request
        self._traits = traits_of(template)
        self.head = head_of(request.messages, self._traits)
        self._notes = notes
        self._conventions = usable(model.conventions, model.model_id, template)
        formats = model.conventions.formats
        self._tool_format = formats.tool_format
        self._second_format: str | None = None
        self._reasoning = formats.reasoning
        #: Words for the system message, tools and switches: what `prompt` rendered with.
        self._beside: tuple[str, Sequence[Any], Mapping[str, Any]] = ("", (), {})

    def shared_text(self, text: str) -> str:
        """What every turn of the conversation begins with, of the `text` that `prompt` made."""
        return shared_text(self.head, text, self._render_beside)

    def prompt(self) -> PreparedPrompt:
        model, request, traits = self._model, self.request, self._traits
        words = self._tools_in_words()
        tools = tool_views(
            () if words else request.tools,
            describes_tools=traits.joins_tool_description,
            describes_parameters=traits.joins_parameter_description,
        )
        switches = self._switches()
        words = "\n\n".join(filter(None, (switches.text, words)))
        history = self._history(request.messages, words)
        self._notes += history.notes
        if history.has_worded_calls:
            self._tool_format = self._tool_format or WORDED_FORMAT
            self._second_format = WORDED_FORMAT
        kwargs = switches.kwargs
        self._beside = (words, tools, kwargs)
        guard = self._guard([history.views, tools, kwargs])
        protected = [guard.protect(each) for each in (history.views, tools, kwargs)]
        started_s = time.monotonic()
        rendered = self._render(*protected)
        template_s = time.monotonic() - started_s
        runs = list(guard.runs(rendered))
        text = "".join(run.text for run in runs)
        refuse_hopeless(model, text)
        token_ids, tail = encode_runs(model.tokenizer, runs)
        start = self._start(tail)
        if closing := self._closing(start, switches):
            token_ids += model.tokenizer.encode(closing, parse_special=True, add_bos=False)
            text, start = text + closing, Start.CONTENT
        return PreparedPrompt(
            token_ids=token_ids,
            text=text,
            start=start,
            tool_format=self._tool_format,
            second_format=self._second_format,
            cache=CacheHints(
                scope_salt=scope_salt(kwargs),
                stable_tokens=self._stable_tokens(kwargs, token_ids),
            ),
            notes=tuple(self._notes),
            prefix_hash=prefix_hash(self.head, request.tools),
            template_s=template_s,
        )

    def _history(self, messages: Sequence[Message], words: str) -> History:
        return History(messages, self._traits, markers=self._history_markers(), extra_system=words)

    def _guard(self, contents: Any) -> ContentGuard:
        control = prepared((*self._model.control_texts, *self._thinking_marks()))
        return ContentGuard(control, contents)

    def _stable_tokens(self, kwargs: Mapping[str, Any], token_ids: list[int]) -> int:
        if not self._model.needs_stable_boundary:
            return 0
        tools = self.request.tools
        return stable_tokens(
            self._template, self.head, tools, kwargs, token_ids, self._render_beside
        )

    def _render_beside(self, messages: Sequence[Message]) -> Rendered:
        """Other messages with the prompt's own tools and switches, without the place of an
        answer."""
        words, tools, kwargs = self._beside
        views = self._history(messages, words).views
        guard = self._guard([views, tools, kwargs])
        rendered = self._template.within(HEAD_TIME_S).render(
            guard.protect(views),
            tools=guard.protect(tools) or None,
            add_generation_prompt=False,
            **guard.protect(kwargs),
        )
        runs = list(guard.runs(rendered))
        ids, _ = encode_runs(self._model.tokenizer, runs)
        return Rendered(ids, "".join(run.text for run in runs))

    def _tools_in_words(self) -> str:
        """Tools as a text for the system message, where the template would drop them.

        Raises `ToolsUnsupported` for a family with a notation of its own, which a text of
        ours would contradict.
        """
        request = self.request
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

    def _switches(self) -> Switches:
        request, model_id = self.request, self._model.model_id
        switches = template_switches(
            self._conventions, model_id, request.template_kwargs, needs_call=request.needs_call
        )
        self._notes += switches.notes
        kwargs = dict(switches.kwargs)
        if request.needs_call and self._traits.reads_tool_choice:
            kwargs.setdefault("tool_choice", "required")
            if request.forced_tool is not None:
                kwargs.setdefault("tool_choice_name", request.forced_tool)
        text = switches.text
        if text and (text not in self._template.source or self._reads_switch()):
            text = ""
        return replace(switches, kwargs=kwargs, text=text)

    def _reads_switch(self) -> bool:
        return reads_switch(self._conventions, self._model.model_id, self._template)

    def _closing(self, start: Start, switches: Switches) -> str:
        """What ends the block that a template opened although thinking is off; a note where
        the request's choice comes to nothing."""
        envelope = REASONING_FORMATS.get(self._reasoning or "")
        if envelope is None or switches.thinking is None or self._is_continued():
            return ""
        if start is not Start.CONTENT:
            if switches.thinking:
                return ""
            if switches.closes_block:
                return f"{envelope.closers[0]}\n\n"
            if switches.is_asked:
                self._notes.append("this model cannot stop thinking: its template opens a block")
        elif (
            switches.is_asked
            and not switches.thinking
            and not switches.text
            and not self._reads_switch()
        ):
            self._notes.append("the thinking switch has no effect: the template ignores it")
        return ""

    def _render(
        self, views: Sequence[dict[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        ends_with_answer = views[-1]["role"] == "assistant"
        is_history = ends_with_answer and not self.request.continue_final_message
        if is_history and not self._traits.takes_last_answer and "tool_calls" not in views[-1]:
            self._notes.append(
                "the template refuses an assistant's message at the end: the answer goes on with it"
            )
        elif not self.request.continue_final_message:
            return self._template.render(
                views,
                tools=tools or None,
                add_generation_prompt=self.request.add_generation_prompt,
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

    def _is_continued(self) -> bool:
        return self.request.messages[-1].role == "assistant" and (
            self.request.continue_final_message or not self._traits.takes_last_answer
        )

    def _start(self, tail: str) -> Start:
        last = self.request.messages[-1]
        if self._is_continued() and any(mark in last.text for mark in self._thinking_marks()):
            tail = last.text  # what the client began to write counts as written
        return start_of(tail, self._reasoning)

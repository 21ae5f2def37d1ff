"""The one way from a conversation to an answer, for every protocol and the terminal.

`open` resolves and leases the model, renders and encodes the prompt off the event loop, settles
the sampling values and starts the engine; `complete` is `open` and a fold. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from osaurus.chat.answer_grammar import AnswerGrammar, answer_grammar, shaped_machine
from osaurus.chat.arguments import ArgumentChecker
from osaurus.chat.completion import Completion, fold
from osaurus.chat.embeddings import embed, refuse_embedder
from osaurus.chat.inspection import InspectedPrompt, inspect_prompt
from osaurus.chat.observer import AnswerObserver, Observe
from osaurus.chat.prompt import PreparedPrompt, prepare_prompt
from osaurus.chat.raw_prompt import prepare_raw
from osaurus.chat.records import GenerationRecords, Submission
from osaurus.chat.rules import ChoiceRules
from osaurus.chat.sampling import effective_sampling, fit_to_context
from osaurus.chat.stream import ChatStream, Deadline
from osaurus.chat.threads import ModelThreads
from osaurus.chat.watched import output_of
from osaurus.errors import RequestTimedOut
from osaurus.parsing.budget import ThinkingBudget, arm_budget
from osaurus.parsing.build import build_machine
from osaurus.parsing.pieces import OutputMachine
from osaurus.runtime.degeneration import DegenerationDetector
from osaurus.runtime.live import LiveSettings
from osaurus.runtime.model import LoadedModel, PromptModel
from osaurus.runtime.pool import ModelRuntime
from osaurus.types.chat import ChatRequest
from osaurus.types.embeddings import EmbeddingRequest, Embeddings
from osaurus.types.engine import GenerationRequest

_T = TypeVar("_T")

BUDGET_NOT_ENFORCED = (
    "thinking_budget is not enforced: this model's thinking does not close with one token"
)

#: Prompts of one model prepared at once: tokenizing and rendering use a core each.
_NUM_PROMPT_THREADS = 2


class ChatEngine:
    """Serves chat requests from `runtime`. Use from one event loop; `close` when done.

    `keeps_attribution` switches off the rule of `attribution.py`. With `live` settings that is
    theirs to say, they fill in sampling values, and what has changed in them counts from the
    next request on.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        *,
        keeps_attribution: bool = False,
        live: LiveSettings | None = None,
    ) -> None:
        self.runtime = runtime
        self.live = live
        self.observe: Observe | None = None
        self.records = GenerationRecords()
        self._keeps_attribution = keeps_attribution
        self._threads = ModelThreads(_NUM_PROMPT_THREADS, name="osaurus-prompt")

    async def open(self, request: ChatRequest, *, suppress_progress: bool = False) -> ChatStream:
        """Start answering. The caller must close the stream, best by `async with`.

        Raises before any event: `ModelNotFound`, what is wrong with the bundle, `InvalidField`,
        `TemplateError`, `ContextLengthExceeded`, `RequestTimedOut`. Cancelling it leaves nothing
        behind.
        """
        users: Mapping[str, Any] = {}
        if self.live is not None:
            await self.live.refresh(self.runtime)
            users = self.live.sampling
        limit_s = self.runtime.settings.request_timeout_s
        if limit_s is None:
            return await self._open(request, users, suppress_progress, None)
        deadline = Deadline(asyncio.get_running_loop().time() + limit_s, limit_s)
        clock = asyncio.timeout_at(deadline.at)
        try:
            async with clock:
                return await self._open(request, users, suppress_progress, deadline)
        except TimeoutError:
            if not clock.expired():
                raise
            raise RequestTimedOut(limit_s) from None

    async def _open(
        self,
        request: ChatRequest,
        users: Mapping[str, Any],
        suppress_progress: bool,
        deadline: Deadline | None,
    ) -> ChatStream:
        asked_s = time.monotonic()
        await self._note_wait(request, users)
        held = await self.runtime.acquire(request.model)
        try:
            model = held.model
            model.admit()
            refuse_embedder(model)
            params = effective_sampling(request.sampling, model.sampling_defaults, users)
            prepare_s = time.monotonic()
            prepared = await self._threads.run(model.model_id, self._prepare, model, request)
            prepare_s = time.monotonic() - prepare_s
            prompt, checker, grammar = prepared
            num_tokens = len(prompt.token_ids)
            if (refusal := model.engine.refusal(num_tokens)) is not None:
                raise refusal
            params = fit_to_context(params, num_tokens, model.context_tokens)
            budgets = [_budget(model, prompt, request) for _ in range(request.n)]
            notes = prompt.notes
            if request.thinking_budget is not None and budgets[0] is None:
                notes = (*notes, BUDGET_NOT_ENFORCED)
            detectors = [self._detector() for _ in range(request.n)]
            watching = iter(detectors)
            stops = tuple(dict.fromkeys((*params.stop, *model.stop_texts)))
            request_id = request.request_id or f"chat-{secrets.token_hex(12)}"
            streams = model.engine.generate(
                GenerationRequest(
                    request_id=request_id,
                    token_ids=prompt.token_ids,
                    params=params,
                    make_output=lambda: output_of(
                        next(watching),
                        model.tokenizer,
                        stop=stops,
                        machine=_machine(model, prompt, request, grammar),
                    ),
                    stop_token_ids=model.eos_token_ids | prompt.end_ids,
                    n=request.n,
                    make_rule=iter(budgets).__next__,
                    make_constraint=None if grammar is None else grammar.fork,
                    cache=prompt.cache,
                )
            )
            recorder = self.records.submit(
                model.model_id,
                params,
                model.sampling_defaults,
                Submission(
                    request_id=request_id,
                    prompt_tokens=num_tokens,
                    num_choices=request.n,
                    decode_path="plain" if grammar is None else "constrained",
                    asked_s=asked_s,
                    template_s=prompt.template_s,
                    prepare_s=prepare_s,
                ),
            )
            observers: list[AnswerObserver] = [recorder]
            if self.observe is not None:
                observers.append(self.observe(model.model_id, asked_s))
            return ChatStream(
                held=held,
                streams=streams,
                rules=[
                    ChoiceRules(request, checker, notes, budget, detector)
                    for budget, detector in zip(budgets, detectors, strict=True)
                ],
                params=params,
                prompt_tokens=num_tokens,
                suppress_progress=suppress_progress,
                interval=self.runtime.settings.stream_interval,
                deadline=deadline,
                observers=observers,
                prefix_hash=prompt.prefix_hash,
            )
        except BaseException:
            held.release()
            raise

    async def _note_wait(self, request: ChatRequest, users: Mapping[str, Any]) -> None:
        """Record what a model that is not loaded will be asked, before its load, which may take
        minutes or fail."""
        if self.runtime.is_resident(request.model):
            return
        model_id = (await self.runtime.find(request.model)).model_id
        params = effective_sampling(request.sampling, {}, users)
        if not self.runtime.is_resident(model_id):
            self.records.wait(model_id, params)

    async def complete(self, request: ChatRequest) -> Completion:
        """The whole answer. Raises as `open` does, and what a choice failed with."""
        async with await self.open(request, suppress_progress=True) as stream:
            return await fold(stream)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Vectors of texts. Raises as `chat/embeddings.py` says; cancelling it stops the work."""
        if self.live is not None:
            await self.live.refresh(self.runtime)
        return await embed(self.runtime, self._threads, request)

    async def count_prompt(self, request: ChatRequest) -> int:
        """The tokens of the prompt that `open` would run. Runs and loads nothing, so a busy
        model answers too. Raises as `open` does, but for what only running a prompt meets."""
        return len((await self.prepare(request)).token_ids)

    async def prepare(self, request: ChatRequest) -> PreparedPrompt:
        """The prompt that `open` would run, made as for `count_prompt`."""
        return await self.consult(request.model, lambda model: self._prompt(model, request))

    async def inspect(self, request: ChatRequest) -> InspectedPrompt:
        """The prompt of a conversation and what it is made of, as for `count_prompt`."""
        return await self.consult(
            request.model,
            lambda model: inspect_prompt(model, request, keeps_attribution=self._keeps_line()),
        )

    async def consult(self, name: str, function: Callable[[PromptModel], _T]) -> _T:
        """What `function` makes of a model's files, on a thread; loads nothing."""
        if self.live is not None:
            await self.live.refresh(self.runtime)
        model = await self.runtime.read(name)
        return await self._threads.run(model.model_id, function, model)

    def _prepare(
        self, model: LoadedModel, request: ChatRequest
    ) -> tuple[PreparedPrompt, ArgumentChecker, AnswerGrammar | None]:
        prompt = self._prompt(model, request)
        return prompt, ArgumentChecker(request.tools), answer_grammar(model, prompt, request)

    def _prompt(self, model: PromptModel, request: ChatRequest) -> PreparedPrompt:
        if request.prompt is not None:
            return prepare_raw(model, request.prompt)
        return prepare_prompt(model, request, keeps_attribution=self._keeps_line())

    def _keeps_line(self) -> bool:
        return self._keeps_attribution if self.live is None else self.live.keeps_attribution

    def _detector(self) -> DegenerationDetector | None:
        """A choice's own, where the settings ask for one."""
        wanted = self.runtime.settings.degeneration_detection
        return DegenerationDetector() if wanted else None

    def close(self) -> None:
        """Let the prompt threads go. Streams must have been closed before."""
        self._threads.close()


def _budget(
    model: LoadedModel, prompt: PreparedPrompt, request: ChatRequest
) -> ThinkingBudget | None:
    """A choice's own bound on thinking, where it was asked for and can be enforced."""
    if request.thinking_budget is None:
        return None
    tokenizer = model.tokenizer
    return arm_budget(
        request.thinking_budget,
        model.conventions.formats.reasoning,
        start=prompt.start,
        encode=lambda text: tokenizer.encode(text, parse_special=True, add_bos=False),
        decode=lambda ids: b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace"),
    )


def _machine(
    model: LoadedModel,
    prompt: PreparedPrompt,
    request: ChatRequest,
    grammar: AnswerGrammar | None,
) -> OutputMachine | None:
    """A choice's own machine. Without tools it only strips what looks like a call."""
    if request.prompt is not None:
        return None  # raw text comes out as it is
    if grammar is not None and grammar.is_data:
        return shaped_machine(model, prompt)
    return build_machine(
        prompt.tool_format,
        model.conventions.formats.reasoning,
        tools=request.tools,
        start=prompt.start,
        second_format=prompt.second_format,
    )

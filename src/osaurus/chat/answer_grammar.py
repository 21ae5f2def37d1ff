"""What a request demands of the answer's tokens, as one grammar for the engine.

    thinking, if the model thinks  ->  calls in the family's notation, or the format asked for

"Schema after thinking" is part of the grammar, so neither engine nor sampler knows of it. Runs
on a prompt thread: compiling may take a moment. Errors name the request's field and, inside a
schema, the place as a JSON pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osaurus.chat.call_grammar import NotWritable, calls_expression
from osaurus.chat.prompt import PreparedPrompt
from osaurus.errors import InvalidField
from osaurus.grammar.locate import faulty_place
from osaurus.grammar.matcher import (
    GrammarConstraint,
    GrammarError,
    GrammarFault,
    compile_grammar,
)
from osaurus.grammar.schema import checked_schema, expression_problem
from osaurus.grammar.schema_walk import SchemaProblem
from osaurus.grammar.text import GrammarText, regex_literal
from osaurus.grammar.vocabulary import quoted
from osaurus.parsing.build import HARMONY
from osaurus.parsing.call_syntax import HARMONY_CALL, CallSyntax
from osaurus.parsing.formats import TOOL_FORMATS
from osaurus.parsing.pieces import OutputMachine
from osaurus.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, Start
from osaurus.parsing.shaped import ShapedMachine
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Tool
from osaurus.types.response_format import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
)

#: White space between thinking and the answer.
_GAP = r"/[ \t\r\n]{1,8}/?"


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """`constraint` is at its beginning: each choice forks it. `is_data`: the visible text is the
    format's and nothing in it is a marker."""

    constraint: GrammarConstraint
    is_data: bool

    def fork(self) -> GrammarConstraint:
        return self.constraint.fork()


def answer_grammar(
    model: LoadedModel, prompt: PreparedPrompt, request: ChatRequest
) -> AnswerGrammar | None:
    """None where nothing is demanded, or where a call is and its notation cannot be enforced:
    then the answer is judged when it is there. Raises `InvalidField`."""
    for tool in request.tools:
        if tool.strict:
            _checked_parameters(tool)
    if request.response_format is None and not request.needs_call:
        return None
    return _Answer(model, prompt, request).grammar()


def shaped_machine(model: LoadedModel, prompt: PreparedPrompt) -> OutputMachine | None:
    """The machine of an answer that is data; None when it has no thinking to separate."""
    reasoning = REASONING_FORMATS.get(model.conventions.formats.reasoning or "")
    return ShapedMachine(reasoning, prompt.start) if reasoning is not None else None


class _Answer:
    """One request's grammar in the making."""

    def __init__(self, model: LoadedModel, prompt: PreparedPrompt, request: ChatRequest) -> None:
        self._model = model
        self._prompt = prompt
        self._request = request
        self._text = GrammarText(model.vocabulary)
        is_raw = request.prompt is not None
        self._reasoning = None if is_raw else model.conventions.formats.reasoning
        self._is_harmony = HARMONY in (prompt.tool_format, self._reasoning)
        self._parts: list[Mapping[str, Any]] = []
        self._checked: Sequence[tuple[Tool, Mapping[str, Any]]] = ()

    def grammar(self) -> AnswerGrammar | None:
        request = self._request
        calls = self._calls() if request.tools else None
        if request.needs_call:
            if calls is None:
                return None
            return self._compiled(self._led(calls), is_data=False)
        if request.tools and calls is None:
            raise InvalidField(
                self._where,
                "cannot be combined with tools for this model, whose calls have no notation that "
                "can be enforced; leave one of them out",
            )
        body = self._final(self._format())
        return self._compiled(
            self._led(f"{calls} | {body}" if calls else body),
            is_data=calls is None and not self._is_harmony,
        )

    @property
    def _where(self) -> str:
        wanted = self._request.response_format
        return "tools" if wanted is None else wanted.where

    def _compiled(self, start: str, *, is_data: bool) -> AnswerGrammar:
        vocabulary = self._text.vocabulary
        try:
            constraint = compile_grammar(self._text.finished(start, self._parts), vocabulary)
        except GrammarError as error:
            raise self._refusal(error) from error
        self._go_on(constraint)
        return AnswerGrammar(constraint, is_data)

    def _go_on(self, constraint: GrammarConstraint) -> None:
        """What the client has begun to write of a shaped answer counts as written."""
        request = self._request
        if not request.continue_final_message or request.needs_call:
            return
        if self._prompt.start is not Start.CONTENT:
            return
        written = request.messages[-1].text
        try:
            for token in self._model.tokenizer.encode(written, parse_special=False, add_bos=False):
                constraint.commit(token)
        except GrammarFault as fault:
            raise InvalidField(
                "messages", f"the last one does not begin an answer as {self._where} has it"
            ) from fault

    def _refusal(self, error: GrammarError) -> InvalidField:
        words = str(error).partition("\n")[0][:300]
        wanted = self._request.response_format
        if isinstance(wanted, JsonSchemaFormat) and isinstance(wanted.schema, Mapping):
            place, found = faulty_place(wanted.schema, self._text.vocabulary)
            return InvalidField(wanted.where, f"{place}: cannot be enforced: {found or words}")
        if wanted is not None:
            return InvalidField(wanted.where, f"cannot be enforced: {words}")
        for tool, schema in self._checked:
            place, found = faulty_place(schema, self._text.vocabulary)
            if found:
                where = _parameters_of(tool)
                return InvalidField(where, f"{place}: cannot be enforced: {found}")
        return InvalidField("tools", f"cannot be enforced: {words}")

    # -- thinking

    def _led(self, body: str) -> str:
        """The body behind the thinking that this prompt leaves room for."""
        body = self._text.rule(body)
        if self._is_harmony:
            return self._harmony_led(body)
        reasoning = REASONING_FORMATS.get(self._reasoning or "")
        if reasoning is None:
            return body
        rest = self._text.rule(f"{self._text.text_until(reasoning.closers)} {_GAP} {body}")
        if self._prompt.start is not Start.CONTENT:
            return rest
        if self._is_closed(reasoning):
            return body
        openers = " | ".join(map(self._text.literal, reasoning.openers))
        return f"({openers}) {rest} | {body}"

    def _is_closed(self, reasoning: ReasoningFormat) -> bool:
        """Whether the prompt says that there is to be no thinking."""
        if self._request.template_kwargs.get("enable_thinking") is False:
            return True
        return self._prompt.text.rstrip().endswith(reasoning.closers)

    def _harmony_led(self, body: str) -> str:
        text = self._text
        thought = text.text_until(["<|end|>"])
        begin = text.literal("<|start|>assistant")
        analysis = text.rule(f"{text.literal('<|channel|>analysis<|message|>')} {thought} {begin}")
        if self._prompt.start is Start.CONTENT:
            return f"{analysis}* {body}"
        return f"{thought} {begin} {analysis}* {body}"

    def _final(self, body: str) -> str:
        if not self._is_harmony:
            return body
        head = self._text.literal("<|channel|>final")
        constrain = self._text.literal(" <|constrain|>json")
        return f"{head} ({constrain})? {self._text.literal('<|message|>')} {body}"

    # -- formats

    def _format(self) -> str:
        wanted = self._request.response_format
        text = self._text
        match wanted:
            case JsonObjectFormat():
                return text.json({"type": "object"})
            case JsonSchemaFormat():
                try:
                    return text.json(checked_schema(wanted.schema))
                except SchemaProblem as problem:
                    raise InvalidField(wanted.where, str(problem)) from problem
            case RegexFormat():
                if words := expression_problem(wanted.pattern):
                    raise InvalidField(wanted.where, words)
                return text.terminal(regex_literal(wanted.pattern))
            case ChoiceFormat():
                return text.rule(" | ".join(map(quoted, wanted.choices)))
            case LarkFormat():
                self._parts.append({"name": "answer", "lark_grammar": wanted.grammar})
                return "@answer"
            case None:
                raise AssertionError("no format to write")

    # -- calls

    def _calls(self) -> str | None:
        """The calls that this request allows, or None where they cannot be written."""
        request = self._request
        syntax = self._syntax()
        if syntax is None:
            return None
        wanted = [tool for tool in request.tools if request.forced_tool in (None, tool.name)]
        self._checked = [(tool, _checked_parameters(tool)) for tool in wanted]
        only_one = request.forced_tool is not None or not request.parallel_tool_calls
        try:
            return calls_expression(self._text, syntax, self._checked, only_one=only_one)
        except NotWritable:
            self._text = GrammarText(self._model.vocabulary)
            return None

    def _syntax(self) -> CallSyntax | None:
        if self._is_harmony:
            return HARMONY_CALL
        found = TOOL_FORMATS.get(self._prompt.tool_format or "")
        if found is None or not found.writes:
            return None
        template = self._model.template
        source = "" if template is None else template.source
        added = self._model.tokenizer.added_tokens
        return next(
            (
                syntax
                for syntax in found.writes
                if all(text in source or text in added for text in syntax.needs)
            ),
            found.writes[-1],
        )


def _parameters_of(tool: Tool) -> str:
    return f"tools.{tool.name}.parameters"


def _checked_parameters(tool: Tool) -> Mapping[str, Any]:
    """A tool's parameters as an object's schema. Raises `InvalidField`."""
    schema = dict(tool.parameters)
    if schema.setdefault("type", "object") != "object":
        raise InvalidField(_parameters_of(tool), "#/type: must be object")
    if not schema.get("properties") and not schema.keys() - {"type", "properties", "required"}:
        schema["additionalProperties"] = False
    try:
        checked = checked_schema(schema, lenient=not tool.strict)
    except SchemaProblem as problem:
        raise InvalidField(_parameters_of(tool), str(problem)) from problem
    return checked if isinstance(checked, Mapping) else {}

"""Tool calls and thinking through the real `openai` client, whatever way the model writes them.

Field cases F01, F05, F09, F11, F13, F15(d), F19 and F43 over HTTP: the scripted engine says a
family's own notation byte by byte, everything above it is the real thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api.conftest import Running, Start
from api.scripted_engine import (
    CHATML,
    ByteTokenizer,
    Hold,
    Say,
    ScriptedEngine,
    ScriptedSource,
    Step,
)
from osaurus.parsing.selection import BundleFacts, FormatChoice
from osaurus.runtime.conventions import Conventions
from osaurus.types.engine import GenerationRequest
from unit.parsing.transcripts import WRITERS, reasoning_of

TEMPLATES = Path(__file__).parents[1] / "golden" / "templates"

ASK: list[Any] = [{"role": "user", "content": "What is two plus two?"}]


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = _tool("get_weather", city={"type": "string"})
NOTE = _tool("note", text={"type": "string"})
BERN = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
OSLO = BERN.replace("Bern", "Oslo")
WRITE_NOTE = '<tool_call>{"name": "note", "arguments": {"text": "four"}}</tool_call>'


def _conventions(
    tool_format: str | None = "json", reasoning: str | None = "think", model_type: str = ""
) -> Conventions:
    return Conventions(
        formats=FormatChoice(
            tool_format=tool_format,
            tool_origin="stamp",
            reasoning=reasoning,
            reasoning_origin="stamp",
        ),
        facts=BundleFacts(model_type=model_type),
    )


@dataclass
class Server:
    """A server whose models say what `texts` holds for them."""

    running: Running
    source: ScriptedSource
    texts: dict[str, str] = field(default_factory=dict)

    def ask(self, text: str, model: str = "m", **fields: Any) -> ChatCompletion:
        self.texts[model] = text
        fields = {"messages": ASK, "tools": [WEATHER, NOTE], **fields}
        return self.running.client().chat.completions.create(model=model, **_given(fields))

    def stream(self, text: str, model: str = "m", **fields: Any) -> list[ChatCompletionChunk]:
        self.texts[model] = text
        fields = {"messages": ASK, "tools": [WEATHER, NOTE], **fields}
        stream = self.running.client().chat.completions.create(
            model=model, stream=True, **_given(fields)
        )
        return list(stream)

    def prompt(self, model: str = "m") -> str:
        engine = self.source.engines[model]
        return self.source.tokenizer.decode(list(engine.requests[-1].token_ids))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _serve(
    start: Start,
    conventions: dict[str, Conventions],
    *,
    template: str = "json",
    marks: Sequence[str] = (),
) -> Server:
    texts: dict[str, str] = {}

    def engine(name: str) -> ScriptedEngine:
        def script(request: GenerationRequest, index: int) -> Sequence[Step]:
            return [Say(texts[name])]

        return ScriptedEngine(script, max_context_tokens=1 << 20)

    source = ScriptedSource(
        {name: engine(name) for name in conventions},
        tokenizer=ByteTokenizer(others=marks),
        template=CHATML if template == "chatml" else (TEMPLATES / f"{template}.jinja").read_text(),
        conventions=conventions,
    )
    return Server(start(source=source), source, texts)


@pytest.fixture
def server(start: Start) -> Server:
    """One thinking model that writes JSON calls, its think tags being tokens."""
    return _serve(start, {"m": _conventions()}, marks=("<think>", "</think>"))


def _extra(part: Any, name: str) -> Any:
    return (part.model_extra or {}).get(name)


def _joined(chunks: Iterable[ChatCompletionChunk], name: str) -> str:
    found = []
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.delta.content if name == "content" else _extra(choice.delta, name)
            found.append(text or "")
    return "".join(found)


def _streamed_calls(chunks: Iterable[ChatCompletionChunk]) -> list[tuple[str, str, str]]:
    """Id, name and joined arguments by index; id, type and name must come once, first."""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                if piece.index not in calls:
                    assert piece.index == len(calls)
                    assert piece.type == "function"
                    assert piece.id
                    assert piece.function.name
                    calls[piece.index] = [piece.id, piece.function.name, ""]
                else:
                    assert (piece.id, piece.type, piece.function.name) == (None, None, None)
                arguments = piece.function.arguments or ""
                assert len(arguments) <= 1024
                calls[piece.index][2] += arguments
    return [(call[0], call[1], call[2]) for _, call in sorted(calls.items())]


def _plain_calls(answer: ChatCompletion) -> list[tuple[str, str]]:
    return [
        (call.function.name, call.function.arguments)
        for call in answer.choices[0].message.tool_calls or ()
        if call.type == "function"
    ]


def _remarks(answer: ChatCompletion | ChatCompletionChunk) -> dict[str, Any]:
    return _extra(answer.choices[0], "osaurus") or {}


def test_f01_parallel_calls_keep_their_index_in_every_family(start: Start) -> None:
    server = _serve(
        start,
        {name: _conventions(name, reasoning_of(name)) for name in WRITERS},
        template="xml_function",
    )
    calls: list[Any] = [("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Oslo"})]
    for name, writers in WRITERS.items():
        text = writers[0](calls)
        options: dict[str, Any] = {"extra_body": {"enable_thinking": False}}
        chunks = server.stream(text, name, **options)
        found = _streamed_calls(chunks)
        assert [(call, json.loads(arguments)) for _, call, arguments in found] == calls, name
        assert found[0][0] != found[1][0]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert _joined(chunks, "content") == ""
        plain = server.ask(text, name, **options)
        assert _plain_calls(plain) == [(call, arguments) for _, call, arguments in found]
        assert plain.choices[0].finish_reason == "tool_calls"
        assert plain.choices[0].message.content is None


def test_long_arguments_come_in_pieces_that_join_to_the_whole(server: Server) -> None:
    text = WRITE_NOTE.replace("four", "x" * 5000)
    ((_, _, arguments),) = _streamed_calls(server.stream(text))
    assert json.loads(arguments) == {"text": "x" * 5000}


@pytest.mark.parametrize(
    "text",
    ["Hello.", "<think>\nhm\n</think>\n\nFour.", "<think>hm</think>" + BERN, "I look. " + BERN],
)
def test_f05_every_delta_before_the_last_has_content(server: Server, text: str) -> None:
    first, *middle, last = server.stream(text)
    assert first.choices[0].delta.model_dump(exclude_unset=True) == {
        "role": "assistant",
        "content": "",
    }
    for chunk in middle:
        assert isinstance(chunk.choices[0].delta.content, str)
        assert chunk.choices[0].finish_reason is None
        assert "finish_reason" in chunk.choices[0].model_fields_set
    assert last.choices[0].finish_reason in ("stop", "tool_calls")
    same = {
        (chunk.id, chunk.created, chunk.model, chunk.object) for chunk in (first, *middle, last)
    }
    assert len(same) == 1


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_f09_a_call_cut_by_the_length_limit_is_no_call(server: Server, tool_choice: str) -> None:
    text = WRITE_NOTE.replace("four", "x" * 400)
    fields: dict[str, Any] = {"max_tokens": 60, "tool_choice": tool_choice}
    plain = server.ask(text, **fields)
    chunks = server.stream(text, **fields)
    assert plain.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert _plain_calls(plain) == _streamed_calls(chunks) == []
    assert plain.choices[0].message.content == _joined(chunks, "content") == ""
    assert _remarks(plain)["tool_call_error"] is True


def test_f09_a_whole_call_before_the_cut_one_is_reported(server: Server) -> None:
    text = "Look: " + BERN + OSLO
    for limit in (len("Look: " + BERN) + 20, len("Look: " + BERN)):
        plain = server.ask(text, max_tokens=limit)
        chunks = server.stream(text, max_tokens=limit)
        assert plain.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
        assert _plain_calls(plain) == [("get_weather", '{"city":"Bern"}')]
        assert [call[1:] for call in _streamed_calls(chunks)] == _plain_calls(plain)
        assert _joined(chunks, "content").strip() == "Look:"


def test_a_broken_call_is_said_to_be_one_and_shows_no_markup(server: Server) -> None:
    text = 'Well. <tool_call>{"name": "note", "arguments": {"text": oops}}</tool_call>'
    plain = server.ask(text)
    chunks = server.stream(text)
    assert plain.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert plain.choices[0].message.content == _joined(chunks, "content")
    assert "<tool_call>" not in (plain.choices[0].message.content or "")
    assert _remarks(plain) == _remarks(chunks[-1]) == {"tool_call_error": True}


def test_f11_none_withholds_the_tools_and_strips_what_looks_like_a_call(server: Server) -> None:
    for text, visible in (("Four.", "Four."), ("Four. " + BERN, "Four. ")):
        plain = server.ask(text, tool_choice="none")
        chunks = server.stream(text, tool_choice="none")
        assert plain.choices[0].message.content == _joined(chunks, "content") == visible
        assert plain.choices[0].message.tool_calls is None
        assert plain.choices[0].finish_reason == "stop"
        assert "get_weather" not in server.prompt()


def test_f11_auto_takes_a_call_or_none(server: Server) -> None:
    assert server.ask("Four.", tool_choice="auto").choices[0].message.content == "Four."
    assert _plain_calls(server.ask(BERN, tool_choice="auto")) == [
        ("get_weather", '{"city":"Bern"}')
    ]
    assert "get_weather" in server.prompt()


NAMED = {"type": "function", "function": {"name": "note"}}


@pytest.mark.parametrize(
    ("tool_choice", "text", "calls"),
    [
        ("required", WRITE_NOTE, ["note"]),
        ("required", "I write. " + BERN + WRITE_NOTE, ["get_weather", "note"]),
        (NAMED, WRITE_NOTE, ["note"]),
        (NAMED, BERN + WRITE_NOTE + WRITE_NOTE, ["note"]),
    ],
)
def test_f11_a_required_call_that_was_made_is_answered(
    server: Server, tool_choice: Any, text: str, calls: list[str]
) -> None:
    plain = server.ask(text, tool_choice=tool_choice)
    chunks = server.stream(text, tool_choice=tool_choice)
    assert [name for name, _ in _plain_calls(plain)] == calls
    assert [name for _, name, _ in _streamed_calls(chunks)] == calls
    assert plain.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert _joined(chunks, "content") == (plain.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("tool_choice", "text"),
    [
        ("required", "Four."),
        ("required", ""),
        ("required", BERN.replace("get_weather", "absent")),
        (NAMED, "Four."),
        (NAMED, BERN),
    ],
)
def test_f11_a_required_call_that_was_not_made_is_an_error_and_no_answer(
    server: Server, tool_choice: Any, text: str
) -> None:
    for ask in (server.ask, server.stream):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(text, tool_choice=tool_choice)
        assert caught.value.code == "tool_choice_unsatisfied"
        assert caught.value.param == "tool_choice"


def test_one_call_only_where_parallel_ones_are_not_wanted(server: Server) -> None:
    plain = server.ask(BERN + OSLO, parallel_tool_calls=False)
    chunks = server.stream(BERN + OSLO, parallel_tool_calls=False)
    assert _plain_calls(plain) == [("get_weather", '{"city":"Bern"}')]
    assert [call[1:] for call in _streamed_calls(chunks)] == _plain_calls(plain)
    assert _remarks(plain)["tool_calls_left_out"] == 1


def test_arguments_that_do_not_fit_their_schema_are_reported_and_not_repaired(
    server: Server,
) -> None:
    text = BERN.replace('{"city": "Bern"}', '{"city": 5, "x": null}') + OSLO
    plain = server.ask(text)
    assert _plain_calls(plain)[0] == ("get_weather", '{"city":5,"x":null}')
    faults = _remarks(plain)["tool_argument_errors"]
    assert {(fault["call"], fault["tool"], fault["path"]) for fault in faults} == {
        (0, "get_weather", "/city"),
        (0, "get_weather", ""),
    }
    unknown = _remarks(server.ask(BERN.replace("get_weather", "absent")))
    assert "no tool of this name" in unknown["tool_argument_errors"][0]["message"]


MENTION = 'I could answer with `<tool_call>{"name":"x"}</tool_call>` or with <thought>, but no.'


@pytest.mark.parametrize(
    "thinking",
    [MENTION, "I could write `<tool_call>` here.", "Or `<function=` perhaps.", MENTION * 200],
)
def test_f13_markers_that_thinking_only_mentions_stay_thinking(
    server: Server, thinking: str
) -> None:
    # The template opens a block for this family, so the answer starts inside.
    server.source.template = (TEMPLATES / "xml_function.jinja").read_text()
    text = thinking + "</think>\n\nDone."
    plain = server.ask(text).choices[0].message
    chunks = server.stream(text)
    assert _extra(plain, "reasoning_content") == _joined(chunks, "reasoning_content") == thinking
    assert (plain.content or "").strip() == _joined(chunks, "content").strip() == "Done."
    assert plain.tool_calls is None


def test_f13_a_mention_is_sent_on_while_the_model_still_thinks(start: Start) -> None:
    """The stream is not silent until thinking ends: the mention arrives before the rest."""
    engine = ScriptedEngine(
        lambda request, index: [Say(MENTION + " So"), Hold("read"), Say("</think>Done.")]
    )
    source = ScriptedSource(
        {"m": engine},
        template=(TEMPLATES / "xml_function.jinja").read_text(),
        conventions={"m": _conventions()},
    )
    client = start(source=source).client().chat.completions
    extra: dict[str, Any] = {"enable_thinking": True}
    stream = client.create(model="m", messages=ASK, tools=[WEATHER], stream=True, extra_body=extra)
    thought, content = "", ""
    for chunk in stream:
        thought += _extra(chunk.choices[0].delta, "reasoning_content") or ""
        content += chunk.choices[0].delta.content or ""
        if "but no." in thought:
            engine.open_gate("read")
    assert (thought.strip(), content) == (MENTION + " So", "Done.")


def test_f13_a_prompt_without_a_think_marker_starts_in_content(server: Server) -> None:
    server.source.template = CHATML
    answer = server.ask("It thinks.", tools=None)
    assert answer.choices[0].message.content == "It thinks."
    assert _extra(answer.choices[0].message, "reasoning_content") is None


def test_f13_a_prompt_that_closed_thinking_starts_in_content(server: Server) -> None:
    answer = server.ask("Done.", extra_body={"enable_thinking": False})
    assert server.prompt().endswith("<think>\n\n</think>\n\n")
    assert answer.choices[0].message.content == "Done."


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ()])
def test_a_think_marker_in_the_question_does_not_hide_the_answer(
    start: Start, marks: tuple[str, ...]
) -> None:
    server = _serve(start, {"m": _conventions()}, template="chatml", marks=marks)
    question = [{"role": "user", "content": "What does <think>"}]
    answer = server.ask("It opens a block.", messages=question, tools=None)
    assert answer.choices[0].message.content == "It opens a block."


def test_f13_without_tools_markup_in_a_fence_is_text_and_outside_is_stripped(
    server: Server,
) -> None:
    fenced = f"Write this:\n```xml\n{BERN}\n```\nThat is all."
    assert server.ask(fenced, tools=None).choices[0].message.content == fenced
    answer = server.ask(f"Now. {BERN}", tools=None).choices[0].message
    assert (answer.content or "").strip() == "Now."
    assert answer.tool_calls is None


def test_f15d_thinking_that_the_limit_cut_says_length_and_has_no_content(server: Server) -> None:
    server.source.template = (TEMPLATES / "xml_function.jinja").read_text()
    for tools in ([WEATHER], None):
        plain = server.ask("So many thoughts about it.", max_tokens=16, tools=tools)
        message, usage = plain.choices[0].message, plain.usage
        assert (message.content, _extra(message, "reasoning_content")) == ("", "So many thoughts")
        assert plain.choices[0].finish_reason == "length"
        assert usage is not None
        assert usage.completion_tokens == 16
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 16
        assert _remarks(plain)["unclosed_reasoning"] is True
        chunks = server.stream("So many thoughts about it.", max_tokens=16, tools=tools)
        assert _joined(chunks, "reasoning_content") == "So many thoughts"
        assert _joined(chunks, "content") == ""
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
            "length"
        ]


def _history(arguments: Any) -> list[Any]:
    call = {"name": "get_weather", "arguments": arguments}
    return [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 C"},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize("template", ["json", "xml_function", "deepseek_v31", "chatml"])
def test_f19_malformed_arguments_in_the_history_are_rendered_raw(
    start: Start, template: str
) -> None:
    server = _serve(start, {"m": _conventions()}, template=template)
    raw = ["{", "not json", "[1,2]"]
    for arguments in raw:
        server.ask("Four.", messages=_history(arguments))
        assert arguments in server.prompt()
    server.ask("Four.", messages=_history(""))
    counts = []
    for arguments in ('{"city": "Bern"}', '{"city":"Bern"}', {"city": "Bern"}):
        usage = server.ask("Four.", messages=_history(arguments)).usage
        assert usage is not None
        counts.append(usage.prompt_tokens)
    if template != "deepseek_v31":  # which writes the client's text as it is
        assert len(set(counts)) == 1


def test_f43_logprobs_cover_the_visible_text_of_thinking_and_calling_answers(
    server: Server,
) -> None:
    text = "<think>hm</think>né, so: " + BERN
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    plain = server.ask(text, **fields).choices[0]
    chunks = server.stream(text, **fields)
    assert plain.logprobs is not None
    assert plain.logprobs.content is not None
    joined = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert joined == plain.logprobs.content
    assert all(len(entry.top_logprobs) == 3 for entry in joined)
    data = bytes(byte for entry in joined for byte in entry.bytes or ())
    assert data.decode() == plain.message.content == _joined(chunks, "content")


def test_an_empty_answer_to_tool_results_is_an_answer_with_a_flag(server: Server) -> None:
    answer = server.ask("", messages=_history("{}")[:-1])
    assert answer.choices[0].message.content == ""
    assert _remarks(answer)["empty_after_tool_results"] is True


def test_a_template_without_tools_gets_them_in_words_and_says_so(start: Start) -> None:
    server = _serve(start, {"m": _conventions(None, None)}, template="chatml")
    answer = server.ask(BERN)
    assert _plain_calls(answer) == [("get_weather", '{"city":"Bern"}')]
    assert server.prompt().startswith("<|im_start|>system\n")
    assert '"name": "get_weather"' in server.prompt()
    assert "drops tools" in _remarks(answer)["notes"][0]


@pytest.mark.parametrize("tool_format", [None, "mistral", "gemma"])
@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_f19_calls_in_the_notation_of_a_history_in_words_are_stripped(
    start: Start, tool_format: str | None, fields: dict[str, Any]
) -> None:
    server = _serve(start, {"m": _conventions(tool_format, None)}, template="chatml")
    for text in ("Four. " + BERN, f"Four. {BERN}</tool_call>"):
        answer = server.ask(text, messages=_history("{}"), **fields)
        chunks = server.stream(text, messages=_history("{}"), **fields)
        assert answer.choices[0].message.content == _joined(chunks, "content") == "Four. "
        assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in server.prompt()
    if tool_format == "mistral":
        own = 'Four. [TOOL_CALLS][{"name": "get_weather", "arguments": {}}]'
        answer = server.ask(own, messages=_history("{}"), **fields)
        assert answer.choices[0].message.content == "Four. "


def test_a_template_without_tools_of_a_family_with_its_own_calls_is_a_400(start: Start) -> None:
    server = _serve(start, {"m": _conventions("mistral", None)}, template="chatml")
    with pytest.raises(openai.BadRequestError) as caught:
        server.ask("Four.")
    assert (caught.value.code, caught.value.param) == ("tools_unsupported_by_template", "tools")
    assert server.ask("Four.", tools=None).choices[0].message.content == "Four."


def test_an_answer_can_be_continued_where_it_was_cut(server: Server) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Two plus two "}]
    server.ask("is four.", messages=messages, extra_body={"continue_final_message": True})
    assert server.prompt().endswith("Two plus two ")
    server.ask("is four.", messages=messages)
    assert server.prompt().endswith("<|im_start|>assistant\n")


def test_a_stop_string_sees_visible_text_only(server: Server) -> None:
    text = "<think>STOP</think>Yes. " + BERN.replace("Bern", "STOP") + "END"
    answer = server.ask(text, stop=["STOP"])
    assert _plain_calls(answer) == [("get_weather", '{"city":"STOP"}')]
    assert answer.choices[0].message.content == "Yes. END"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(text.encode())


@pytest.mark.parametrize("before", ["", "<think>STOP</think>", BERN])
@pytest.mark.parametrize("stop", ["STOP", "TO"])
def test_usage_counts_what_was_generated_up_to_the_stop_string(
    server: Server, before: str, stop: str
) -> None:
    text = before + "Yes. STOP and more"
    generated = text[: text.rindex("STOP")] + "STOP"[: "STOP".index(stop) + len(stop)]
    visible = "Yes. " + "STOP"[: "STOP".index(stop)]
    plain = server.ask(text, stop=[stop])
    chunks = server.stream(text, stop=[stop], stream_options={"include_usage": True})
    assert plain.choices[0].message.content == visible
    assert plain.choices[0].finish_reason == ("tool_calls" if before == BERN else "stop")
    for usage in (plain.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens == len(generated.encode())
        assert usage.completion_tokens_details is not None
        thought = "<think>STOP</think>" if before.startswith("<think>") else ""
        assert bool(usage.completion_tokens_details.reasoning_tokens) is bool(thought)


def test_a_thinking_budget_reaches_the_engine_as_a_rule_of_each_choice(server: Server) -> None:
    tokens = server.source.tokenizer.added_tokens

    def rules(**fields: Any) -> list[Any]:
        """The rules that the last request would give its engine's choices."""
        made: list[Any] = []
        generate = server.source.engines["m"].generate

        def spy(request: GenerationRequest) -> Any:
            assert request.make_rule is not None
            made.extend(request.make_rule() for _ in range(request.n))
            return generate(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.source.engines["m"], "generate", spy)
            server.ask("Four.", **fields)
        return made

    assert rules() == [None]
    first, second = rules(n=2, extra_body={"thinking_budget": 2})
    first.observe(tokens["<think>"])
    first.observe(65)
    assert first.forced is None
    first.observe(66)
    assert first.forced == tokens["</think>"]
    assert second.forced is None


def test_a_thinking_budget_that_cannot_be_enforced_is_said(start: Start) -> None:
    server = _serve(start, {"m": _conventions()})  # its tags are several tokens each
    answer = server.ask("Four.", extra_body={"thinking_budget": 3})
    remarks = _extra(answer.choices[0], "osaurus")
    assert any("thinking_budget" in note for note in remarks["notes"])


def test_a_negative_thinking_budget_is_a_400_that_names_it(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.ask("Four.", extra_body={"thinking_budget": -1})
    assert refused.value.param == "thinking_budget"

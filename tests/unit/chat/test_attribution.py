"""Proves which line is kept out of a prompt, and that nothing else ever is."""

from __future__ import annotations

import time

import pytest

from api.scripted_engine import CHATML, ByteTokenizer, ScriptedEngine
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.attribution import without_attribution
from osaurus.chat.prompt import prepare_prompt
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, MediaPart, Message, TextPart

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
PROMPT = "You are a coding agent; be brief.\nRules = none; end."
USER = Message(role="user", content="hi")


def _system(content: str) -> Message:
    return Message(role="system", content=content)


@pytest.mark.parametrize(
    "content",
    [
        f"{LINE}\n{PROMPT}",
        f"{LINE}\r\n\r\n{PROMPT}",
        f"\n {LINE} {PROMPT}",
        LINE + PROMPT,  # as gateways join parts
        f"{LINE[:-1]}\n{PROMPT}",
        f"X-Agent-Attribution: id=1; at=2026-01-02T03:04:05;\n{PROMPT}",
    ],
)
def test_the_line_before_a_system_message_is_left_out(content: str) -> None:
    assert without_attribution([_system(content), USER]) == (_system(PROMPT), USER)


def test_a_part_or_a_message_that_is_only_the_line_is_left_out() -> None:
    parts = (TextPart(text=LINE), TextPart(text=PROMPT))
    first = Message(role="system", content=parts)
    (kept, _) = without_attribution([first, USER])
    assert kept.content == parts[1:]
    joined = Message(role="system", content=(TextPart(text=f"{LINE}\n{PROMPT}"),))
    assert without_attribution([joined, USER])[0].text == PROMPT
    assert without_attribution([_system(LINE), _system(PROMPT)]) == (_system(PROMPT),)
    assert without_attribution([_system(LINE)]) == (_system(LINE),)


@pytest.mark.parametrize(
    "messages",
    [
        (USER,),
        (),
        (Message(role="user", content=f"{LINE}\n{PROMPT}"),),
        (_system(PROMPT), _system(f"{LINE}\n{PROMPT}")),
        (USER, _system(f"{LINE}\n{PROMPT}")),
        (_system(f"{PROMPT}\n{LINE}\n"), USER),
        (_system("x-anthropic-billing-header: how to read it\nIt is a line."), USER),
        (_system("x-anthropic-billing-header:\n" + PROMPT), USER),
        (_system("x-request-id: a=1; b=2;\n" + PROMPT), USER),
        (_system("billing: a=1; b=2;\n" + PROMPT), USER),
        (_system("x-billing: half=open and so on\n" + PROMPT), USER),
        (Message(role="system", content=(MediaPart(kind="image", source="x"),)), USER),
    ],
)
def test_the_same_words_elsewhere_stay(messages: tuple[Message, ...]) -> None:
    assert without_attribution(messages) == messages


@pytest.mark.parametrize(
    "text",
    ["x-" + "billing" * 200_000, LINE + " a=1;" * 200_000, " " * 1_000_000, "x-billing: a" * 9],
)
def test_no_text_makes_the_rule_slow(text: str) -> None:
    started = time.perf_counter()
    without_attribution([_system(text), USER])
    assert time.perf_counter() - started < 0.5


def _model() -> LoadedModel:
    return LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(),
        template=ChatTemplate(CHATML),
    )


def test_requests_that_differ_in_the_line_have_the_same_prompt_and_are_told_so() -> None:
    model = _model()
    prompts = [
        prepare_prompt(
            model,
            ChatRequest(model="m", messages=(_system(LINE.replace("36ee5", c) + PROMPT), USER)),
        )
        for c in ("00001", "abcde")
    ]
    plain = prepare_prompt(model, ChatRequest(model="m", messages=(_system(PROMPT), USER)))
    assert prompts[0].token_ids == prompts[1].token_ids == plain.token_ids
    assert any("attribution line" in note for note in prompts[0].notes)
    assert plain.notes == ()


def test_the_rule_can_be_switched_off() -> None:
    request = ChatRequest(model="m", messages=(_system(f"{LINE}\n{PROMPT}"), USER))
    prompt = prepare_prompt(_model(), request, keeps_attribution=True)
    assert LINE in prompt.text
    assert prompt.notes == ()

"""Proves what a prompt says to the cache: its scope, and where its shared part ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from api.scripted_engine import CHATML, ByteTokenizer, ScriptedEngine
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.prefix import scope_salt
from osaurus.chat.prompt import PreparedPrompt, prepare_prompt
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import LoadedModel
from osaurus.types.chat import ChatRequest, Message, Tool

SYSTEM = Message(role="system", content="Be brief.")
WEATHER = Tool(name="get_weather", description="The weather.")
TIME = Tool(name="get_time", description="The time.")

TOOLS_FIRST = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHATML
#: As several families do: tools stand before the last message of the user's.
TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last %}{% for t in tools or [] %}[{{ t | tojson }}]"
    "{% endfor %}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user query') }}{% endif %}" + CHATML
)
CLOSES_ALONE = CHATML + "{% if not add_generation_prompt %}<bos>{% endif %}"


class CountingTemplate:
    """A chat template that counts its renders, those with a time limit of their own too."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source)
        self.source = source
        self.renders: list[Sequence[Mapping[str, Any]]] = []

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        self.renders.append(messages)
        return self._template.render(messages, **kwargs)

    def within(self, timeout_s: float) -> CountingTemplate:
        return self

    def check(self) -> None:
        self._template.check()


def _model(template: Any, *, needs_boundary: bool = True) -> LoadedModel:
    if isinstance(template, str):
        template = ChatTemplate(template)
    return LoadedModel(
        model_id="m",
        engine=ScriptedEngine(),
        tokenizer=ByteTokenizer(),
        template=template,
        needs_stable_boundary=needs_boundary,
    )


def _prompt(
    model: LoadedModel, *messages: Message, tools: Sequence[Tool] = (), **switches: Any
) -> PreparedPrompt:
    return prepare_prompt(
        model,
        ChatRequest(
            model="m", messages=messages, tools=tuple(tools), template_kwargs=dict(switches)
        ),
    )


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _shared_text(prompt: PreparedPrompt) -> str:
    return ByteTokenizer().decode(prompt.token_ids[: prompt.cache.stable_tokens])


# The scope.


@pytest.mark.parametrize(
    ("switches", "salt"),
    [
        ({}, ""),
        ({"enable_thinking": True}, "reasoning=on"),
        ({"enable_thinking": False, "reasoning_effort": None}, "reasoning=off"),
        ({"enable_thinking": True, "thinking": True}, "reasoning=on"),
        ({"thinking": False, "reasoning_effort": " High "}, "reasoning=off|effort=high"),
        ({"reasoning_effort": "LOW", "reasoning_strength": 3}, "effort=low|strength=3"),
        ({"reasoning_effort": "a|strength=b"}, "effort=a%7cstrength=b"),
        ({"tool_choice": "required", "tool_choice_name": "f", "documents": []}, ""),
    ],
)
def test_the_scope_names_what_changes_the_meaning_of_tokens(
    switches: dict[str, Any], salt: str
) -> None:
    assert scope_salt(switches) == salt


def test_the_scope_comes_from_resolved_switches_not_from_the_requests_spelling() -> None:
    model = _model(CHATML + "{% if enable_thinking %}<think>{% endif %}")
    qwen = LoadedModel(
        model_id="m",
        engine=model.engine,
        tokenizer=model.tokenizer,
        template=model.template,
        conventions=Conventions(template_defaults={"enable_thinking": False}),
    )
    salts = {
        _prompt(qwen, _user("q"), **switches).cache.scope_salt
        for switches in ({}, {"enable_thinking": False}, {"reasoning_effort": "none"})
    }
    assert salts == {"reasoning=off"}
    assert _prompt(qwen, _user("q"), enable_thinking=True).cache.scope_salt == "reasoning=on"


def test_the_choice_among_tools_never_parts_caches() -> None:
    model = _model(TOOLS_FIRST + "{{ tool_choice }}")
    requests = [
        ChatRequest(model="m", messages=(_user("q"),), tools=(WEATHER,), **fields)
        for fields in ({}, {"needs_call": True}, {"needs_call": True, "forced_tool": "get_weather"})
    ]
    assert {prepare_prompt(model, request).cache.scope_salt for request in requests} == {""}


# The boundary.


def test_the_shared_part_is_the_system_message() -> None:
    prompt = _prompt(_model(CHATML), SYSTEM, _user("hi"))
    assert _shared_text(prompt) == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_the_shared_part_holds_the_tools() -> None:
    prompt = _prompt(_model(TOOLS_FIRST), SYSTEM, _user("hi"), tools=[WEATHER, TIME])
    shared = _shared_text(prompt)
    assert "get_weather" in shared
    assert shared.endswith("Be brief.<|im_end|>\n")


@pytest.mark.parametrize("template", [NO_SYSTEM, NEEDS_USER, CLOSES_ALONE])
def test_where_the_head_cannot_stand_alone_it_is_what_two_conversations_share(
    template: str,
) -> None:
    shared = _shared_text(_prompt(_model(template), SYSTEM, _user("hi")))
    assert "Be brief." in shared
    assert "hi" not in shared
    assert "0" not in shared


def test_tools_without_a_system_message_have_a_boundary_too() -> None:
    shared = _shared_text(_prompt(_model(TOOLS_FIRST), _user("hi"), tools=[WEATHER]))
    assert "get_weather" in shared
    assert "hi" not in shared
    worded = _shared_text(_prompt(_model(CHATML), _user("hi"), tools=[WEATHER]))
    assert "get_weather" in worded  # described in a system message of ours
    assert "hi" not in worded


def test_tools_that_wander_with_the_last_message_are_shared_only_where_they_stand() -> None:
    model = _model(TOOLS_LAST)
    first = _prompt(model, SYSTEM, _user("hi"), tools=[WEATHER])
    answer = Message(role="assistant", content="Hello.")
    later = _prompt(model, SYSTEM, _user("hi"), answer, _user("more"), tools=[WEATHER])
    for prompt in (first, later):
        shared = _shared_text(prompt)
        assert "Be brief." in shared
        assert "hi" not in shared


def test_a_late_system_message_belongs_to_the_conversation() -> None:
    late = Message(role="system", content="Now be long.")
    shared = _shared_text(_prompt(_model(CHATML), SYSTEM, _user("hi"), late, _user("more")))
    assert shared == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_the_boundary_is_a_prefix_in_tokens_whatever_the_user_writes() -> None:
    model = _model(NO_SYSTEM)
    for text in ("hi", "0", "z", "\n\nhi", "Be brief.", "<|im_end|>"):
        prompt = _prompt(model, SYSTEM, _user(text))
        assert 0 < prompt.cache.stable_tokens <= len(prompt.token_ids)
        assert "Be brief." in _shared_text(prompt)


def test_later_turns_render_nothing_more() -> None:
    for source, num_extra in ((CHATML, 1), (NEEDS_USER, 3)):
        template = CountingTemplate(source)
        model = _model(template)
        conversation = [SYSTEM, _user("hi")]
        _prompt(_model(template, needs_boundary=False), *conversation)  # its traits are probed
        template.renders.clear()
        first = _prompt(model, *conversation)
        assert len(template.renders) == 1 + num_extra
        for turn in range(3):
            conversation += [Message(role="assistant", content="x"), _user(f"turn {turn}")]
            template.renders.clear()
            prompt = _prompt(model, *conversation)
            assert len(template.renders) == 1
            assert _shared_text(prompt) == _shared_text(first)


def test_a_template_that_takes_no_head_alone_is_asked_once() -> None:
    template = CountingTemplate(NEEDS_USER)
    model = _model(template)
    _prompt(model, SYSTEM, _user("hi"))
    template.renders.clear()
    _prompt(model, Message(role="system", content="Another."), _user("hi"))
    assert len(template.renders) == 1 + 2


@pytest.mark.parametrize(
    ("needs_boundary", "messages"),
    [(True, (_user("hi"),)), (False, (SYSTEM, _user("hi")))],
    ids=["nothing to share", "no layer that needs it"],
)
def test_nothing_is_rendered_that_is_not_needed(
    needs_boundary: bool, messages: tuple[Message, ...]
) -> None:
    template = CountingTemplate(CHATML)
    model = _model(template, needs_boundary=needs_boundary)
    _prompt(model, *messages)
    template.renders.clear()
    prompt = _prompt(model, *messages)
    assert len(template.renders) == 1
    assert prompt.cache.stable_tokens == 0


def test_other_tools_or_switches_have_their_own_boundary() -> None:
    model = _model("{% if enable_thinking %}think {% endif %}" + TOOLS_FIRST)
    shared = [
        _shared_text(_prompt(model, SYSTEM, _user("hi"), tools=tools, enable_thinking=is_on))
        for tools in ([WEATHER], [TIME], [WEATHER, TIME])
        for is_on in (True, False)
    ]
    assert len(set(shared)) == 6
    assert all(text.endswith("Be brief.<|im_end|>\n") for text in shared)


def test_many_system_messages_keep_the_memory_bounded() -> None:
    template = CountingTemplate(CHATML)
    model = _model(template)
    heads = [Message(role="system", content=f"Be {i}.") for i in range(40)]
    for head in heads:
        assert head.text in _shared_text(_prompt(model, head, _user("hi")))
    template.renders.clear()
    _prompt(model, heads[-1], _user("hi"))
    assert len(template.renders) == 1
    _prompt(model, heads[0], _user("hi"))
    assert len(template.renders) == 3


def test_a_template_that_fails_beside_the_prompt_costs_the_boundary_alone() -> None:
    source = (
        "{% if not add_generation_prompt %}{{ raise_exception('always ask') }}{% endif %}" + CHATML
    )
    prompt = _prompt(_model(source), SYSTEM, _user("hi"))
    assert prompt.cache.stable_tokens == 0
    assert prompt.text.endswith("<|im_start|>assistant\n")

"""`POST /admin/render-prompt`: the prompt that a chat would run, told and not run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import ScriptedEngine, ScriptedSource, say_hello
from osaurus.server.serve import ServerConfig

PATH = "/admin/render-prompt"
SYSTEM: Any = {"role": "system", "content": "Be brief."}
HI: Any = {"role": "user", "content": "hi"}
HELLO: Any = {"role": "assistant", "content": "Hello."}
MORE: Any = {"role": "user", "content": "and more"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"at":1}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
TOOLS_FIRST = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rendered(running: Running, *messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, **fields}
    answer = httpx2.post(running.url + PATH, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def ids(body: dict[str, Any]) -> list[str]:
    return [section["id"] for section in body["sections"]]


@pytest.fixture
def with_tools(start: Start) -> Running:
    source = ScriptedSource({"m": ScriptedEngine(say_hello)}, template=TOOLS_FIRST)
    return start(source=source)


def test_the_prompt_is_the_one_that_a_chat_runs_and_nothing_is_loaded_for_it(
    running: Running,
) -> None:
    told = rendered(running, SYSTEM, HI)
    assert running.source.loads == []
    assert running.engine.requests == []
    answer = running.client().chat.completions.create(model="m", messages=[SYSTEM, HI])
    (ran,) = running.engine.requests
    tokenizer = running.tokenizer
    text = told["rendered_prompt"]
    assert tokenizer.encode(text, parse_special=True, add_bos=False) == list(ran.token_ids)
    assert answer.usage is not None
    assert told["prompt_tokens"] == len(ran.token_ids) == answer.usage.prompt_tokens


def test_every_section_has_the_length_and_digest_of_its_text(with_tools: Running) -> None:
    told = rendered(with_tools, SYSTEM, HI, HELLO, MORE, tools=[CLOCK])
    tools = (
        '[{"description":"The time.","name":"clock","parameters":'
        '{"properties":{"at":{"type":"integer"}},"type":"object"}}]'
    )
    texts = [
        ("request_system", "system", "Be brief."),
        ("tools", "system", tools),
        ("history", "user", "hi"),
        ("history", "assistant", "Hello."),
        ("user", "user", "and more"),
    ]
    assert told["sections"] == [
        {"id": name, "role": role, "chars": len(text), "sha256": digest(text)}
        for name, role, text in texts
    ]


def test_calls_and_results_are_history_also_behind_the_last_question(with_tools: Running) -> None:
    told = rendered(with_tools, HI, CALLING, RESULT, tools=[CLOCK])
    assert ids(told) == ["tools", "user", "history", "history"]
    call = {
        "content": "",
        "reasoning_content": None,
        "tool_calls": [{"arguments": '{"at":1}', "id": "c1", "name": "clock"}],
    }
    text = json.dumps(call, separators=(",", ":"), sort_keys=True)
    assert told["sections"][2]["sha256"] == digest(text)
    assert told["sections"][3]["sha256"] == digest("noon")


def test_sections_are_those_that_the_request_has(running: Running) -> None:
    assert ids(rendered(running, HI)) == ["user"]
    assert ids(rendered(running, SYSTEM, HI)) == ["request_system", "user"]
    assert ids(rendered(running, HI, tools=[CLOCK], tool_choice="none")) == ["user"]


def test_the_static_prefix_is_the_same_in_every_turn_and_begins_each_prompt(
    with_tools: Running,
) -> None:
    conversation = [SYSTEM, HI]
    static: set[str] = set()
    for answer in ("Hello.", "0", "z"):
        told = rendered(with_tools, *conversation, tools=[CLOCK])
        assert told["rendered_prompt"].startswith(told["static_prefix"])
        static.add(told["static_prefix"])
        conversation += [{"role": "assistant", "content": answer}, {**HI, "content": answer}]
    (text,) = static
    assert "clock" in text
    assert "Be brief." in text
    assert text.endswith("<|im_start|>user\n")


def test_the_static_prefix_follows_the_system_text_and_holds_no_users_text(
    running: Running,
) -> None:
    for users in ("hi", "0", "z", "zz0", ""):
        told = rendered(running, SYSTEM, {**HI, "content": users})
        assert told["static_prefix"] == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        )
    other = rendered(running, {**SYSTEM, "content": "Be long."}, HI)
    assert "Be long." in other["static_prefix"]


def test_a_template_that_refuses_other_conversations_costs_the_static_prefix_alone(
    start: Start,
) -> None:
    template = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}x"
    source = ScriptedSource({"m": ScriptedEngine(say_hello)}, template=template)
    told = rendered(start(source=source), SYSTEM, HI)
    assert (told["static_prefix"], told["rendered_prompt"]) == ("", "x")


def test_the_prefix_hash_is_of_the_system_text_and_the_tools_alone(with_tools: Running) -> None:
    facts = {
        "system": "Be brief.",
        "tools": [
            {
                "name": "clock",
                "description": "The time.",
                "parameters": CLOCK["function"]["parameters"],
            }
        ],
    }
    canonical = json.dumps(facts, separators=(",", ":"), sort_keys=True)
    first = rendered(with_tools, SYSTEM, HI, tools=[CLOCK])["prefix_hash"]
    assert first == digest(canonical)[:32]
    later = rendered(with_tools, SYSTEM, HI, HELLO, MORE, tools=[CLOCK], temperature=0)
    assert later["prefix_hash"] == first
    others = {
        rendered(with_tools, HI, tools=[CLOCK])["prefix_hash"],
        rendered(with_tools, SYSTEM, HI)["prefix_hash"],
        rendered(with_tools, HI)["prefix_hash"],
    }
    assert len(others | {first}) == 4


def test_keys_in_another_order_have_the_same_prefix_hash(with_tools: Running) -> None:
    function = dict(reversed(CLOCK["function"].items()))
    turned = {"function": function, "type": "function"}
    hashes = {rendered(with_tools, HI, tools=[one])["prefix_hash"] for one in (CLOCK, turned)}
    assert len(hashes) == 1


def test_the_line_that_changes_with_every_request_is_in_no_section(running: Running) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"
    told = [
        rendered(running, {**SYSTEM, "content": line.format(i) + "Be brief."}, HI) for i in (1, 2)
    ]
    assert told[0] == told[1] == rendered(running, SYSTEM, HI)


def test_answers_and_role_chunks_carry_the_same_hash(running: Running) -> None:
    known = rendered(running, SYSTEM, HI)["prefix_hash"]
    chat = running.client().chat.completions
    whole = chat.create(model="m", messages=[SYSTEM, HI])
    assert whole.model_extra is not None
    assert whole.model_extra["prefix_hash"] == known
    chunks = [
        chunk.model_dump()
        for chunk in chat.create(model="m", messages=[SYSTEM, HI], n=2, stream=True)
    ]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        is_opening = choice["delta"].get("role") == "assistant"
        assert chunk.get("prefix_hash") == (known if is_opening else None)
    assert sum("prefix_hash" in chunk for chunk in chunks) == 2


def test_a_bad_request_is_told_as_a_chat_would_tell_it(running: Running) -> None:
    def refused(body: Any) -> tuple[int, str, str | None]:
        answer = httpx2.post(running.url + PATH, json=body, timeout=30)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    assert refused({"model": "m", "messages": []}) == (400, "invalid_value", "messages")
    assert refused({"model": "m", "messages": [RESULT]})[2] == "messages[0].tool_call_id"
    assert refused({"model": "other", "messages": [HI]})[:2] == (404, "model_not_found")


def test_a_guest_of_an_open_server_may_chat_and_not_see_prompts(start: Start) -> None:
    running = start(config=ServerConfig(port=0, expose=True))
    stranger = {"X-Forwarded-For": "1.2.3.4"}
    body = {"model": "m", "messages": [HI]}
    for path, status in (("/v1/chat/completions", 200), (PATH, 403), ("/v1" + PATH, 403)):
        answer = httpx2.post(running.url + path, json=body, headers=stranger, timeout=30)
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "local_only"
    assert httpx2.post(running.url + PATH, json=body, timeout=30).status_code == 200
